"""One flag that a pool's public calls pass through: closed, or in use by another thread.

A pool serves one scheduler thread. A second thread that enters while a call runs is refused before it can change
anything; the first is not harmed. The owner may enter again: one public call may use another, and so may the code of a
caller that runs inside of one (a clean-up that the collector starts, a watcher, tokens that are no list, another
greenlet of the thread). Costs two C calls a public call, no context manager.

A call enters inside of the `try` whose `finally` leaves: an interrupt is raised when a C call returns, so that between
an `enter` before the `try` and the `try` it would leave the gate shut for ever. Hence `leave` takes no notice of a call
that was not let in.
"""
cdef extern from "pythread.h":
    unsigned long PyThread_get_thread_ident() noexcept


cdef class Gate:
    """Guards the calls of one pool.

    Parameters
    ----------
    error : type
        Exception raised on concurrent entry and after `close`.
    what : str
        What it guards, as messages call it.
    """

    def __cinit__(self, error, str what="the pool"):
        self.error = error
        self.what = what

    cdef int c_enter(self) except -1:
        cdef unsigned long me = PyThread_get_thread_ident()
        if self.depth > 0 and self.owner != me:
            raise self.error(
                f"{self.what} is in use by thread {self.owner}, and thread {me} entered: it serves one scheduler "
                "thread, so hold one lock around all calls"
            )
        if self.closed:
            raise self.error(f"{self.what} is closed")
        if self.depth == 0:
            self.owner = me
            self.num_calls += 1
        self.depth += 1
        return 0

    cdef void c_leave(self) noexcept:
        if self.depth > 0 and self.owner == PyThread_get_thread_ident():
            self.depth -= 1
            if self.depth == 0 and self.wanted is not None:
                self.answer()

    cdef void answer(self) noexcept:
        """Read what a waiting thread has asked for; the questions run no line of Python, so nothing comes between."""
        try:
            self.answers = [question() for question in self.wanted]
        except MemoryError:
            return  # the next call answers
        self.wanted = None
        self.num_answers += 1

    def enter(self):
        """Begin a call, as the first thing in a `try` whose `finally` says `leave`."""
        self.c_enter()

    def leave(self):
        """End a call; one that `enter` refused ends nothing."""
        self.c_leave()

    def check(self):
        """Refuse what `enter` refuses, for a call that only looks."""
        self.c_enter()
        self.c_leave()

    def moment(self):
        """A number that is the same as long as no other thread has changed anything, -1 while one may be doing so.

        A reading between two equal moments, none of them -1, is consistent. Refused by nothing but `close`.
        """
        if self.closed:
            raise self.error(f"{self.what} is closed")
        if self.depth > 0 and self.owner != PyThread_get_thread_ident():
            return -1
        return self.num_calls

    def ask(self, questions):
        """Have the call that runs answer `questions` when it ends; a number for `answered`.

        Without this a reader may wait for long: most calls hand the GIL over in the middle, hardly one between two.

        Parameters
        ----------
        questions : tuple of callable
            Compiled functions without arguments; all readers of a gate ask the same.
        """
        self.wanted = questions
        return self.num_answers

    def answered(self, number):
        """The answers to a question that was asked when `number` said so, or None while there are none."""
        return self.answers if self.num_answers > number else None

    def close(self):
        """Refuse every later `enter`; refused itself while a call of another thread runs."""
        if not self.closed:
            self.check()
            self.closed = True
