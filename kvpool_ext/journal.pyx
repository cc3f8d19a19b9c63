"""TreeJournal: what came to a tree and left it, as plain records for a thread that follows.

The scheduler's thread appends while it moves pages, where nothing may fail and no time is to be had: no hash, no
object, no lock but the GIL that it holds anyway. So the buffer has a limit, and where there is no room or no memory
all of it is dropped, which `lost` says; whoever follows then has the whole tree listed (`listing.pyx`).

A record is int32 words: kind, number of pages, and what stands above the first of them. STORED goes on with the page
ids, how often each had left the tree before, and the tokens; REMOVED with the page ids, the first to go first. Above
is the page above, or a namespace: names are handed over beside the words, and not as handles of roots, which may be
dropped and made again before anybody looks.
"""
cimport cython
cimport numpy as cnp
from libc.stdint cimport INT32_MAX, int32_t, uint32_t
from libc.string cimport memcpy

from kvpool_ext.arena cimport IS_ROOT, Node, NodeArena
from kvpool_ext.memory cimport calloc, free, realloc
from kvpool_ext.quiet cimport Quiet
from kvpool_ext.tokens cimport borrow_pages
from kvpool_ext.types cimport node_t, page_t, token_t

cnp.import_array()

cdef enum:
    FIRST_WORDS = 1 << 14
    SPARE_WORDS = 1 << 18  # a larger buffer is given back to the system, not kept


