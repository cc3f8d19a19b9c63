"""The free list: which pages nobody holds.

Never-used pages are a counter, returned pages a stack that is touched only on demand, so a large pool costs nothing
to construct. `take` is all or nothing. Pages handed out by `take` carry a mark, and only these can be given back, so
a double or foreign free is found before anything changes. Not thread-safe; no device, tree or request is known here.

Invariants: (A1) a page is on the stack at most once; (A2) pages on the stack are below `next_unused`; (A3) a marked
page is not free; (A4) ``num_taken`` is the number of marks.
"""
from libc.stdint cimport INT32_MAX, uint8_t, uint32_t
from libc.string cimport memchr, memcpy, memset

import numpy as np

cimport numpy as cnp

from kvpool_ext.memory cimport calloc, free, malloc
from kvpool_ext.tokens cimport borrow_pages
from kvpool_ext.types cimport CHECKED, page_t

cnp.import_array()

cdef extern from *:
    """
    #include <stdint.h>
    #ifdef __linux__
    #include <sys/mman.h>
    #include <unistd.h>
    #endif
    /* Hand whole memory pages between the two addresses back to the system; they read as zeros when touched again. */
    static void kvpool_untouch(void *start, void *end) {
    #if defined(__linux__) && defined(MADV_DONTNEED)
        uintptr_t size = (uintptr_t)sysconf(_SC_PAGESIZE);
        uintptr_t first = ((uintptr_t)start + size - 1) / size * size, last = (uintptr_t)end / size * size;
        if (first < last) madvise((void *)first, last - first, MADV_DONTNEED);
    #endif
    }
    """
    void kvpool_untouch(void *start, void *end) noexcept nogil

cdef enum:
    RUN_PIECE = 32   # pages, no more than bits of a word
    # Free ids that the stack may fall short of its height before its memory is given back: of 4 bytes a page
    # nothing is left in a full pool, and a memory page comes back once for at least so many ids.
    MANY_IDS = 1 << 18


