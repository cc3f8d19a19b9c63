"""Positions as callers give them: one a row, or a window of them a row, read and checked in one pass."""
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memcmp, memcpy

import numpy as np

cimport numpy as cnp
from kvpool_ext.memory cimport free, malloc

cnp.import_array()

cdef enum:
    RECENT_WINDOWS = 16    # a pass has one or two; a loop over one step makes a new one each time


cdef cnp.ndarray new_int64(Py_ssize_t n):
    cdef cnp.npy_intp shape = n
    return cnp.PyArray_EMPTY(1, &shape, cnp.NPY_INT64, 0)


cdef cnp.ndarray new_int32(Py_ssize_t n):
    cdef cnp.npy_intp shape = n
    return cnp.PyArray_EMPTY(1, &shape, cnp.NPY_INT32, 0)


cdef class StepWindow:
    """Positions ``[start, end)`` of each row; made by `StepRows.window`."""

    def __dealloc__(self):
        free(self.starts)

    @property
    def num_tokens(self):
        """Positions in all rows together."""
        return self.offsets[self.batch_size]

    def key(self):
        """The positions as bytes: equal for equal windows."""
        return (<char *>self.starts)[:(3 * self.batch_size + 1) * sizeof(int64_t)]

    def positions(self):
        """``[(start, end)]`` of each row."""
        return [(self.starts[b], self.ends[b]) for b in range(self.batch_size)]

    def start_positions(self):
        """First position of each row, a new int64 array ``[batch]``."""
        cdef cnp.ndarray out = new_int64(self.batch_size)
        memcpy(cnp.PyArray_DATA(out), self.starts, self.batch_size * sizeof(int64_t))
        return out


cdef class RecentWindows:
    """Windows of a step of `batch_size` rows: the same object while the same positions are asked for."""

    def __cinit__(self, Py_ssize_t batch_size):
        self.batch_size = batch_size
        self.windows = []
        self.scratch = <int64_t *>malloc((3 * batch_size + 1) * sizeof(int64_t))
        if self.scratch == NULL:
            raise MemoryError(f"no memory for a window of {batch_size} rows")

    def __dealloc__(self):
        free(self.scratch)

    def clear(self):
        """Forget them."""
        self.windows.clear()

    cdef StepWindow find(self, object start_pos, object seqlen, object qo_indptr, Py_ssize_t num_tokens):
        cdef Py_ssize_t n = self.batch_size, b
        cdef int64_t *starts = self.scratch
        cdef int64_t *ends = self.scratch + n
        cdef int64_t *offsets = self.scratch + 2 * n
        cdef StepWindow window
        # What runs foreign code comes before the scratch is filled, for that may ask for a window too.
        start_pos, seqlen, qo_indptr = settled(start_pos), settled(seqlen), settled(qo_indptr)
        read_positions(start_pos, "start_pos", n, starts)
        if qo_indptr is None:
            read_positions(seqlen, "seqlen", n, ends)
            offsets[0] = 0
            for b in range(n):
                offsets[b + 1] = offsets[b] + ends[b]
        else:
            read_indptr(qo_indptr, n, num_tokens, offsets)
        for b in range(n):
            ends[b] = starts[b] + (offsets[b + 1] - offsets[b])
        for window in reversed(self.windows):
            if memcmp(window.starts, starts, (3 * n + 1) * sizeof(int64_t)) == 0:
                return window
        window = StepWindow()
        window.starts = <int64_t *>malloc((3 * n + 1) * sizeof(int64_t))
        if window.starts == NULL:
            raise MemoryError(f"no memory for a window of {n} rows")
        memcpy(window.starts, starts, (3 * n + 1) * sizeof(int64_t))
        window.ends = window.starts + n
        window.offsets = window.starts + 2 * n
        window.batch_size = n
        if len(self.windows) == RECENT_WINDOWS:
            del self.windows[0]
        self.windows.append(window)
        return window


