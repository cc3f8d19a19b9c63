"""Per-step tables: slots of positions, CSR page tables, written lengths. One C pass over the rows of a step each.

A slot is ``page * page_size + offset``; a position is an index into one holder's tokens. Layers are only columns of a
length table here, and memory is only slots.
"""
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy

import numpy as np

cimport numpy as cnp

from kvpool_ext.lease cimport PageLease
from kvpool_ext.types cimport page_t

cnp.import_array()

cdef enum:
    RECENT_WINDOWS = 16    # a pass has one or two; a loop over one step makes a new one each time


cdef cnp.ndarray new_int64(Py_ssize_t n):
    cdef cnp.npy_intp shape = n
    return cnp.PyArray_EMPTY(1, &shape, cnp.NPY_INT64, 0)


cdef cnp.ndarray new_int32(Py_ssize_t n):
    cdef cnp.npy_intp shape = n
    return cnp.PyArray_EMPTY(1, &shape, cnp.NPY_INT32, 0)


cdef class LengthTable:
    """Leading written lengths, ``[rows, num_columns]`` int32; rows are stable while in use.

    Parameters
    ----------
    num_columns : int
        Columns of each row (layers of the pool).
    """

    def __cinit__(self, Py_ssize_t num_columns):
        self.num_columns = num_columns
        self.free_rows = []

    def __dealloc__(self):
        free(self.lengths)

    cdef int32_t *row(self, Py_ssize_t row) noexcept nogil:
        return self.lengths + row * self.num_columns

    def add(self, Py_ssize_t length):
        """A row with `length` in every column; returns its index."""
        cdef Py_ssize_t row, grown, i
        cdef int32_t *lengths
        if self.free_rows:
            row = self.free_rows.pop()
        else:
            if self.num_rows == self.capacity:
                grown = max(16, self.capacity * 2)
                lengths = <int32_t *>realloc(self.lengths, grown * self.num_columns * sizeof(int32_t))
                if lengths == NULL:
                    raise MemoryError(f"no memory for the written lengths of {grown} requests")
                self.lengths = lengths
                self.capacity = grown
            row = self.num_rows
            self.num_rows += 1
        for i in range(self.num_columns):
            self.row(row)[i] = <int32_t>length
        return row

    def remove(self, Py_ssize_t row):
        """Give a row back."""
        self.free_rows.append(row)

    def minimum(self, Py_ssize_t row):
        """The smallest length of a row."""
        cdef int32_t *lengths = self.row(row)
        cdef int32_t smallest = lengths[0]
        cdef Py_ssize_t i
        for i in range(1, self.num_columns):
            smallest = min(smallest, lengths[i])
        return smallest

    def raise_to(self, Py_ssize_t row, Py_ssize_t length):
        """Raise every column of a row to at least `length`."""
        cdef int32_t *lengths = self.row(row)
        cdef Py_ssize_t i
        for i in range(self.num_columns):
            lengths[i] = max(lengths[i], <int32_t>length)

    def cap(self, Py_ssize_t row, Py_ssize_t length):
        """Lower every column of a row to at most `length`."""
        cdef int32_t *lengths = self.row(row)
        cdef Py_ssize_t i
        for i in range(self.num_columns):
            lengths[i] = min(lengths[i], <int32_t>length)

    def copy_row(self, Py_ssize_t source, Py_ssize_t target):
        """Copy one row over another."""
        memcpy(self.row(target), self.row(source), self.num_columns * sizeof(int32_t))

    def column(self, Py_ssize_t row):
        """The lengths of a row as a list; for people and tests."""
        return [self.row(row)[i] for i in range(self.num_columns)]


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


