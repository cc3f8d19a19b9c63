cimport numpy as cnp

# Any accepted token sequence as a C-contiguous int32 array; an int32 array is returned as it is.
cdef cnp.ndarray borrow_tokens(object tokens)
# Page ids likewise, each in 0 .. 2^31 - 1.
cdef cnp.ndarray borrow_pages(object pages)
