"""PageMapRows: what a page map ``[rows, max_pages]`` on a device holds, and what a step must send to it.

A map row is a row of the pool's `LengthTable`, so a request keeps its map row while it is bound. Sent are the pages that
the map does not have: all of a request that is new in its row, the tail of one that grew, all again of one that shrank
since, as it may have grown back with other pages. Where nothing is missing, nothing of the size of a request is touched.
"""
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memcpy

import numpy as np

cimport numpy as cnp

from kvpool_ext.lease cimport PageLease
from kvpool_ext.memory cimport free, realloc
from kvpool_ext.tables cimport StepRows
from kvpool_ext.types cimport page_t

cnp.import_array()

cdef enum:
    STEP_ARRAYS = 3    # rows, lengths and starts
    RUN_INTS = 4       # map row, first page, number of pages, where their ids are


cdef class PageMapRows:
    """Host's knowledge of a page map; that of a new one holds no row."""

    def __dealloc__(self):
        free(self.notes)

    def resize(self, Py_ssize_t num_rows, Py_ssize_t max_pages):
        """Know nothing any more, of a map of another shape."""
        cdef RowNote *notes = <RowNote *>realloc(self.notes, max(1, num_rows) * sizeof(RowNote))
        cdef Py_ssize_t row
        if notes == NULL:
            raise MemoryError(f"no memory for the notes of {num_rows} map rows")
        self.notes = notes
        self.num_rows = num_rows
        self.max_pages = max_pages
        for row in range(num_rows):
            notes[row].num_pages = 0

    def shape_for(self, StepRows step):
        """The smallest ``(rows, max_pages)`` of a map for this step."""
        cdef Py_ssize_t b, num_rows = 0, max_pages = 0
        for b in range(step.batch_size):
            num_rows = max(num_rows, step.rows[b] + 1)
            max_pages = max(max_pages, (<PageLease>step.lease_ptrs[b]).num_pages)
        return num_rows, max_pages

    cdef Py_ssize_t num_known(self, Py_ssize_t row, PageLease lease) except -1:
        """Leading pages of `lease` that the map has."""
        cdef RowNote *note = &self.notes[row]
        if note.num_pages == 0 or note.num_shrinks != lease.num_shrinks or note.serial != lease.serial:
            return 0
        return note.num_pages

    def num_ints(self, StepRows step):
        """How much `pack` will write, or -1 where the step needs a larger map."""
        cdef Py_ssize_t b, row, known, total = 1 + STEP_ARRAYS * step.batch_size
        cdef PageLease lease
        for b in range(step.batch_size):
            row = step.rows[b]
            lease = <PageLease>step.lease_ptrs[b]
            if row >= self.num_rows or lease.num_pages > self.max_pages:
                return -1
            known = self.num_known(row, lease)
            if known < lease.num_pages:
                total += RUN_INTS + lease.num_pages - known
        return total

    def pack(self, StepRows step, lengths, starts, int64_t window_len, int64_t max_indices, out):
        """Write what a device needs for a page table of the step, in one piece::

            batch_size  rows[batch]  lengths[batch]  starts[batch]  runs[num_runs, 4]  page ids

        A run is a map row, the first page, the number of pages, and where in `out` their ids are.

        Parameters
        ----------
        step : StepRows
            For which `num_ints` was asked last.
        lengths : int64 ``[batch]``
            Tokens that the table covers, of each row.
        starts : int64 ``[batch]`` or None
            First position that each row writes; negative, or None for all rows, where it writes to scratch slots.
        window_len : int
            Positions that a row writes.
        max_indices : int
            Pages that the table has room for.
        out : int32 ``[num_ints]``
            Written from end to end.

        Returns
        -------
        int
            Runs.

        Raises
        ------
        ValueError
            Positions past a row's pages, or more pages than there is room for.
        """
        cdef const int64_t *length = column("lengths", lengths, step.batch_size)
        cdef const int64_t *start = NULL
        if starts is not None:
            start = column("starts", starts, step.batch_size)
        return self.pack_rows(step, length, start, window_len, max_indices, out)

    cdef int pack_rows(
        self, StepRows step, const int64_t *lengths, const int64_t *starts, int64_t window_len, int64_t max_indices,
        object out,
    ) except -1:
        cdef Py_ssize_t n = step.batch_size, b, known, count, size = 0, page_size = step.page_size
        cdef int32_t *ints = checked_out(out, &size)
        cdef int64_t start, end, num_indices = 0
        cdef PageLease lease
        # Runs are written from the front, their ids from the back; they meet, if all is right.
        cdef Py_ssize_t front = 1 + STEP_ARRAYS * n, back = size, num_runs = 0
        if front > size:
            raise ValueError(f"out must have at least {front} elements for a step of {n} rows, got {size}")
        ints[0] = <int32_t>n
        for b in range(n):
            lease = <PageLease>step.lease_ptrs[b]
            start = -1 if starts == NULL or starts[b] < 0 else starts[b]
            end = start + window_len if start >= 0 else 0
            if max(lengths[b], end) > min(lease.num_pages * page_size, INT32_MAX) or lengths[b] < 0:
                raise self.past_capacity(lease, page_size, lengths[b], start, end)
            ints[1 + b] = step.rows[b]
            ints[1 + n + b] = <int32_t>lengths[b]
            ints[1 + 2 * n + b] = <int32_t>start
            num_indices += (lengths[b] + page_size - 1) // page_size
            known = self.num_known(step.rows[b], lease)
            count = lease.num_pages - known
            if count <= 0:
                continue
            if front + RUN_INTS > back - count:
                raise ValueError(f"out must have num_ints(step) elements, got {size}, too few")
            back -= count
            memcpy(ints + back, lease.page_ids + known, count * sizeof(page_t))
            ints[front] = step.rows[b]
            ints[front + 1] = <int32_t>known
            ints[front + 2] = <int32_t>count
            ints[front + 3] = <int32_t>back
            front += RUN_INTS
            num_runs += 1
        if front != back:
            raise ValueError(f"out must have num_ints(step) elements, got {size}, {back - front} too many")
        if num_indices > max_indices:
            raise ValueError(f"the page table has room for {max_indices} pages, the rows have {num_indices}")
        return <int>num_runs

    cdef object past_capacity(self, PageLease lease, Py_ssize_t page_size, int64_t length, int64_t start, int64_t end):
        return ValueError(
            f"request {lease.tag} has {lease.num_pages * page_size} slots, got length {length} and writes at "
            f"[{start}, {end})"
        )

    def accept(self, StepRows step):
        """Note that what `pack` wrote last, for this step, is in the map: after all that can fail."""
        cdef Py_ssize_t b
        cdef PageLease lease
        cdef RowNote *note
        for b in range(step.batch_size):
            lease = <PageLease>step.lease_ptrs[b]
            note = &self.notes[step.rows[b]]
            note.serial = lease.serial
            note.num_pages = lease.num_pages
            note.num_shrinks = lease.num_shrinks