cdef class StepRows:
    """The leases of one step in row order, and the tables made from them.

    Parameters
    ----------
    leases : sequence of PageLease
        One a row.
    rows : sequence of int
        Row of each lease in `lengths`.
    lengths : LengthTable
        Written lengths of all leases.
    page_size : int
        Tokens per page.
    """

    def __cinit__(self, leases, rows, LengthTable lengths, Py_ssize_t page_size):
        cdef PageLease lease
        self.leases = list(leases)
        self.batch_size = len(self.leases)
        self.page_size = page_size
        self.lengths = lengths
        self.windows = []
        self.lease_ptrs = <void **>malloc(self.batch_size * sizeof(void *))
        self.rows = <int32_t *>malloc(self.batch_size * sizeof(int32_t))
        self.scratch = <int64_t *>malloc((3 * self.batch_size + 1) * sizeof(int64_t))
        if self.lease_ptrs == NULL or self.rows == NULL or self.scratch == NULL:
            raise MemoryError(f"no memory for a step of {self.batch_size} rows")
        for b in range(self.batch_size):
            lease = self.leases[b]
            self.lease_ptrs[<Py_ssize_t>b] = <void *>lease
            self.rows[<Py_ssize_t>b] = rows[b]

    def __dealloc__(self):
        free(self.lease_ptrs)
        free(self.rows)
        free(self.scratch)

    def capacities(self):
        """Slots reserved for each row, in tokens."""
        cdef PageLease lease
        return [lease.num_pages * self.page_size for lease in self.leases]

    # ---- positions

    cdef int read_positions(self, object values, str name, int64_t *out) except -1:
        """One non-negative position a row from an int (for all rows) or a sequence ``[batch]``."""
        cdef Py_ssize_t b
        cdef int64_t value
        cdef cnp.ndarray array
        if type(values) is int:
            if not 0 <= values <= INT32_MAX:
                raise ValueError(f"{name} must be in 0 .. {INT32_MAX}, got {values}")
            value = values
            for b in range(self.batch_size):
                out[b] = value
            return 0
        if self.copy_int64(values, self.batch_size, out):
            for b in range(self.batch_size):
                if not 0 <= out[b] <= INT32_MAX:
                    raise ValueError(f"{name} must be in 0 .. {INT32_MAX}, got {out[b]} in row {b}")
            return 0
        found = np.asarray(values)
        if found.dtype.kind not in "iu":
            if found.size or not isinstance(values, (list, tuple)):
                raise TypeError(f"{name} must be an int or integers [batch], got {type(values).__name__} of {found.dtype}")
        if found.ndim == 0:
            return self.read_positions(int(found), name, out)
        if found.ndim != 1 or found.shape[0] != self.batch_size:
            raise ValueError(f"{name} must be an int or one per row [{self.batch_size}], got shape {found.shape}")
        if found.size and (found.min() < 0 or found.max() > INT32_MAX):
            bad = found.min() if found.min() < 0 else found.max()
            raise ValueError(f"{name} must be in 0 .. {INT32_MAX}, got {bad} in row {int(np.argmax(found == bad))}")
        array = np.ascontiguousarray(found, dtype=np.int64)
        memcpy(out, cnp.PyArray_DATA(array), self.batch_size * sizeof(int64_t))
        return 0

    cdef bint copy_int64(self, object values, Py_ssize_t n, int64_t *out) noexcept:
        """Copy `values` if they are plain int64 ``[n]``, as every layer of a step passes them again."""
        if not cnp.PyArray_Check(values):
            return False
        cdef cnp.ndarray array = <cnp.ndarray>values
        if (
            cnp.PyArray_TYPE(array) != cnp.NPY_INT64
            or cnp.PyArray_NDIM(array) != 1
            or cnp.PyArray_DIM(array, 0) != n
            or not cnp.PyArray_ISCARRAY_RO(array)
        ):
            return False
        memcpy(out, cnp.PyArray_DATA(array), n * sizeof(int64_t))
        return True

    def positions(self, values, str name):
        """One non-negative position a row as int64 ``[batch]``, from an int or a sequence."""
        cdef cnp.ndarray out = new_int64(self.batch_size)
        self.read_positions(values, name, <int64_t *>cnp.PyArray_DATA(out))
        return out

    def window(self, start_pos, seqlen, qo_indptr=None, Py_ssize_t num_tokens=-1):
        """The positions that a call touches; the same object while the same positions are asked for again.

        Parameters
        ----------
        start_pos : int or sequence of int
            First position of each row.
        seqlen : int, sequence of int or None
            Positions of each row; None when `qo_indptr` says them.
        qo_indptr : sequence of int or None
            ``[batch + 1]``, CSR of the rows' positions.
        num_tokens : int
            Expected ``qo_indptr[-1]``, -1 for any.
        """
        cdef Py_ssize_t n = self.batch_size, b
        cdef int64_t *starts = self.scratch
        cdef int64_t *ends = self.scratch + n
        cdef int64_t *offsets = self.scratch + 2 * n
        cdef StepWindow window
        self.read_positions(start_pos, "start_pos", starts)
        if qo_indptr is None:
            self.read_positions(seqlen, "seqlen", ends)
            offsets[0] = 0
            for b in range(n):
                offsets[b + 1] = offsets[b] + ends[b]
        else:
            self.read_indptr(qo_indptr, num_tokens, offsets)
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

    cdef int read_indptr(self, object qo_indptr, Py_ssize_t num_tokens, int64_t *out) except -1:
        cdef Py_ssize_t n = self.batch_size, b
        cdef bint falls = False
        if not self.copy_int64(qo_indptr, n + 1, out):
            found = np.asarray(qo_indptr)
            if found.dtype.kind not in "iu":
                raise TypeError(f"qo_indptr must be integers, got dtype {found.dtype}")
            if found.shape != (n + 1,):
                raise ValueError(f"qo_indptr must be [batch + 1] = [{n + 1}], got shape {found.shape}")
            self.copy_int64(np.ascontiguousarray(found, dtype=np.int64), n + 1, out)
        for b in range(n):
            falls |= out[b + 1] < out[b]
        if out[0] != 0 or falls:
            raise ValueError(f"qo_indptr must start at 0 and not decrease, got {list(qo_indptr)}")
        if num_tokens >= 0 and out[n] != num_tokens:
            raise ValueError(f"qo_indptr ends at {out[n]}, k and v have {num_tokens} rows")
        return 0

    def forget_windows(self):
        """Drop what was remembered of pages that rows may have given back."""
        self.windows.clear()

    def num_shrinks(self):
        """How often rows of this step gave pages back."""
        cdef PageLease lease
        cdef Py_ssize_t total = 0
        for lease in self.leases:
            total += lease.num_shrinks
        return total

    def first_length_past_capacity(self, lengths):
        """First row whose length (int64 ``[batch]``) is past its capacity, or -1."""
        cdef cnp.ndarray wanted = lengths
        cdef const int64_t *length = <const int64_t *>cnp.PyArray_DATA(wanted)
        cdef Py_ssize_t b
        for b in range(self.batch_size):
            if length[b] > (<PageLease>self.lease_ptrs[b]).num_pages * self.page_size:
                return b
        return -1

    def first_past_capacity(self, StepWindow window):
        """First row whose positions end past its capacity, or -1."""
        cdef Py_ssize_t b
        for b in range(self.batch_size):
            if window.ends[b] > (<PageLease>self.lease_ptrs[b]).num_pages * self.page_size:
                return b
        return -1

    def first_shared(self, StepWindow window):
        """First row with a position on a read-only page, or -1."""
        cdef Py_ssize_t b
        for b in range(self.batch_size):
            if window.ends[b] > window.starts[b] and (
                window.starts[b] < (<PageLease>self.lease_ptrs[b]).shared_pages * self.page_size
            ):
                return b
        return -1

    # ---- slots

    def window_slots(self, StepWindow window):
        """Slots of the window's positions, row by row, int64 ``[num_tokens]``; capacity was checked."""
        cdef cnp.ndarray out = new_int64(window.offsets[self.batch_size])
        cdef int64_t *slots = <int64_t *>cnp.PyArray_DATA(out)
        cdef Py_ssize_t b
        with nogil:
            for b in range(self.batch_size):
                write_slots(
                    (<PageLease>self.lease_ptrs[b]).page_ids, window.starts[b], window.ends[b],
                    self.page_size, slots + window.offsets[b],
                )
        return out

    def range_slots(self, StepWindow window):
        """Slots of those of the window's positions that lie on entered pages, int64."""
        cdef cnp.ndarray out = new_int64(window.offsets[self.batch_size])
        cdef int64_t *slots = <int64_t *>cnp.PyArray_DATA(out)
        cdef Py_ssize_t b, done = 0
        cdef int64_t end
        for b in range(self.batch_size):
            end = min(window.ends[b], (<PageLease>self.lease_ptrs[b]).entered_pages * self.page_size)
            if end > window.starts[b]:
                write_slots(
                    (<PageLease>self.lease_ptrs[b]).page_ids, window.starts[b], end, self.page_size, slots + done
                )
                done += end - window.starts[b]
        return out[:done]

    def entering(self, StepWindow window):
        """Slots of the window's pages that were never written to, or None; `enter` notes that they are now."""
        cdef Py_ssize_t b, total = 0, last
        cdef PageLease lease
        for b in range(self.batch_size):
            last = (window.ends[b] + self.page_size - 1) // self.page_size
            if window.ends[b] > window.starts[b]:
                total += max(0, last - (<PageLease>self.lease_ptrs[b]).entered_pages)
        if total == 0:
            return None
        cdef cnp.ndarray out = new_int64(total * self.page_size)
        cdef int64_t *slots = <int64_t *>cnp.PyArray_DATA(out)
        for b in range(self.batch_size):
            lease = <PageLease>self.lease_ptrs[b]
            last = (window.ends[b] + self.page_size - 1) // self.page_size
            if window.ends[b] > window.starts[b] and last > lease.entered_pages:
                write_slots(
                    lease.page_ids, lease.entered_pages * self.page_size, last * self.page_size,
                    self.page_size, slots,
                )
                slots += (last - lease.entered_pages) * self.page_size
        return out

    def enter(self, StepWindow window):
        """Note that the window's pages hold no stale bits any more."""
        cdef Py_ssize_t b, last
        cdef PageLease lease
        for b in range(self.batch_size):
            lease = <PageLease>self.lease_ptrs[b]
            last = (window.ends[b] + self.page_size - 1) // self.page_size
            if window.ends[b] > window.starts[b] and last > lease.entered_pages:
                lease.entered_pages = last

    def advance(self, Py_ssize_t column, StepWindow window):
        """Raise the written length of each row whose window starts within it."""
        cdef Py_ssize_t b
        cdef int32_t *length
        for b in range(self.batch_size):
            length = self.lengths.row(self.rows[b]) + column
            if window.starts[b] <= length[0] and window.ends[b] > length[0]:
                length[0] = <int32_t>window.ends[b]

    def slot_indices(self, Py_ssize_t length, bint entered_only):
        """Slots of positions ``[0, length)`` of every row, int64 ``[batch * length]``.

        Positions past a row's capacity repeat its last slot. With `entered_only`, slots on pages that were never
        written are -1.
        """
        cdef cnp.ndarray out = new_int64(self.batch_size * length)
        cdef int64_t *slots = <int64_t *>cnp.PyArray_DATA(out)
        cdef PageLease lease
        cdef Py_ssize_t b, i, within, entered
        cdef int64_t last
        for b in range(self.batch_size):
            lease = <PageLease>self.lease_ptrs[b]
            within = min(length, lease.num_pages * self.page_size)
            write_slots(lease.page_ids, 0, within, self.page_size, slots)
            if within < length:
                last = <int64_t>lease.page_ids[lease.num_pages - 1] * self.page_size + self.page_size - 1
                if entered_only and lease.entered_pages < lease.num_pages:
                    last = -1
                for i in range(within, length):
                    slots[i] = last
            if entered_only:
                entered = lease.entered_pages * self.page_size
                for i in range(entered, within):
                    slots[i] = -1
            slots += length
        return out

    # ---- page tables

    def page_table(self, lengths):
        """CSR page table of the first ``lengths[b]`` positions of each row: ``(indptr, indices, last_page_len)``, int32.

        Capacity was checked. A row of length 0 has no page and ``last_page_len`` 0.
        """
        cdef cnp.ndarray wanted = lengths
        cdef const int64_t *length = <const int64_t *>cnp.PyArray_DATA(wanted)
        cdef Py_ssize_t n = self.batch_size, b, count, page_size = self.page_size
        cdef cnp.ndarray indptr_array = new_int32(n + 1), last_array = new_int32(n)
        cdef int32_t *indptr = <int32_t *>cnp.PyArray_DATA(indptr_array)
        cdef int32_t *last = <int32_t *>cnp.PyArray_DATA(last_array)
        indptr[0] = 0
        for b in range(n):
            count = (length[b] + page_size - 1) // page_size
            indptr[b + 1] = indptr[b] + <int32_t>count
            last[b] = <int32_t>(length[b] - (count - 1) * page_size) if count > 0 else 0
        cdef cnp.ndarray indices_array = new_int32(indptr[n])
        cdef int32_t *indices = <int32_t *>cnp.PyArray_DATA(indices_array)
        for b in range(n):
            memcpy(
                indices + indptr[b], (<PageLease>self.lease_ptrs[b]).page_ids,
                (indptr[b + 1] - indptr[b]) * sizeof(page_t),
            )
        return indptr_array, indices_array, last_array


cdef void write_slots(
    const page_t *page_ids, int64_t start, int64_t end, Py_ssize_t page_size, int64_t *out
) noexcept nogil:
    """Slots of positions ``[start, end)``, page by page: no division a position."""
    cdef int64_t page = start // page_size, position = start, stop, base
    while position < end:
        stop = min(end, (page + 1) * page_size)
        base = <int64_t>page_ids[page] * page_size - page * page_size
        while position < stop:
            out[0] = base + position
            out += 1
            position += 1
        page += 1
