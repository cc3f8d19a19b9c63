"""Rows of K and V copied to their slots without a kernel's dispatch, which costs more than moving a few of them."""
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

cnp.import_array()


def scatter_few(
    cnp.ndarray k_cache, cnp.ndarray v_cache, cnp.ndarray k_rows, cnp.ndarray v_rows, cnp.ndarray slots,
    Py_ssize_t num_slots,
):
    """Copy rows to slots, if that is all there is to do; whether any row was copied.

    Parameters
    ----------
    k_cache, v_cache : ndarray
        ``[total_slots, heads, dim]``, C-contiguous, written in place.
    k_rows, v_rows : ndarray
        ``[n, heads, dim]``; taken where the dtype is the cache's, and each row is contiguous.
    slots : ndarray
        int64 or int32 ``[n]``; those that are not in ``[0, num_slots)`` are skipped.
    num_slots : int
        At most `total_slots`.
    """
    if not (are_blocks(k_cache, k_rows) and are_blocks(v_cache, v_rows) and cnp.PyArray_ISCARRAY_RO(slots)):
        return False
    return copy_rows(k_cache, k_rows, slots, num_slots) and copy_rows(v_cache, v_rows, slots, num_slots)


cdef bint are_blocks(cnp.ndarray cache, cnp.ndarray rows) noexcept:
    """Whether a row is one block of the bytes that the cache stores."""
    cdef Py_ssize_t itemsize = cnp.PyArray_ITEMSIZE(rows), dim = cnp.PyArray_DIM(rows, 2)
    return (
        cnp.PyArray_TYPE(rows) == cnp.PyArray_TYPE(cache)
        and cnp.PyArray_ISNOTSWAPPED(rows)
        and cnp.PyArray_ISWRITEABLE(cache)
        and (dim == 1 or cnp.PyArray_STRIDE(rows, 2) == itemsize)
        and (cnp.PyArray_DIM(rows, 1) == 1 or cnp.PyArray_STRIDE(rows, 1) == dim * itemsize)
    )


cdef bint copy_rows(cnp.ndarray cache, cnp.ndarray rows, cnp.ndarray slots, int64_t num_slots) noexcept:
    cdef char *target = <char *>cnp.PyArray_DATA(cache)
    cdef const char *source = <const char *>cnp.PyArray_DATA(rows)
    cdef Py_ssize_t slot_stride = cnp.PyArray_STRIDE(cache, 0), row_stride = cnp.PyArray_STRIDE(rows, 0)
    cdef Py_ssize_t row_bytes = cnp.PyArray_DIM(cache, 1) * cnp.PyArray_DIM(cache, 2) * cnp.PyArray_ITEMSIZE(cache), i
    cdef bint is_wide = cnp.PyArray_ITEMSIZE(slots) == sizeof(int64_t)
    cdef bint copied = False
    cdef int64_t slot
    for i in range(cnp.PyArray_DIM(slots, 0)):
        slot = (<int64_t *>cnp.PyArray_DATA(slots))[i] if is_wide else (<int32_t *>cnp.PyArray_DATA(slots))[i]
        if 0 <= slot < num_slots:
            memcpy(target + slot * slot_stride, source + i * row_stride, row_bytes)
            copied = True
    return copied
