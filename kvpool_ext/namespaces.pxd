cdef object namespace_key(object extra_key)
