from kvpool_ext.binding cimport LedgerBinding
from kvpool_ext.types cimport page_t


cdef class PageLedger(LedgerBinding):
    cdef void take_into(self, page_t *out, Py_ssize_t num_pages) noexcept
