from kvpool_ext.reading cimport TreeReading
from kvpool_ext.tree cimport Walk
from kvpool_ext.types cimport page_t


cdef class RadixCache(TreeReading):
    # The verbs once they are let in: their Python twins say what they do.
    cdef object c_match_prefix(self, tokens, extra_key)
    cdef object c_insert(self, tokens, pages, extra_key, priority)
    cdef object c_evict(self, num_tokens)
    cdef object c_inc_lock_ref(self, node)
    cdef object c_dec_lock_ref(self, node)
    cdef object c_reset(self)
    cdef void copy_path(self, Walk *walk, page_t *out) noexcept nogil
