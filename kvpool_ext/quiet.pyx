"""Quiet: no garbage collection while it lives, for verbs that decide first and move then.

Where a verb makes an object of Python, the collector may run, and with it a caller's clean-up that binds, unbinds or
evicts in the middle of the verb: what was decided would not hold any more. So a verb keeps a `Quiet` in a local
variable, and the collection comes when it has ended. From Python 3.12 on the collector runs between lines of
Python only; there it costs the same few nanoseconds.
"""
cimport cython


cdef extern from "Python.h":
    int PyGC_Disable() noexcept
    int PyGC_Enable() noexcept


@cython.final
@cython.freelist(8)
cdef class Quiet:
    """Keeps the collector from running until it goes; one inside another is fine."""

    def __cinit__(self):
        self.was_enabled = PyGC_Disable()

    def __dealloc__(self):
        if self.was_enabled:
            PyGC_Enable()
