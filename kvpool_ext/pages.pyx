"""The free list: which pages nobody holds.

Never-used pages are a counter, returned pages a stack that is touched only on demand, so a large pool costs nothing
to construct. `take` is all or nothing. Pages handed out by `take` carry a mark, and only these can be given back, so
a double or foreign free is found before anything changes. Not thread-safe; no device, tree or request is known here.

Invariants: (A1) a page is on the stack at most once; (A2) pages on the stack are below `next_unused`; (A3) a marked
page is not free; (A4) ``num_taken`` is the number of marks.
"""
from libc.stdint cimport INT32_MAX, uint8_t, uint32_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

import numpy as np

cimport numpy as cnp

from kvpool_ext.tokens cimport borrow_pages
from kvpool_ext.types cimport CHECKED, page_t

cnp.import_array()

cdef enum:
    RUN_PIECE = 32


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

    cdef void push(self, const page_t *pages, Py_ssize_t n) noexcept nogil:
        memcpy(self.stack + self.stack_size, pages, n * sizeof(page_t))
        self.stack_size += n

    cdef void mark(self, const page_t *pages, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i = 0, count
        while i < n:
            if not starts_run(pages + i, n - i):
                self.taken[pages[i]] = 1
                i += 1
                continue
            count = run_length(pages + i, n - i)
            memset(self.taken + pages[i], 1, count)
            i += count
        self.num_taken += n

    cdef Py_ssize_t claim_marks(self, const page_t *pages, Py_ssize_t n) noexcept nogil:
        """Unmark all `pages` and answer -1, or change nothing and answer where the first bad one is."""
        cdef Py_ssize_t i = 0, k, count
        cdef uint8_t all_taken
        cdef uint8_t *marks
        while i < n:
            if not starts_run(pages + i, n - i):
                if not 0 <= pages[i] < self.num_pages or not self.taken[pages[i]]:
                    break
                self.taken[pages[i]] = 0
                i += 1
                continue
            count = run_length(pages + i, n - i)
            all_taken = pages[i] >= 0 and pages[i] + count <= self.num_pages
            if all_taken:
                marks = self.taken + pages[i]
                for k in range(count):
                    all_taken &= marks[k]
            if not all_taken:
                # The bad one is among these: one by one up to it.
                while 0 <= pages[i] < self.num_pages and self.taken[pages[i]]:
                    self.taken[pages[i]] = 0
                    i += 1
                break
            memset(self.taken + pages[i], 0, count)
            i += count
        if i == n:
            self.num_taken -= n
            return -1
        for k in range(i):
            self.taken[pages[k]] = 1
        return i


cdef inline bint starts_run(const page_t *pages, Py_ssize_t n) noexcept nogil:
    """Whether two ids count up: where pages lie shuffled, the runs that follow are not worth a call."""
    return n > 1 and <uint32_t>pages[1] - <uint32_t>pages[0] == 1


cdef Py_ssize_t run_length(const page_t *pages, Py_ssize_t n) noexcept nogil:
    """How many of the first pages have ids that count up, at least 1: a pool hands out most of its pages so."""
    cdef Py_ssize_t i = 0, k
    cdef uint32_t gaps
    # In pieces whose compare has no branch, for the compiler to make vectors of.
    while i + RUN_PIECE < n and <uint32_t>pages[i + 1] - <uint32_t>pages[i] == 1:
        gaps = 0
        for k in range(RUN_PIECE):
            gaps |= (<uint32_t>pages[i + k + 1] - <uint32_t>pages[i + k]) ^ 1
        if gaps:
            break
        i += RUN_PIECE
    while i + 1 < n and <uint32_t>pages[i + 1] - <uint32_t>pages[i] == 1:
        i += 1
    return i + 1


cdef Py_ssize_t _count(object n, str verb) except -1:
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        raise TypeError(f"{verb} expects a number of pages, got {type(n).__name__}")
    if n < 0:
        raise ValueError(f"{verb} expects a number of pages >= 0, got {n}")
    return min(n, <Py_ssize_t>INT32_MAX)
