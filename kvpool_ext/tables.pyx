"""StepRows: slots of positions and CSR page tables of the rows of a step, one C pass over the rows each.

A slot is ``page * page_size + offset``; a position is an index into one holder's tokens. Layers are only columns of a
length table here, and memory is only slots.
"""
import numpy as np

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from kvpool_ext.lease cimport PageLease
from kvpool_ext.lengths cimport LengthTable
from kvpool_ext.memory cimport free, malloc
from kvpool_ext.types cimport page_t
from kvpool_ext.windows cimport RecentWindows, StepWindow, new_int32, new_int64, read_positions

cnp.import_array()


cdef class StepRows:
    """The leases of one step in row order, and the tables made from them.

    Parameters
    ----------
    leases : sequence of PageLease
        One a row.
    lengths : LengthTable
        Written lengths of all leases.
    page_size : int
        Tokens per page.
    """

    def __cinit__(self, leases, LengthTable lengths, Py_ssize_t page_size):
        cdef PageLease lease
        self.leases = list(leases)
        self.batch_size = len(self.leases)
        self.page_size = page_size
        self.lengths = lengths
        self.windows = RecentWindows(self.batch_size)
        self.lease_ptrs = <void **>malloc(self.batch_size * sizeof(void *))
        self.rows = <int32_t *>malloc(self.batch_size * sizeof(int32_t))
        if self.lease_ptrs == NULL or self.rows == NULL:
            raise MemoryError(f"no memory for a step of {self.batch_size} rows")
        for b in range(self.batch_size):
            lease = self.leases[b]
            self.lease_ptrs[<Py_ssize_t>b] = <void *>lease
            self.rows[<Py_ssize_t>b] = <int32_t>lease.row

    def __dealloc__(self):
        free(self.lease_ptrs)
        free(self.rows)

    def capacities(self):
        """Slots reserved for each row, in tokens."""
        cdef PageLease lease
        return [lease.num_pages * self.page_size for lease in self.leases]

    # ---- positions

    def positions(self, values, str name):
        """One non-negative position a row as int64 ``[batch]``, from an int or a sequence."""
        cdef cnp.ndarray out = new_int64(self.batch_size)
        read_positions(values, name, self.batch_size, <int64_t *>cnp.PyArray_DATA(out))
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
        return self.windows.find(start_pos, seqlen, qo_indptr, num_tokens)

    def forget_windows(self):
        """Drop what was remembered of pages that rows may have given back."""
        self.windows.clear()

    def all_live(self):
        """Whether every lease is still held."""
        cdef Py_ssize_t b
        for b in range(self.batch_size):
            if not (<PageLease>self.lease_ptrs[b]).live:
                return False
        return True

    def num_shrinks(self):
        """How often rows of this step gave pages back."""
        cdef Py_ssize_t total = 0, b
        for b in range(self.batch_size):
            total += (<PageLease>self.lease_ptrs[b]).num_shrinks
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

    def first_past_length(self, StepWindow window, lengths):
        """First row whose positions end past its length (int64 ``[batch]``), or -1."""
        cdef const int64_t *length = <const int64_t *>cnp.PyArray_DATA(<cnp.ndarray>lengths)
        cdef Py_ssize_t b
        for b in range(self.batch_size):
            if window.ends[b] > length[b]:
                return b
        return -1

    def first_bad_range(self, starts, ends, bint may_touch):
        """First row whose ``[start, end)`` (int64 ``[batch]`` each) may not be taken back, or -1.

        That is one that is reversed, ends past the row's capacity, or starts on a read-only page; with `may_touch`,
        an empty one may start there.
        """
        cdef const int64_t *start = <const int64_t *>cnp.PyArray_DATA(<cnp.ndarray>starts)
        cdef const int64_t *end = <const int64_t *>cnp.PyArray_DATA(<cnp.ndarray>ends)
        cdef Py_ssize_t b
        cdef PageLease lease
        for b in range(self.batch_size):
            lease = <PageLease>self.lease_ptrs[b]
            if end[b] < start[b] or end[b] > lease.num_pages * self.page_size:
                return b
            if start[b] < lease.shared_pages * self.page_size and not (may_touch and start[b] == end[b]):
                return b
        return -1

    # ---- written lengths

    def advance(self, Py_ssize_t column, StepWindow window):
        """Raise the written length of each row whose window starts within it."""
        cdef Py_ssize_t b
        for b in range(self.batch_size):
            self.raise_column(b, column, window)

    def advance_all(self, StepWindow window):
        """`advance` in every column."""
        cdef Py_ssize_t b, column
        for b in range(self.batch_size):
            for column in range(self.lengths.num_columns):
                self.raise_column(b, column, window)

    cdef void raise_column(self, Py_ssize_t b, Py_ssize_t column, StepWindow window) noexcept nogil:
        cdef int32_t *length = self.lengths.row(self.rows[b]) + column
        if window.starts[b] <= length[0] and window.ends[b] > length[0]:
            length[0] = <int32_t>window.ends[b]

    def cap(self, lengths):
        """Lower every column of each row to at most its length, int64 ``[batch]``."""
        cdef const int64_t *length = <const int64_t *>cnp.PyArray_DATA(<cnp.ndarray>lengths)
        cdef Py_ssize_t b
        for b in range(self.batch_size):
            self.lengths.cap(self.rows[b], length[b])

    def cap_window(self, StepWindow window):
        """Lower every column of each row with positions in the window to where they start."""
        cdef Py_ssize_t b
        for b in range(self.batch_size):
            if window.ends[b] > window.starts[b]:
                self.lengths.cap(self.rows[b], window.starts[b])

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
        """Those of the window's pages that were never written to, int64, or None; `enter` notes that they are now."""
        cdef Py_ssize_t b, total = 0, last, p
        cdef PageLease lease
        for b in range(self.batch_size):
            last = (window.ends[b] + self.page_size - 1) // self.page_size
            if window.ends[b] > window.starts[b]:
                total += max(0, last - (<PageLease>self.lease_ptrs[b]).entered_pages)
        if total == 0:
            return None
        cdef cnp.ndarray out = new_int64(total)
        cdef int64_t *page = <int64_t *>cnp.PyArray_DATA(out)
        for b in range(self.batch_size):
            lease = <PageLease>self.lease_ptrs[b]
            last = (window.ends[b] + self.page_size - 1) // self.page_size
            if window.ends[b] > window.starts[b]:
                for p in range(lease.entered_pages, last):
                    page[0] = lease.page_ids[p]
                    page += 1
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

    def fill_slots(self, starts, Py_ssize_t window_len, int64_t scratch_slot, slots):
        """Fill int64 `slots` ``[bucket, window_len]``: those of the rows' windows, and scratch for all other rows.

        Parameters
        ----------
        starts : ndarray or None
            int64 ``[batch]``, first position of each row; capacity was checked. None sends every row to scratch.
        window_len : int
            Positions of each row.
        scratch_slot : int
            First slot of the scratch page; rows go around it.
        slots : ndarray
            int64, C-contiguous, a whole number of rows and at least the step's.
        """
        cdef cnp.ndarray out = slots
        cdef int64_t *slot = <int64_t *>cnp.PyArray_DATA(out)
        cdef Py_ssize_t b, i, n = 0
        cdef const int64_t *start = NULL
        if starts is not None:
            n = self.batch_size
            start = <const int64_t *>cnp.PyArray_DATA(<cnp.ndarray>starts)
        for b in range(n):
            write_slots(
                (<PageLease>self.lease_ptrs[b]).page_ids, start[b], start[b] + window_len, self.page_size,
                slot + b * window_len,
            )
        for i in range(n * window_len, cnp.PyArray_SIZE(out)):
            slot[i] = scratch_slot + i % self.page_size

    # ---- page tables

    def identity(self):
        """Bytes that are equal as long as the rows have the pages that they had, or more of them."""
        cdef Py_ssize_t b
        cdef PageLease lease
        cdef cnp.ndarray out = new_int64(2 * self.batch_size)
        cdef int64_t *word = <int64_t *>cnp.PyArray_DATA(out)
        for b in range(self.batch_size):
            lease = <PageLease>self.lease_ptrs[b]
            word[2 * b] = lease.serial
            word[2 * b + 1] = lease.num_shrinks
        return out.tobytes()

    def num_pages_over(self, lengths):
        """Pages that a table over the first ``lengths[b]`` positions (int64 ``[batch]``) of each row lists."""
        cdef const int64_t *length = <const int64_t *>cnp.PyArray_DATA(<cnp.ndarray>lengths)
        cdef Py_ssize_t b, total = 0
        for b in range(self.batch_size):
            total += (length[b] + self.page_size - 1) // self.page_size
        return total

    def fill_counts(self, lengths, indptr, last_page_len):
        """Fill the CSR heads of a page table over the first ``lengths[b]`` positions of each row.

        Parameters
        ----------
        lengths : ndarray
            int64 ``[batch]``; capacity was checked.
        indptr, last_page_len : ndarray
            int32 ``[bucket + 1]`` and ``[bucket]``, a bucket of at least the step's rows. Rows behind them, and rows
            of length 0, have no page and ``last_page_len`` 0.

        Returns
        -------
        bool
            Whether `indptr` was the same before.
        """
        cdef const int64_t *length = <const int64_t *>cnp.PyArray_DATA(<cnp.ndarray>lengths)
        cdef int32_t *start = <int32_t *>cnp.PyArray_DATA(<cnp.ndarray>indptr)
        cdef int32_t *last = <int32_t *>cnp.PyArray_DATA(<cnp.ndarray>last_page_len)
        cdef Py_ssize_t b, count, page_size = self.page_size, bucket = cnp.PyArray_SIZE(<cnp.ndarray>last_page_len)
        cdef int32_t end = 0
        cdef bint same = start[0] == 0
        start[0] = 0
        for b in range(bucket):
            count = (length[b] + page_size - 1) // page_size if b < self.batch_size else 0
            last[b] = <int32_t>(length[b] - (count - 1) * page_size) if count > 0 else 0
            end += <int32_t>count
            same &= start[b + 1] == end
            start[b + 1] = end
        return same

    def fill_page_ids(self, indptr, indices):
        """Fill int32 `indices` with the page ids that `indptr` (int32, `fill_counts`) asks for."""
        if (<int32_t *>cnp.PyArray_DATA(<cnp.ndarray>indptr))[self.batch_size] > cnp.PyArray_SIZE(<cnp.ndarray>indices):
            raise ValueError(f"a table of {indptr[self.batch_size]} pages does not fit in {indices.size} indices")
        cdef const int32_t *start = <const int32_t *>cnp.PyArray_DATA(<cnp.ndarray>indptr)
        cdef page_t *page_ids = <page_t *>cnp.PyArray_DATA(<cnp.ndarray>indices)
        cdef Py_ssize_t b
        for b in range(self.batch_size):
            memcpy(
                page_ids + start[b], (<PageLease>self.lease_ptrs[b]).page_ids,
                (start[b + 1] - start[b]) * sizeof(page_t),
            )

    def page_counts(self, lengths):
        """`fill_counts` into new arrays: ``(indptr, last_page_len)``."""
        cdef cnp.ndarray indptr = new_int32(self.batch_size + 1), last_page_len = new_int32(self.batch_size)
        self.fill_counts(lengths, indptr, last_page_len)
        return indptr, last_page_len

    def page_ids(self, indptr):
        """`fill_page_ids` into a new array."""
        cdef cnp.ndarray indices = new_int32((<int32_t *>cnp.PyArray_DATA(<cnp.ndarray>indptr))[self.batch_size])
        self.fill_page_ids(indptr, indices)
        return indices


