"""TokenRuns: the memory of token runs, a slab that was touched before the first request needs it.

A pool caches at most as many tokens as it has slots, so their memory is known when it is made. Taken from malloc, each
long run would be fresh pages from the kernel and given back at its eviction: the faults cost more than the copy. Here
they are paid once, at construction. Free blocks lie in bins of a quarter of a power of two and merge with their
neighbours. Where the slab is in pieces too small for a run it gets a sibling, and keeps it; only once the siblings are
as large as itself, and for a tree that grows without bound, runs come from malloc.

Source of the bins: two-level segregated fit (Masmano et al., 2004).
"""
cimport cython
from libc.stdint cimport int16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from kvpool_ext.memory cimport free, realloc, refused
from kvpool_ext.sanitize cimport hide, show
from kvpool_ext.types cimport token_t

cdef extern from *:
    """
    #include <stdlib.h>
    #ifdef __linux__
    #include <sys/mman.h>
    #endif
    static inline int kvpool_log2(unsigned int n) { return 31 - __builtin_clz(n); }
    static inline int kvpool_lowest(unsigned long long bits) { return __builtin_ctzll(bits); }
    static void *kvpool_slab(size_t bytes) {
        void *memory = NULL;
        /* Aligned for huge pages, where the kernel has them: fewer faults and fewer TLB misses. */
        if (posix_memalign(&memory, bytes >= (1 << 22) ? 1 << 21 : 64, bytes)) return NULL;
    #if defined(__linux__) && defined(MADV_HUGEPAGE)
        if (bytes >= (1 << 22)) madvise(memory, bytes, MADV_HUGEPAGE);
    #endif
        return memory;
    }
    """
    int kvpool_log2(unsigned int n) noexcept nogil
    int kvpool_lowest(unsigned long long bits) noexcept nogil
    void *kvpool_slab(size_t num_bytes) noexcept nogil

cdef enum:
    MIN_UNITS = 2              # a header and the two neighbours of a free block
    MAX_UNITS = 1 << 30        # blocks of up to 16 GiB; a pool of more tokens has no slab


cdef int bin_of(uint32_t num_units) noexcept nogil:
    """The bin of a free block: four to each power of two."""
    cdef int log = kvpool_log2(num_units)
    return 4 * log + <int>((num_units >> (log - 2)) & 3) if log >= 2 else <int>num_units


cdef inline Block *block_of(const void *run) noexcept nogil:
    return <Block *>(<char *>run - UNIT)


cdef inline Block *following(Block *block) noexcept nogil:
    return <Block *>(<char *>block + <size_t>block.num_units * UNIT)


cdef inline void show_only(Block *block, Py_ssize_t num_tokens) noexcept nogil:
    """Tell the address sanitizer that of a block in use `num_tokens` may be touched."""
    show(<char *>block + UNIT, following(block))
    hide(<char *>block + UNIT + num_tokens * <Py_ssize_t>sizeof(token_t), following(block))


