"""Refused memory, on demand: how tests reach the paths that a machine with free memory never takes.

In the debug build each request of this package for memory of the C library passes `is_refused`
(`kvpool_ext/memory.pxd`), which counts it and says whether it fails. The count is one for all extension modules: they
call this one. The other builds ask nobody, and pay nothing.
"""
from kvpool_ext.types cimport CHECKED

AVAILABLE = bool(CHECKED)

cdef:
    long long num_requests = 0     # since `fail_after` or `clear`
    long long num_granted = -1     # those before the first that is refused; -1: none is
    long long num_refused = 0      # that many in a row from there on; -1: all


cdef bint is_refused() noexcept nogil:
    """Count one request for memory; whether it is to fail."""
    global num_requests
    num_requests += 1
    if num_granted < 0 or num_requests <= num_granted:
        return False
    return num_refused < 0 or num_requests <= num_granted + num_refused


def fail_after(num_allocations, times=1):
    """Grant the next `num_allocations` requests for memory, refuse those that follow, and count from 0.

    Parameters
    ----------
    num_allocations : int
        Requests that are granted, at least 0.
    times : int or None
        How many are refused then; None for all, until `clear`.

    Raises
    ------
    RuntimeError
        Not the debug build: nothing would be refused.
    ValueError
        A number below 0.
    """
    global num_requests, num_granted, num_refused
    if not AVAILABLE:
        raise RuntimeError(
            "this build of kvpool_ext refuses no memory: make the debug build with `KVPOOL_DEBUG=1 python setup.py "
            "build_ext` and put build/debug/lib first on PYTHONPATH"
        )
    if num_allocations < 0 or (times is not None and times < 0):
        raise ValueError(f"expected numbers of at least 0, got {num_allocations} and {times}")
    num_refused = -1 if times is None else times
    num_granted = num_allocations
    num_requests = 0


def clear():
    """Refuse nothing any more, and count from 0."""
    global num_requests, num_granted
    num_granted = -1
    num_requests = 0


def count():
    """Requests for memory since `fail_after` or `clear`; always 0 but in the debug build."""
    return num_requests
