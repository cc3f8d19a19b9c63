"""One flag that a pool's public calls pass through: closed, or in use by another thread.

A pool serves one scheduler thread. A second thread that enters while a call runs is refused before it can change
anything; the first is not harmed. The owner may enter again (one public call may use another). Costs two C calls a
public call, no context manager.
"""
cdef extern from "pythread.h":
    unsigned long PyThread_get_thread_ident() noexcept


cdef class Gate:
    """Guards the calls of one pool.

    Parameters
    ----------
    error : type
        Exception raised on concurrent entry and after `close`.
    """

    cdef object error
    cdef unsigned long owner
    cdef Py_ssize_t depth
    cdef readonly bint closed

    def __cinit__(self, error):
        self.error = error

    def enter(self):
        """Begin a call; every `enter` is followed by one `leave`."""
        cdef unsigned long me = PyThread_get_thread_ident()
        if self.closed:
            raise self.error("the pool is closed")
        if self.depth > 0 and self.owner != me:
            raise self.error(
                f"the pool is in use by thread {self.owner}, and thread {me} entered: a pool serves one "
                "scheduler thread, so hold one lock around all calls"
            )
        self.owner = me
        self.depth += 1

    def check(self):
        """Refuse what `enter` refuses, for a call that only looks."""
        self.enter()
        self.leave()

    def leave(self):
        """End a call that `enter` let in."""
        self.depth -= 1

    def close(self):
        """Refuse every later `enter`."""
        self.closed = True
