"""Quiet: no garbage collection while it lives, for verbs that decide first and move then.

Where a verb makes an object of Python, the collector may run, and with it a caller's clean-up that binds, unbinds or
evicts in the middle of the verb: what was decided would not hold any more. So a verb keeps a `Quiet` in a local
variable, and the collection comes when it has ended. From Python 3.12 on the collector runs between lines of
Python only; there it costs the same few nanoseconds.

Those of all threads are counted together: the first that comes asks whether the collector is on, and the last that
goes turns it on again. If each did so for itself, one that came in the middle of another's would keep it off for good.
"""
cimport cython


cdef extern from "Python.h":
    int PyGC_Disable() noexcept
    int PyGC_Enable() noexcept


cdef Py_ssize_t num_quiet = 0   # that live now
cdef bint was_enabled = False   # before the first of them


@cython.final
@cython.freelist(8)
cdef class Quiet:
    """Keeps the collector from running until it goes; one inside another, or in another thread, is fine."""

    def __cinit__(self):
        global num_quiet, was_enabled
        if num_quiet == 0:
            was_enabled = PyGC_Disable()
        num_quiet += 1

    def __dealloc__(self):
        global num_quiet
        num_quiet -= 1
        if num_quiet == 0 and was_enabled:
            PyGC_Enable()