cdef class PageAllocator:
    """A fixed set of pages `0 .. num_pages - 1`, handed out and taken back in O(1) a page.

    Parameters
    ----------
    num_pages : int
        Size of the pool in pages, at least 0 and at most 2^31 - 1.
    """

    def __cinit__(self, num_pages):
        if isinstance(num_pages, bool) or not isinstance(num_pages, (int, np.integer)):
            raise TypeError(f"num_pages must be an int, got {type(num_pages).__name__}")
        if not 0 <= num_pages <= INT32_MAX:
            raise ValueError(f"num_pages must be in 0 .. {INT32_MAX}, got {num_pages}")
        self.num_pages = num_pages
        self.stack_size = 0
        self.stack_height = 0
        self.next_unused = 0
        self.num_taken = 0
        self.stack = <page_t *>malloc((self.num_pages + 1) * sizeof(page_t))
        self.taken = <unsigned char *>calloc(self.num_pages + 1, 1)
        if self.stack == NULL or self.taken == NULL:
            raise MemoryError(f"no memory for a free list of {num_pages} pages")

    def __dealloc__(self):
        free(self.stack)
        free(self.taken)

    @property
    def num_free(self):
        """Pages that nobody holds."""
        return self.c_num_free()

    def take(self, n):
        """Hand out `n` pages as a new int32 array ``[n]``, or None (and no change) when fewer are free.

        The same calls give the same page ids in every process.
        """
        cdef cnp.npy_intp count = _count(n, "take")
        if count > self.c_num_free():
            return None
        cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT32, 0)
        cdef page_t *data = <page_t *>cnp.PyArray_DATA(out)
        self.pop(data, count)
        self.mark(data, count)
        if CHECKED:
            self.check()
        return out

    def give(self, pages):
        """Take back `pages`: each handed out by `take`, each once; else ValueError and nothing changes."""
        cdef cnp.ndarray array = borrow_pages(pages)
        cdef const page_t *data = <const page_t *>cnp.PyArray_DATA(array)
        cdef Py_ssize_t n = cnp.PyArray_DIM(array, 0)
        cdef Py_ssize_t bad = self.claim_marks(data, n)
        if bad >= 0:
            page = data[bad]
            if page >= self.num_pages:
                raise ValueError(f"page {page} is not one of the {self.num_pages} pages of this pool")
            if page in array[:bad]:
                raise ValueError(f"page {page} is given twice in one call")
            raise ValueError(f"page {page} was not handed out by take, or was given back already")
        self.push(data, n)
        if CHECKED:
            self.check()

    def is_free(self, page):
        """Whether nobody holds `page`; walks the free list."""
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page {page} is not one of the {self.num_pages} pages of this pool")
        cdef page_t wanted = page
        cdef Py_ssize_t i
        if wanted >= self.next_unused:
            return True
        if self.taken[wanted]:
            return False
        for i in range(self.stack_size):
            if self.stack[i] == wanted:
                return True
        return False

    def free_pages(self):
        """All free pages as a new int32 array, used ones first; for checks and pictures."""
        cdef cnp.npy_intp n = self.stack_size
        cdef cnp.ndarray used = cnp.PyArray_EMPTY(1, &n, cnp.NPY_INT32, 0)
        memcpy(cnp.PyArray_DATA(used), self.stack, n * sizeof(page_t))
        return np.concatenate([used, np.arange(self.next_unused, self.num_pages, dtype=np.int32)])

    def taken_pages(self):
        """All pages handed out by `take` and not given back, ascending, int32."""
        cdef cnp.npy_intp n = self.num_pages
        cdef cnp.ndarray marks = cnp.PyArray_EMPTY(1, &n, cnp.NPY_UINT8, 0)
        memcpy(cnp.PyArray_DATA(marks), self.taken, n)
        return np.flatnonzero(marks).astype(np.int32)

    def check(self):
        """Verify the invariants in O(pages); RuntimeError names what is out of sync."""
        free_now, taken_now = self.free_pages(), self.taken_pages()
        seen = np.bincount(free_now, minlength=self.num_pages)
        if (seen > 1).any():
            raise RuntimeError(f"page {int(np.argmax(seen))} is out of sync: twice in the free list")
        if taken_now.size != self.num_taken:
            raise RuntimeError(
                f"the free list is out of sync: {taken_now.size} pages are marked, {self.num_taken} counted"
            )
        both = np.intersect1d(free_now, taken_now)
        if both.size:
            raise RuntimeError(f"page {both[0]} is out of sync: free and taken at once")

    # ---- moves of the ledger: trusted, unmarked, without the GIL

    cdef Py_ssize_t c_num_free(self) noexcept nogil:
        return self.stack_size + (self.num_pages - self.next_unused)

    cdef void pop(self, page_t *out, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t used = min(n, self.stack_size), i
        cdef page_t first = self.next_unused
        self.stack_size -= used
        memcpy(out, self.stack + self.stack_size, used * sizeof(page_t))
        for i in range(n - used):
            out[used + i] = first + <page_t>i
        self.next_unused = first + <page_t>(n - used)
        if self.stack_height - self.stack_size > MANY_IDS:
            kvpool_untouch(self.stack + self.stack_size, self.stack + self.stack_height)
            self.stack_height = self.stack_size

    cdef void push(self, const page_t *pages, Py_ssize_t n) noexcept nogil:
        memcpy(self.stack + self.stack_size, pages, n * sizeof(page_t))
        self.stack_size += n
        self.stack_height = max(self.stack_height, self.stack_size)

    cdef void mark(self, const page_t *pages, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i = 0, k, count
        cdef uint8_t *marks = self.taken
        while i < n:
            count = run_length(pages + i, n - i)
            if count >= RUN_PIECE:
                memset(marks + pages[i], 1, count)
            else:
                count = min(<Py_ssize_t>RUN_PIECE, n - i)
                for k in range(count):
                    marks[pages[i + k]] = 1
            i += count
        self.num_taken += n

    cdef Py_ssize_t claim_marks(self, const page_t *pages, Py_ssize_t n) noexcept nogil:
        """Unmark all `pages` and answer -1, or change nothing and answer where the first bad one is."""
        cdef Py_ssize_t i = 0, k, count
        while i < n:
            count = run_length(pages + i, n - i)
            if count >= RUN_PIECE:
                if not self.claim_run(pages[i], count):
                    break
            else:
                count = min(<Py_ssize_t>RUN_PIECE, n - i)
                if not self.claim_piece(pages + i, count):
                    break
            i += count
        # The bad one is among those of the last piece: one by one up to it.
        while i < n and 0 <= pages[i] < self.num_pages and self.taken[pages[i]]:
            self.taken[pages[i]] = 0
            i += 1
        if i == n:
            self.num_taken -= n
            return -1
        for k in range(i):
            self.taken[pages[k]] = 1
        return i

    cdef bint claim_run(self, page_t first, Py_ssize_t n) noexcept nogil:
        """Unmark `n` pages from `first` on, all or none."""
        if first < 0 or first + n > self.num_pages or memchr(self.taken + first, 0, n) != NULL:
            return False
        memset(self.taken + first, 0, n)
        return True

    cdef bint claim_piece(self, const page_t *pages, Py_ssize_t n) noexcept nogil:
        """Unmark up to a piece of pages that lie anywhere, all or none; without a branch a page."""
        cdef uint8_t *marks = self.taken
        cdef uint32_t num_pages = <uint32_t>self.num_pages, largest = 0
        cdef uint32_t were_taken = 0, bit
        cdef Py_ssize_t k
        for k in range(n):
            largest = max(largest, <uint32_t>pages[k])
        if largest >= num_pages:
            return False
        for k in range(n):
            bit = marks[pages[k]]
            marks[pages[k]] = 0  # now: so a page that is named twice is found unmarked
            were_taken |= bit << k
        if were_taken == 0xFFFFFFFFu >> (RUN_PIECE - n):
            return True
        for k in range(n):
            marks[pages[k]] |= <uint8_t>((were_taken >> k) & 1)
        return False


cdef Py_ssize_t run_length(const page_t *pages, Py_ssize_t n) noexcept nogil:
    """How many of the first pages have ids that count up, at least 1: a pool hands out most of its pages so."""
    cdef Py_ssize_t i = 0, k
    cdef uint32_t gaps, first = <uint32_t>pages[0]
    # In pieces whose compare has no branch, for the compiler to make vectors of.
    while i + RUN_PIECE <= n and <uint32_t>pages[i + 1] - <uint32_t>pages[i] == 1:
        gaps = 0
        for k in range(RUN_PIECE):
            gaps |= <uint32_t>pages[i + k] ^ (first + <uint32_t>(i + k))
        if gaps:
            break
        i += RUN_PIECE
    i = max(i - 1, 0)
    while i + 1 < n and <uint32_t>pages[i + 1] - <uint32_t>pages[i] == 1:
        i += 1
    return i + 1


cdef Py_ssize_t _count(object n, str verb) except -1:
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        raise TypeError(f"{verb} expects a number of pages, got {type(n).__name__}")
    if n < 0:
        raise ValueError(f"{verb} expects a number of pages >= 0, got {n}")
    return min(n, <Py_ssize_t>INT32_MAX)
