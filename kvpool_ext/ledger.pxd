from kvpool_ext.moves cimport LedgerMoves


cdef class PageLedger(LedgerMoves):
    pass
