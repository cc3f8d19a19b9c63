"""EvictionHistory: what eviction took lately, tokens and all, for whoever asks why a prompt did not match.

The tokens of an evicted run are not copied: the history takes the run over from the node, and gives it back when it
is the oldest. So an eviction that is remembered costs one record, whatever its length, and the memory of the history
is bounded twice, by pages and by records.

Nothing here is hashed or indexed. A record says which node its run stood under, by handle; `trace` goes from the
newest record to the oldest, which is the eviction backwards: a node comes before what stood below it, for leaves are
evicted first. So each run's place is known by the time it is met, and its tokens are compared in full. A record is
only dropped after all older ones, which keeps this true.
"""
cimport cython
from libc.stdint cimport INT32_MAX, int16_t, int32_t, int64_t, uint8_t
from libc.string cimport memcpy, memset

import numpy as np

cimport numpy as cnp

from kvpool_ext.arena cimport Node, NodeArena
from kvpool_ext.memory cimport free, malloc
from kvpool_ext.runs cimport UNIT, TokenRuns, run_bytes
from kvpool_ext.tokens cimport borrow_tokens
from kvpool_ext.types cimport node_t, prefetch, token_t

cnp.import_array()

cdef extern from *:
    """
    #include <time.h>
    #ifdef CLOCK_MONOTONIC_COARSE
    #define KVPOOL_CLOCK CLOCK_MONOTONIC_COARSE  /* milliseconds will do, and it reads no counter */
    #else
    #define KVPOOL_CLOCK CLOCK_MONOTONIC
    #endif
    static inline long long kvpool_now_ns(void) {
        struct timespec now;
        clock_gettime(KVPOOL_CLOCK, &now);
        return (long long)now.tv_sec * 1000000000 + now.tv_nsec;
    }
    """
    int64_t kvpool_now_ns() noexcept nogil

cdef enum:
    WHOLE = 1 << 16        # tokens
    FIRST_RECORDS = 64
    MAX_RECORDS = 1 << 16
    FILTER = 1 << 14       # entries; most records are of no prompt that is asked for


