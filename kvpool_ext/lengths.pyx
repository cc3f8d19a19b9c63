"""LengthTable: how far each column (layer) of each row (request) is written."""
from libc.stdint cimport int32_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy


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

    cpdef Py_ssize_t add(self, Py_ssize_t length) except -1:
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

    cpdef int remove(self, Py_ssize_t row) except -1:
        """Give a row back."""
        self.free_rows.append(row)
        return 0

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