cdef const int64_t *column(str name, object values, Py_ssize_t n) except NULL:
    """Data of plain int64 ``[n]``."""
    if not cnp.PyArray_Check(values):
        raise TypeError(f"{name} must be int64 [{n}], got {type(values).__name__}")
    cdef cnp.ndarray array = <cnp.ndarray>values
    if (
        cnp.PyArray_TYPE(array) != cnp.NPY_INT64
        or cnp.PyArray_NDIM(array) != 1
        or cnp.PyArray_DIM(array, 0) != n
        or not cnp.PyArray_ISCARRAY_RO(array)
    ):
        raise ValueError(f"{name} must be contiguous int64 [{n}], got {array.dtype} {list(np.shape(array))}")
    return <const int64_t *>cnp.PyArray_DATA(array)


cdef int32_t *checked_out(object out, Py_ssize_t *size) except NULL:
    """Data and length of plain int32 ``[n]`` that may be written to."""
    if not cnp.PyArray_Check(out):
        raise TypeError(f"out must be int32 [n], got {type(out).__name__}")
    cdef cnp.ndarray array = <cnp.ndarray>out
    if (
        cnp.PyArray_TYPE(array) != cnp.NPY_INT32 or cnp.PyArray_NDIM(array) != 1 or not cnp.PyArray_ISCARRAY(array)
    ):
        raise ValueError(f"out must be contiguous int32 [n], got {array.dtype} {list(np.shape(array))}")
    size[0] = cnp.PyArray_DIM(array, 0)
    return <int32_t *>cnp.PyArray_DATA(array)