cdef Py_ssize_t pages_to_remember(object num_tokens, Py_ssize_t num_pages, Py_ssize_t page_size) except -1:
    """The option ``eviction_history`` in pages.

    None, the default of a pool: the `num_pages` that the tree is made for, of more than `WHOLE` tokens a sixteenth.
    """
    if num_tokens is None:
        return min(num_pages, max(num_pages // 16, WHOLE // page_size))
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, (int, np.integer)):
        raise TypeError(f"eviction_history must be an int, got {type(num_tokens).__name__}")
    if not 0 <= num_tokens <= INT32_MAX:
        raise ValueError(f"eviction_history must be in 0 .. {INT32_MAX} tokens, got {num_tokens}")
    return int(num_tokens) // page_size


@cython.no_gc
cdef class EvictionHistory:
    """The latest evicted runs of one tree, oldest first out; made by `RadixTree` only.

    Parameters
    ----------
    runs : TokenRuns
        Where the tree's tokens are.
    page_size : int
        Tokens per page.
    max_pages : int
        Evicted pages to remember at most.
    """

    def __cinit__(self, TokenRuns runs not None, Py_ssize_t page_size, Py_ssize_t max_pages):
        self.runs = runs
        self.page_size = page_size
        self.max_pages = max_pages
        self.max_records = min(max_pages, MAX_RECORDS)
        self.dead_roots = {}
        # Small as long as it can be: records that are written over are still in a cache.
        self.ring_size = min(self.max_records, FIRST_RECORDS)
        self.ring = <Evicted *>malloc(self.ring_size * sizeof(Evicted))
        if self.ring == NULL:
            raise MemoryError(f"no memory for {self.ring_size} records of evicted prefixes")

    def __dealloc__(self):
        if self.ring != NULL:
            self.forget_all()
        free(self.ring)

    cdef void begin(self, int16_t cause, int64_t request) noexcept nogil:
        """Say on whose account the pages go that are evicted from now on."""
        cdef Evicted *record
        cdef Py_ssize_t k
        self.cause = cause
        self.request = request
        self.now_ns = kvpool_now_ns()
        # A claim takes two runs or so, and as many are given back for them: their headers, and those of the blocks
        # behind, come into the cache while the victims are looked for. It halves what the history costs a bind.
        for k in range(min(2, self.num_records)):
            record = self.at(k)
            prefetch(record.run, -UNIT)
            prefetch(record.run, (record.num_pages * self.page_size - record.num_head) * <Py_ssize_t>sizeof(token_t))

    cdef void keep(self, NodeArena arena, node_t n, Py_ssize_t num_pages) noexcept nogil:
        """Remember the last `num_pages` of node `n`, which go next: all of them or its tail. O(1).

        The run of a node that goes as a whole is the history's afterwards, and NULL in the node.
        """
        cdef Node *node = &arena.nodes[n]
        cdef Py_ssize_t page_size = self.page_size, num_kept = node.num_pages - num_pages
        cdef Py_ssize_t num_remembered = min(num_pages, self.max_pages)
        cdef Evicted *record
        cdef token_t *run
        cdef bint found = True
        while self.num_records > 0 and self.num_pages + num_remembered > self.max_pages:
            self.forget_oldest()
        if self.num_records == self.ring_size and not self.grow():
            self.forget_oldest()
        record = &self.ring[self.next_record]
        record.node = arena.handle_of(n)
        record.num_head = 0
        if num_kept == 0:
            record.above = arena.handle_of(node.parent)
            record.run = node.tokens
            node.tokens = NULL
        else:
            record.above = record.node
            found = self.runs.part(
                node.tokens, num_kept * page_size, node.num_pages * page_size, record.head, &record.num_head,
                &record.run,
            )
        # What is too long is cut, and its end went before its beginning.
        record.evicted_pages = self.evicted_pages + num_pages - num_remembered
        record.when_ns = self.now_ns
        record.request = self.request
        record.cause = self.cause
        record.num_pages = <int32_t>num_remembered
        self.evicted_pages += num_pages
        if not found:
            # What stood below these pages has no place any more.
            self.forget_all()
            self.num_forgotten += 1
            return
        self.num_pages += num_remembered
        self.num_records += 1
        self.next_record = self.next_record + 1 if self.next_record + 1 < self.ring_size else 0
        if num_remembered < num_pages:
            # Nothing older is left, so that the end of this run is nobody's place.
            self.num_forgotten += 1
            num_kept = max(1, num_remembered * page_size - record.num_head)
            if record.run != NULL:
                run = self.runs.resize(record.run, num_kept, num_kept)
                record.run = run if run != NULL else record.run

    cdef void forget_oldest(self) noexcept nogil:
        cdef Evicted *record = self.at(0)
        self.runs.give(record.run)
        self.num_pages -= record.num_pages
        self.num_records -= 1
        self.num_forgotten += 1

    cdef void forget_all(self) noexcept nogil:
        while self.num_records > 0:
            self.forget_oldest()

    cdef void reset(self) noexcept:
        """The tree was reset: what was evicted before matches nothing any more."""
        self.forget_all()
        self.dead_roots.clear()
        self.num_forgotten = 0
        self.reset_ns = kvpool_now_ns()

    cdef int bury_root(self, int64_t handle, object extra_key) except -1:
        """A namespace lost its last page, and its root: the records under it are still found by its key."""
        self.dead_roots[handle] = extra_key, self.evicted_pages
        if len(self.dead_roots) > 2 * self.max_records:
            # Those that outlived a record of theirs; each other one has lost them all.
            oldest = self.at(0).evicted_pages if self.num_records > 0 else self.evicted_pages
            self.dead_roots = {
                root: (key, died) for root, (key, died) in self.dead_roots.items() if died > oldest
            }
        return 0

    cdef Evicted *at(self, Py_ssize_t k) noexcept nogil:
        """Record `k` of those that are remembered, from the oldest on."""
        cdef Py_ssize_t i = self.next_record - self.num_records + k
        return &self.ring[i if i >= 0 else i + self.ring_size]

    cdef bint grow(self) noexcept nogil:
        """Double a full ring, if there is memory and it may."""
        cdef Py_ssize_t grown = min(2 * self.ring_size, self.max_records), num_first
        cdef Evicted *ring
        if grown == self.ring_size:
            return False
        ring = <Evicted *>malloc(grown * sizeof(Evicted))
        if ring == NULL:
            return False
        num_first = self.ring_size - self.next_record
        memcpy(ring, self.ring + self.next_record, num_first * sizeof(Evicted))
        memcpy(ring + num_first, self.ring, self.next_record * sizeof(Evicted))
        free(self.ring)
        self.ring = ring
        self.next_record = self.ring_size
        self.ring_size = grown
        return True

    cdef Py_ssize_t common(self, Evicted *record, const token_t *tokens, Py_ssize_t num_pages) noexcept nogil:
        """Leading pages of a record that equal `tokens`, of which there are `num_pages`."""
        cdef Py_ssize_t limit = min(num_pages, <Py_ssize_t>record.num_pages) * self.page_size
        cdef Py_ssize_t num_head = min(<Py_ssize_t>record.num_head, limit), i = 0
        while i < num_head and tokens[i] == record.head[i]:
            i += 1
        if i == num_head:
            while i < limit and tokens[i] == record.run[i - num_head]:
                i += 1
        return i // self.page_size

    # ---- looking

    def trace(self, tokens, Py_ssize_t num_live, Py_ssize_t num_pages, ends, extra_key):
        """Which pages of a prompt stood in the tree behind those that match, and where they went; changes nothing.

        O(records + tokens compared).

        Parameters
        ----------
        tokens : sequence of int
            ``[n]`` with ``n >= num_pages * page_size``; an int32 array is read in place.
        num_live, num_pages : int
            Pages that match now, and pages that may match at all.
        ends : dict
            Handle of each node that matches as a whole -> number of the prompt's pages down to its end; the root of
            the namespace, if it has one, with 0.
        extra_key : str, bytes, int or None
            The namespace.

        Returns
        -------
        list of tuple
            ``(start, end, cause, request, when_ns, pages_since)`` for pages ``[start, end)`` of the prompt, one after
            the other from `num_live` on. ``pages_since``: what eviction took since then, these pages among it.
        """
        cdef cnp.ndarray array = borrow_tokens(tokens)
        cdef const token_t *data = <const token_t *>cnp.PyArray_DATA(array)
        cdef Py_ssize_t reach = num_live, i, start, count
        cdef Evicted *record
        cdef uint8_t filter[FILTER]
        if num_pages * self.page_size > cnp.PyArray_DIM(array, 0):
            raise ValueError(f"{cnp.PyArray_DIM(array, 0)} tokens fill no {num_pages} pages of {self.page_size}")
        memset(filter, 0, FILTER)
        places = {root: 0 for root, (key, _) in self.dead_roots.items() if key == extra_key} | ends
        for handle in places:
            filter[handle % FILTER] = 1
        # Flat, so that the loop makes nothing that could run the collector, and with it a clean-up that evicts.
        found = []
        for i in range(self.num_records - 1, -1, -1):
            record = self.at(i)
            if not filter[record.above % FILTER]:
                continue
            place = places.get(record.above)
            if place is None:
                continue
            start = place
            if not 0 <= start <= num_pages:
                raise ValueError(f"an end at page {start} is none of the {num_pages} pages asked about")
            count = self.common(record, data + start * self.page_size, num_pages - start)
            if start + count > reach:
                # Tail first: what the record has beyond `count` was gone before.
                found.append(reach)
                found.append(start + count)
                found.append(record.cause)
                found.append(record.request)
                found.append(record.when_ns)
                found.append(self.evicted_pages - record.evicted_pages - record.num_pages + count)
                reach = start + count
            if count == record.num_pages:
                places[record.node] = start + count
                filter[record.node % FILTER] = 1
            else:
                places.pop(record.node, None)
        return [tuple(found[i:i + 6]) for i in range(0, len(found), 6)]

    def reach(self):
        """How far back it goes: ``(evicted pages remembered, when_ns of the oldest, or None without any)``."""
        return self.num_pages, self.at(0).when_ns if self.num_records > 0 else None

    def clock(self):
        """The clock of the records now, ns."""
        return kvpool_now_ns()

    def memory(self):
        """Bytes of the records, and of the runs that they hold."""
        cdef Py_ssize_t total = 0, i
        for i in range(self.num_records):
            total += run_bytes(self.at(i).run)
        return self.ring_size * <Py_ssize_t>sizeof(Evicted), total

    def check(self):
        """Count the remembered pages again; RuntimeError says what is out of sync."""
        cdef Py_ssize_t total = 0, i
        cdef int64_t end = 0
        for i in range(self.num_records):
            if self.at(i).evicted_pages < end:
                raise RuntimeError(f"record {i} of the evicted prefixes is out of order")
            end = self.at(i).evicted_pages + self.at(i).num_pages
            total += self.at(i).num_pages
        if total != self.num_pages or total > self.max_pages:
            raise RuntimeError(
                f"{total} evicted pages are remembered, {self.num_pages} are counted, {self.max_pages} is the limit"
            )