cdef inline uint32_t units_for(Py_ssize_t num_tokens) noexcept nogil:
    return <uint32_t>max(MIN_UNITS, 1 + (num_tokens * <Py_ssize_t>sizeof(token_t) + UNIT - 1) // UNIT)


cdef token_t *divide(Block *block, uint32_t num_units) noexcept nogil:
    """Make two blocks in use of one; the run of the second."""
    cdef Block *rest = <Block *>(<char *>block + <size_t>num_units * UNIT)
    show(rest, <char *>rest + UNIT)
    rest.num_units = block.num_units - num_units
    rest.num_units_before = num_units
    rest.is_free = 0
    rest.is_outside = 0
    block.num_units = num_units
    following(rest).num_units_before = rest.num_units
    return <token_t *>(<char *>rest + UNIT)


cdef Py_ssize_t run_bytes(const void *run) noexcept nogil:
    """What a run takes, its header included; 0 for NULL."""
    cdef Block *block
    if run == NULL:
        return 0
    block = block_of(run)
    return (<Py_ssize_t *>block)[0] if block.is_outside else <Py_ssize_t>block.num_units * UNIT


cdef token_t *outside(TokenRuns runs, Block *block, Py_ssize_t num_tokens) noexcept nogil:
    """A run from malloc, or a larger or smaller `block` of it; its size stands before it, for the accounts."""
    cdef Py_ssize_t num_bytes = UNIT + max(1, num_tokens) * <Py_ssize_t>sizeof(token_t)
    cdef Py_ssize_t before = (<Py_ssize_t *>block)[0] if block != NULL else 0
    block = <Block *>realloc(block, num_bytes)
    if block == NULL:
        return NULL
    (<Py_ssize_t *>block)[0] = num_bytes
    block.is_free, block.is_outside = 0, 1
    runs.bytes_outside += num_bytes - before
    return <token_t *>(<char *>block + UNIT)


@cython.no_gc
cdef class TokenRuns:
    """Runs of tokens for one tree.

    Parameters
    ----------
    num_tokens : int
        Tokens that the slab has room for, 0 for no slab.
    """

    def __cinit__(self, Py_ssize_t num_tokens=0):
        cdef Py_ssize_t num_units = num_tokens * <Py_ssize_t>sizeof(token_t) // UNIT
        # A header a run, and what is lost between runs.
        num_units += num_units // 16 + 16
        memset(self.bins, 0, sizeof(self.bins))
        if num_tokens == 0 or num_units >= MAX_UNITS:
            return
        if not self.add_slab(num_units):
            raise MemoryError(f"no memory for the {num_tokens} tokens that the pool can cache")
        self.first_bytes = self.slab_bytes

    def __dealloc__(self):
        cdef Slab *slab = self.slabs
        while slab != NULL:
            self.slabs = slab.next
            free(slab)
            slab = self.slabs

    cdef bint is_inside(self, const void *run) noexcept nogil:
        return not block_of(run).is_outside

    cdef bint add_slab(self, Py_ssize_t num_units) noexcept nogil:
        """One more slab of a free block of that many units; False without memory."""
        cdef Py_ssize_t num_bytes = (num_units + 2) * UNIT
        cdef Slab *slab = <Slab *>(NULL if refused() else kvpool_slab(num_bytes))
        cdef Block *block
        if slab == NULL:
            return False
        memset(slab, 0, num_bytes)
        block = <Block *>(<char *>slab + UNIT)
        block.num_units = <uint32_t>num_units
        slab.end = following(block)
        slab.end.num_units_before = <uint32_t>num_units
        slab.next = self.slabs
        self.slabs = slab
        self.slab_bytes += num_bytes
        self.add_free(block)
        return True

    cdef token_t *take(self, Py_ssize_t num_tokens) noexcept nogil:
        """A run of at least `num_tokens`, NULL if there is no memory."""
        cdef uint32_t num_units
        cdef Block *block = NULL
        if self.first_bytes and num_tokens < MAX_UNITS:
            num_units = units_for(num_tokens)
            block = self.find_free(num_units)
            if block == NULL and self.slab_bytes + <Py_ssize_t>num_units * UNIT <= 2 * self.first_bytes:
                if self.add_slab(max(<Py_ssize_t>num_units, self.first_bytes // (32 * UNIT))):
                    block = self.find_free(num_units)
        if block == NULL:
            return outside(self, NULL, num_tokens)
        self.remove_free(block)
        self.slab_bytes_in_use += <Py_ssize_t>block.num_units * UNIT
        self.cut(block, num_units)
        show_only(block, num_tokens)
        return <token_t *>(<char *>block + UNIT)

    cdef void give(self, token_t *run) noexcept nogil:
        """Take a run back; NULL is none."""
        cdef Block *block
        cdef Block *other
        if run == NULL:
            return
        block = block_of(run)
        if block.is_outside:
            self.bytes_outside -= (<Py_ssize_t *>block)[0]
            free(block)
            return
        self.slab_bytes_in_use -= <Py_ssize_t>block.num_units * UNIT
        other = following(block)
        if other.is_free:
            self.remove_free(other)
            block.num_units += other.num_units
        if block.num_units_before:
            other = <Block *>(<char *>block - <size_t>block.num_units_before * UNIT)
            if other.is_free:
                self.remove_free(other)
                other.num_units += block.num_units
                block = other
        following(block).num_units_before = block.num_units
        self.add_free(block)

    cdef bint has_room(self, token_t *run, Py_ssize_t num_tokens) noexcept nogil:
        """Whether `run` has memory for `num_tokens`."""
        cdef Block *block = block_of(run)
        if not block.is_outside:
            if units_for(num_tokens) > block.num_units:
                return False
            show_only(block, num_tokens)
            return True
        return UNIT + num_tokens * <Py_ssize_t>sizeof(token_t) <= (<Py_ssize_t *>block)[0]

    cdef token_t *resize(self, token_t *run, Py_ssize_t num_kept, Py_ssize_t num_tokens) noexcept nogil:
        """A run of `num_tokens` with the first `num_kept` tokens of `run`, which is gone; NULL leaves `run` alone."""
        cdef Block *block = block_of(run)
        cdef token_t *moved
        if not block.is_outside:
            if units_for(num_tokens) <= block.num_units:
                self.cut(block, units_for(num_tokens))
                show_only(block, num_tokens)
                return run
            moved = self.take(num_tokens)
            if moved != NULL:
                memcpy(moved, run, num_kept * sizeof(token_t))
                self.give(run)
            return moved
        return outside(self, block, num_tokens)

    cdef void cut(self, Block *block, uint32_t num_units) noexcept nogil:
        """Free what a block in use has behind its first `num_units`, if that is a block."""
        if block.num_units >= num_units + MIN_UNITS:
            self.give(divide(block, num_units))

    cdef bint part(
        self, token_t *run, Py_ssize_t num_kept, Py_ssize_t num_tokens, token_t *head, int16_t *num_head,
        token_t **rest
    ) noexcept nogil:
        """Part a run of `num_tokens` behind its first `num_kept` without a copy; False without memory.

        The second part is `rest`, a run of its own, but for the tokens where its header stands now: those go to
        `head`, up to 7. A short part is all in `head`, and `rest` is NULL.
        """
        cdef Block *block = block_of(run)
        cdef uint32_t num_units = units_for(num_kept)
        cdef Py_ssize_t start = num_units * (UNIT // <Py_ssize_t>sizeof(token_t))  # of `rest` in the run
        rest[0] = NULL
        num_head[0] = 0
        if block.is_outside:
            rest[0] = self.take(num_tokens - num_kept)
            if rest[0] == NULL:
                return False
            memcpy(rest[0], run + num_kept, (num_tokens - num_kept) * sizeof(token_t))
            return True
        num_head[0] = <int16_t>(min(start, num_tokens) - num_kept)
        memcpy(head, run + num_kept, num_head[0] * sizeof(token_t))
        if num_tokens > start:
            rest[0] = divide(block, num_units)
        return True

    # ---- free blocks

    cdef void add_free(self, Block *block) noexcept nogil:
        cdef int i = bin_of(block.num_units)
        show(block, <char *>block + MIN_UNITS * UNIT)
        hide(<char *>block + MIN_UNITS * UNIT, following(block))
        block.is_free = 1
        block.previous = NULL
        block.next = self.bins[i]
        if block.next != NULL:
            block.next.previous = block
        self.bins[i] = block
        self.bin_bits[i >> 6] |= <uint64_t>1 << (i & 63)

    cdef void remove_free(self, Block *block) noexcept nogil:
        cdef int i = bin_of(block.num_units)
        show(block, following(block))
        block.is_free = 0
        if block.next != NULL:
            block.next.previous = block.previous
        if block.previous != NULL:
            block.previous.next = block.next
        else:
            self.bins[i] = block.next
            if block.next == NULL:
                self.bin_bits[i >> 6] &= ~(<uint64_t>1 << (i & 63))

    cdef Block *find_free(self, uint32_t num_units) noexcept nogil:
        """A free block of at least `num_units`: the first that fits of its own bin, else one of the next bin."""
        cdef int i = bin_of(num_units), word
        cdef uint64_t bits
        cdef Block *block = self.bins[i]
        cdef int tries = 0
        while block != NULL and tries < 4:
            if block.num_units >= num_units:
                return block
            block = block.next
            tries += 1
        i += 1
        word = i >> 6
        if word > 1:
            return NULL
        bits = self.bin_bits[word] >> (i & 63) << (i & 63)
        if bits == 0 and word == 0:
            word = 1
            bits = self.bin_bits[1]
        return self.bins[64 * word + kvpool_lowest(bits)] if bits else NULL

    # ---- looking

    def check(self):
        """Walk the slabs; RuntimeError names the block that is out of sync."""
        cdef Slab *slab = self.slabs
        cdef Block *block
        cdef Py_ssize_t in_use = 0, num_free = 0, num_listed = 0, at
        cdef uint32_t before
        cdef bint was_free
        cdef int i
        while slab != NULL:
            block = <Block *>(<char *>slab + UNIT)
            was_free, before = False, 0
            while block != slab.end:
                at = <char *>block - <char *>slab
                if block.num_units < MIN_UNITS or block.num_units_before != before or block.is_outside:
                    raise RuntimeError(f"the block at byte {at} is out of sync with the one before it")
                if block.is_free and was_free:
                    raise RuntimeError(f"the free block at byte {at} was not merged with the one before it")
                if block.is_free:
                    num_free += 1
                else:
                    in_use += <Py_ssize_t>block.num_units * UNIT
                was_free, before = block.is_free, block.num_units
                block = following(block)
            if slab.end.num_units_before != before:
                raise RuntimeError(f"the end of a slab is out of sync with its last block of {before} units")
            slab = slab.next
        for i in range(NUM_BINS):
            block = self.bins[i]
            while block != NULL:
                num_listed += 1
                block = block.next
        if in_use != self.slab_bytes_in_use or num_listed != num_free:
            raise RuntimeError(
                f"{in_use} bytes of token runs are in use, {self.slab_bytes_in_use} are counted; {num_free} blocks "
                f"are free, {num_listed} are listed"
            )