cdef object settled(object values):
    """`values` as an int or array, where it is neither and holds integers; else as it is, for its error."""
    if values is None or type(values) is int or cnp.PyArray_Check(values):
        return values
    found = np.asarray(values)
    return found if found.dtype.kind in "iu" else values


cdef int read_positions(object values, str name, Py_ssize_t n, int64_t *out) except -1:
    """One non-negative position a row from an int (for all rows) or a sequence ``[batch]``."""
    cdef Py_ssize_t b
    cdef int64_t value
    cdef cnp.ndarray array
    if type(values) is int:
        if not 0 <= values <= INT32_MAX:
            raise ValueError(f"{name} must be in 0 .. {INT32_MAX}, got {values}")
        value = values
        for b in range(n):
            out[b] = value
        return 0
    if copy_integers(values, n, out):
        for b in range(n):
            if not 0 <= out[b] <= INT32_MAX:
                raise ValueError(f"{name} must be in 0 .. {INT32_MAX}, got {out[b]} in row {b}")
        return 0
    found = np.asarray(values)
    if found.dtype.kind not in "iu":
        if found.size or not isinstance(values, (list, tuple)):
            raise TypeError(f"{name} must be an int or integers [batch], got {type(values).__name__} of {found.dtype}")
    if found.ndim == 0:
        return read_positions(int(found), name, n, out)
    if found.ndim != 1 or found.shape[0] != n:
        raise ValueError(f"{name} must be an int or one per row [{n}], got shape {found.shape}")
    if found.size and (found.min() < 0 or found.max() > INT32_MAX):
        bad = found.min() if found.min() < 0 else found.max()
        raise ValueError(f"{name} must be in 0 .. {INT32_MAX}, got {bad} in row {int(np.argmax(found == bad))}")
    array = np.ascontiguousarray(found, dtype=np.int64)
    memcpy(out, cnp.PyArray_DATA(array), n * sizeof(int64_t))
    return 0


cdef bint copy_integers(object values, Py_ssize_t n, int64_t *out) noexcept:
    """Copy `values` if they are plain int64 or int32 ``[n]``, as every layer of a step passes them again."""
    cdef const int32_t *narrow
    cdef Py_ssize_t b
    if not cnp.PyArray_Check(values):
        return False
    cdef cnp.ndarray array = <cnp.ndarray>values
    if cnp.PyArray_NDIM(array) != 1 or cnp.PyArray_DIM(array, 0) != n or not cnp.PyArray_ISCARRAY_RO(array):
        return False
    if cnp.PyArray_TYPE(array) == cnp.NPY_INT64:
        memcpy(out, cnp.PyArray_DATA(array), n * sizeof(int64_t))
        return True
    if cnp.PyArray_TYPE(array) == cnp.NPY_INT32:
        narrow = <const int32_t *>cnp.PyArray_DATA(array)
        for b in range(n):
            out[b] = narrow[b]
        return True
    return False


cdef int read_indptr(object qo_indptr, Py_ssize_t n, Py_ssize_t num_tokens, int64_t *out) except -1:
    cdef Py_ssize_t b
    cdef bint falls = False
    if not copy_integers(qo_indptr, n + 1, out):
        found = np.asarray(qo_indptr)
        if found.dtype.kind not in "iu":
            raise TypeError(f"qo_indptr must be integers, got dtype {found.dtype}")
        if found.shape != (n + 1,):
            raise ValueError(f"qo_indptr must be [batch + 1] = [{n + 1}], got shape {found.shape}")
        # Aligned, too: what `copy_integers` refuses would leave in `out` what the last call did.
        copy_integers(np.require(found, np.int64, "CA"), n + 1, out)
    for b in range(n):
        falls |= out[b + 1] < out[b]
    if out[0] != 0 or falls:
        raise ValueError(f"qo_indptr must start at 0 and not decrease, got {list(qo_indptr)}")
    if num_tokens >= 0 and out[n] != num_tokens:
        raise ValueError(f"qo_indptr ends at {out[n]}, k and v have {num_tokens} rows")
    return 0
