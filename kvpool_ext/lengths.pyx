"""LengthTable: how far each column (layer) of each row (request) is written."""
from libc.stdint cimport int32_t
from libc.string cimport memcpy
from kvpool_ext.memory cimport free, realloc


cdef class LengthTable:
    """Leading written lengths, ``[rows, num_columns]`` int32; rows are stable while in use.

    Parameters
    ----------
    num_columns : int
        Columns of each row (layers of the pool).
    """

    def __cinit__(self, Py_ssize_t num_columns):
        self.num_columns = num_columns

    def __dealloc__(self):
        free(self.lengths)
        free(self.free_rows)

    cdef int32_t *row(self, Py_ssize_t row) noexcept nogil:
        return self.lengths + row * self.num_columns

    cdef int reserve(self, Py_ssize_t extra) except -1:
        """Make sure that `extra` calls of `take` succeed; MemoryError changes nothing."""
        cdef Py_ssize_t wanted = self.num_rows - self.num_free + extra, grown = max(16, self.capacity * 2)
        cdef int32_t *memory
        if wanted <= self.capacity:
            return 0
        while grown < wanted:
            grown *= 2
        memory = <int32_t *>realloc(self.lengths, grown * self.num_columns * sizeof(int32_t))
        if memory != NULL:
            self.lengths = memory
            memory = <int32_t *>realloc(self.free_rows, grown * sizeof(int32_t))
        if memory == NULL:
            raise MemoryError(f"no memory for the written lengths of {grown} requests")
        self.free_rows = memory
        self.capacity = grown
        return 0

    cdef Py_ssize_t take(self, Py_ssize_t length) noexcept:
        """A row with `length` in every column; `reserve` came before."""
        cdef Py_ssize_t row = self.num_rows, i
        if self.num_free > 0:
            self.num_free -= 1
            row = self.free_rows[self.num_free]
        else:
            self.num_rows += 1
        for i in range(self.num_columns):
            self.row(row)[i] = <int32_t>length
        return row

    cpdef Py_ssize_t add(self, Py_ssize_t length) except -1:
        """A row with `length` in every column; returns its index."""
        self.reserve(1)
        return self.take(length)

    cpdef void remove(self, Py_ssize_t row) noexcept:
        """Give a row back."""
        self.free_rows[self.num_free] = <int32_t>row
        self.num_free += 1

    cpdef Py_ssize_t minimum(self, Py_ssize_t row) noexcept:
        """The smallest length of a row."""
        cdef int32_t *lengths = self.row(row)
        cdef int32_t smallest = lengths[0]
        cdef Py_ssize_t i
        for i in range(1, self.num_columns):
            smallest = min(smallest, lengths[i])
        return smallest

    cpdef void raise_to(self, Py_ssize_t row, Py_ssize_t length) noexcept:
        """Raise every column of a row to at least `length`."""
        cdef int32_t *lengths = self.row(row)
        cdef Py_ssize_t i
        for i in range(self.num_columns):
            lengths[i] = max(lengths[i], <int32_t>length)

    cpdef void cap(self, Py_ssize_t row, Py_ssize_t length) noexcept:
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