def change_lengths(lengths, int64_t page_size, indptr, lengths_host, last_page_len):
    """Take other lengths over into a page table, in place and without an allocation.

    Parameters
    ----------
    lengths : sequence of int
        Of the first rows, as many as there are.
    page_size : int
        Tokens per page.
    indptr, lengths_host, last_page_len : ndarray
        int32 ``[rows + 1]``, int64 ``[rows]`` and int32 ``[rows]``; of at least so many rows.

    Returns
    -------
    bool
        False, and no change, if a row changes its number of pages.
    """
    cdef cnp.ndarray wanted = np.ascontiguousarray(lengths, dtype=np.int64)
    cdef const int64_t *length = <const int64_t *>cnp.PyArray_DATA(wanted)
    cdef const int32_t *start = <const int32_t *>cnp.PyArray_DATA(<cnp.ndarray>indptr)
    cdef int64_t *held = <int64_t *>cnp.PyArray_DATA(<cnp.ndarray>lengths_host)
    cdef int32_t *last = <int32_t *>cnp.PyArray_DATA(<cnp.ndarray>last_page_len)
    cdef Py_ssize_t n = cnp.PyArray_SIZE(wanted), b
    cdef int64_t count
    if n > cnp.PyArray_SIZE(<cnp.ndarray>last_page_len):
        raise ValueError(f"the page table has {last_page_len.size} rows, got {n} lengths")
    for b in range(n):
        if (length[b] + page_size - 1) // page_size != start[b + 1] - start[b]:
            return False
    for b in range(n):
        count = start[b + 1] - start[b]
        held[b] = length[b]
        last[b] = <int32_t>(length[b] - (count - 1) * page_size) if count > 0 else 0
    return True


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