@cython.no_gc
cdef class TreeJournal:
    """The changes of one tree since somebody took them last; made by `follow_tree` only.

    Parameters
    ----------
    num_pages : int
        Page ids are below this.
    page_size : int
        Tokens per page.
    max_bytes : int
        Memory for records that nobody has taken yet.

    Raises
    ------
    ValueError
        A limit that no record fits in.
    MemoryError
        No memory for 4 bytes a page.
    """

    def __cinit__(self, Py_ssize_t num_pages, Py_ssize_t page_size, Py_ssize_t max_bytes):
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_bytes = max_bytes
        self.last_removed = -1
        self.names = []
        # Nobody has been told yet what is there.
        self.lost = True
        least = self.words_of(1) * <Py_ssize_t>sizeof(int32_t)
        if max_bytes < least:
            raise ValueError(f"max_bytes must be at least {least}, one record of one page, got {max_bytes}")
        self.stamps = <uint32_t *>calloc(num_pages + 1, sizeof(uint32_t))
        if self.stamps == NULL:
            raise MemoryError(f"no memory for the generations of {num_pages} pages")

    def __dealloc__(self):
        free(self.records)
        free(self.spare)
        free(self.stamps)

    # ---- what the tree tells

    cdef void on_stored(self, NodeArena arena, node_t n, dict root_keys) noexcept:
        """The new node `n` was hung below its parent."""
        cdef Node *node = &arena.nodes[n]
        cdef int32_t *to
        cdef int32_t above
        self.turn(node.pages, node.num_pages)
        if self.lost:
            return
        try:
            above = above_of(arena, node.parent, root_keys, self.names)
        except MemoryError:
            self.lose()
            return
        to = self.room(self.words_of(node.num_pages))
        if to != NULL:
            self.write_stored(to, above, node.pages, node.tokens, node.num_pages)
            self.last_removed = -1

    cdef void on_removed(self, const page_t *pages, Py_ssize_t num_pages) noexcept nogil:
        """Eviction took `pages`, in this order."""
        cdef int32_t *to
        self.turn(pages, num_pages)
        if self.lost:
            return
        # Eviction goes node by node, and often page by page: one record for all that go in a row.
        if self.last_removed >= 0 and self.records[self.last_removed + 1] <= INT32_MAX - num_pages:
            to = self.room(num_pages)
            if to != NULL:
                self.records[self.last_removed + 1] += <int32_t>num_pages
                memcpy(to, pages, num_pages * sizeof(page_t))
            return
        to = self.room(HEADER + num_pages)
        if to != NULL:
            self.last_removed = to - self.records
            to[0] = REMOVED
            to[1] = <int32_t>num_pages
            to[2] = DEFAULT_ROOT
            memcpy(to + HEADER, pages, num_pages * sizeof(page_t))

    cdef void on_cleared(self) noexcept nogil:
        """A reset took everything; `turn` was told of each page."""
        cdef int32_t *to
        if self.lost:
            return
        to = self.room(HEADER)
        if to != NULL:
            self.last_removed = -1
            to[0] = CLEARED
            to[1] = 0
            to[2] = DEFAULT_ROOT

    cdef void turn(self, const page_t *pages, Py_ssize_t num_pages) noexcept nogil:
        """Pages that were not in the tree are now, or the other way round."""
        cdef Py_ssize_t i
        for i in range(num_pages):
            self.stamps[pages[i]] += 1

    cdef void lose(self) noexcept nogil:
        """Drop what is buffered. The names go when somebody looks, for that takes the GIL."""
        free(self.records)
        self.records = NULL
        self.capacity = 0
        self.num_words = 0
        self.last_removed = -1
        self.lost = True
        self.num_losses += 1

    cdef int32_t *room(self, Py_ssize_t num_words) noexcept nogil:
        """Where the next `num_words` go; NULL, and all is lost, where there is no room."""
        cdef Py_ssize_t wanted = self.num_words + num_words, grown
        cdef Py_ssize_t limit = self.max_bytes // <Py_ssize_t>sizeof(int32_t)
        cdef int32_t *records
        if wanted > self.capacity:
            if wanted > limit:
                self.lose()
                return NULL
            if self.records == NULL and wanted <= self.spare_capacity:
                self.records = self.spare
                self.capacity = self.spare_capacity
                self.spare = NULL
                self.spare_capacity = 0
            else:
                grown = max(self.capacity, <Py_ssize_t>FIRST_WORDS)
                while grown < wanted:
                    grown *= 2
                grown = min(grown, limit)
                records = <int32_t *>realloc(self.records, grown * sizeof(int32_t))
                if records == NULL:
                    self.lose()
                    return NULL
                self.records = records
                self.capacity = grown
        records = self.records + self.num_words
        self.num_words = wanted
        return records

    cdef Py_ssize_t words_of(self, Py_ssize_t num_pages) noexcept nogil:
        """Length of a record of `num_pages` that were stored."""
        return HEADER + num_pages * (2 + self.page_size)

    cdef int32_t *write_stored(
        self, int32_t *to, int32_t above, const page_t *pages, const token_t *tokens, Py_ssize_t num_pages
    ) noexcept nogil:
        """Write a record of pages that are in the tree now; returns where it ends."""
        cdef Py_ssize_t i
        to[0] = STORED
        to[1] = <int32_t>num_pages
        to[2] = above
        to += HEADER
        memcpy(to, pages, num_pages * sizeof(page_t))
        to += num_pages
        for i in range(num_pages):
            to[i] = <int32_t>(self.stamps[pages[i]] >> 1)
        to += num_pages
        memcpy(to, tokens, num_pages * self.page_size * sizeof(token_t))
        return to + num_pages * self.page_size

    def check(self, page_ids):
        """RuntimeError unless the pages that count as cached are `page_ids`; O(pages of the pool)."""
        cdef Py_ssize_t page
        expected = set(page_ids)
        for page in range(self.num_pages):
            if bool(self.stamps[page] & 1) != (page in expected):
                state = "in the tree" if page in expected else "not in the tree"
                raise RuntimeError(f"page {page} is {state}, and its journal is out of sync with that")

    # ---- what a follower takes

    cdef object take(self):
        """``(records, names)`` since the last call, records as an int32 array that owns the buffer; not when `lost`."""
        cdef cnp.npy_intp num_words = self.num_words
        cdef RecordMemory memory
        cdef cnp.ndarray array
        if num_words == 0:
            return cnp.PyArray_EMPTY(1, &num_words, cnp.NPY_INT32, 0), []
        memory = RecordMemory.__new__(RecordMemory)
        names, taken = [], self.names
        array = cnp.PyArray_SimpleNewFromData(1, &num_words, cnp.NPY_INT32, self.records)
        cnp.set_array_base(array, memory)
        answer = array, taken
        memory.journal = self
        memory.records = self.records
        memory.capacity = self.capacity
        self.records = NULL
        self.capacity = 0
        self.begin_anew(names)
        return answer

    cdef void begin_anew(self, list names) noexcept:
        """Follow on from here, with nothing buffered; `names` is empty."""
        self.num_words = 0
        self.last_removed = -1
        self.names = names
        self.lost = False

    def forget(self):
        """Drop what is buffered, as if there had been no room: whoever follows has lost count."""
        if not self.lost:
            self.lose()

    def still_cached(self, page_ids, generations):
        """Whether pages have stayed in the tree since they came to it; atomic, for any thread.

        Parameters
        ----------
        page_ids : ndarray
            int32 ``[n]``.
        generations : ndarray
            uint32 ``[n]``, as the record of the pages told them.

        Returns
        -------
        ndarray
            bool ``[n]``.

        Raises
        ------
        ValueError
            A page id that the pool does not have, or arrays of different lengths.
        TypeError
            Generations that are no uint32 array.
        """
        cdef Quiet _quiet = Quiet()
        cdef cnp.ndarray pages = borrow_pages(page_ids), times
        cdef cnp.npy_intp n = cnp.PyArray_DIM(pages, 0), i
        cdef const page_t *page
        cdef const uint32_t *generation
        cdef cnp.npy_bool *found
        if not isinstance(generations, cnp.ndarray) or cnp.PyArray_TYPE(generations) != cnp.NPY_UINT32:
            raise TypeError(f"generations must be a uint32 array, got {type(generations).__name__}")
        times = cnp.PyArray_GETCONTIGUOUS(generations)
        if cnp.PyArray_NDIM(times) != 1 or cnp.PyArray_DIM(times, 0) != n:
            raise ValueError(f"{n} page ids need as many generations, got shape {generations.shape}")
        page = <const page_t *>cnp.PyArray_DATA(pages)
        generation = <const uint32_t *>cnp.PyArray_DATA(times)
        cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &n, cnp.NPY_BOOL, 0)
        found = <cnp.npy_bool *>cnp.PyArray_DATA(out)
        for i in range(n):
            if page[i] >= self.num_pages:
                raise ValueError(f"page {page[i]} at position {i} is not one of the {self.num_pages} pages")
            found[i] = self.stamps[page[i]] == <uint32_t>(generation[i] << 1 | 1)
        return out


@cython.final
@cython.no_gc
cdef class RecordMemory:
    """Owns the memory of records that were taken, and gives it back to their journal."""

    def __dealloc__(self):
        if self.records == NULL:
            return
        if self.journal is not None and self.journal.spare == NULL and self.capacity <= SPARE_WORDS:
            self.journal.spare = self.records
            self.journal.spare_capacity = self.capacity
        else:
            free(self.records)


cdef int32_t above_of(NodeArena arena, node_t parent, dict root_keys, list names) except? 0:
    """What a record says of `parent`: its last page, or its namespace, which joins `names`."""
    cdef Node *node = &arena.nodes[parent]
    if not node.flags & IS_ROOT:
        return node.pages[node.num_pages - 1]
    key = root_keys[parent]
    if key is None:
        return DEFAULT_ROOT
    if not names or names[len(names) - 1] is not key:
        names.append(key)
    return <int32_t>(-1 - len(names))
