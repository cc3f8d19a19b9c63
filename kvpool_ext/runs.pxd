from libc.stdint cimport int16_t, uint8_t, uint32_t, uint64_t

from kvpool_ext.types cimport token_t


# Before each run of a slab; sizes are in units of UNIT bytes, this header included.
ctypedef struct Block:
    uint32_t num_units
    uint32_t num_units_before  # of the block before it, 0 for the first
    uint32_t is_free
    uint32_t is_outside        # from malloc: the two counts are one, its size in bytes
    # In a free block the run's place holds its neighbours in the bin.
    Block *next
    Block *previous


# Before the blocks of a slab.
ctypedef struct Slab:
    Slab *next
    Block *end                 # a header behind its last block


cdef enum:
    UNIT = 16
    NUM_BINS = 128


cdef class TokenRuns:
    cdef Slab *slabs                 # the latest first; NULL without any
    cdef Py_ssize_t first_bytes      # of the slab that was there from the start
    cdef readonly Py_ssize_t slab_bytes
    cdef readonly Py_ssize_t slab_bytes_in_use
    cdef readonly Py_ssize_t bytes_outside   # what runs beside the slab take
    cdef uint64_t bin_bits[2]        # bins that are not empty
    cdef Block *bins[NUM_BINS]

    cdef token_t *take(self, Py_ssize_t num_tokens) noexcept nogil
    cdef void give(self, token_t *run) noexcept nogil
    cdef bint has_room(self, token_t *run, Py_ssize_t num_tokens) noexcept nogil
    cdef token_t *resize(self, token_t *run, Py_ssize_t num_kept, Py_ssize_t num_tokens) noexcept nogil
    cdef bint part(
        self, token_t *run, Py_ssize_t num_kept, Py_ssize_t num_tokens, token_t *head, int16_t *num_head,
        token_t **rest
    ) noexcept nogil
    cdef bint is_inside(self, const void *run) noexcept nogil
    cdef bint add_slab(self, Py_ssize_t num_units) noexcept nogil
    cdef void add_free(self, Block *block) noexcept nogil
    cdef void remove_free(self, Block *block) noexcept nogil
    cdef Block *find_free(self, uint32_t num_units) noexcept nogil
    cdef void cut(self, Block *block, uint32_t num_units) noexcept nogil


cdef Py_ssize_t run_bytes(const void *run) noexcept nogil
