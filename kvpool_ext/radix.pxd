from kvpool_ext.tree cimport RadixTree


cdef class RadixCache(RadixTree):
    # The verbs once they are let in: their Python twins say what they do.
    cdef object c_match_prefix(self, tokens, extra_key)
    cdef object c_insert(self, tokens, pages, extra_key, priority)
    cdef object c_evict(self, num_tokens)
    cdef object c_inc_lock_ref(self, node)
    cdef object c_dec_lock_ref(self, node)
    cdef object c_reset(self)
