"""Bytes as a source of choices: a byte a choice, so a changed byte is one changed argument."""

import numpy as np


class Stream:
    """Draws as `NumpyChooser` does, from bytes; past their end every choice is the first one."""

    def __init__(self, data):
        self.data = data
        self.at = 0

    @property
    def ended(self):
        return self.at >= len(self.data)

    def integer(self, low, high):
        """One of ``low .. high``, of 256 at most."""
        if self.ended:
            return low
        self.at += 1
        return low + self.data[self.at - 1] % (high - low + 1)

    def item(self, items):
        return items[self.integer(0, len(items) - 1)]

    def items(self, items, n):
        return [self.item(items) for _ in range(n)]


def unaligned(tokens):
    """An int32 array at an odd address."""
    raw = b"\0" + np.array(tokens, np.int32).tobytes()
    return np.frombuffer(raw, np.int32, len(tokens), offset=1)


def strided(tokens):
    return np.repeat(np.array(tokens, np.int32), 2)[::2]


FORMS = {
    "list": list,
    "tuple": tuple,
    "int32": lambda tokens: np.array(tokens, np.int32),
    "int64": lambda tokens: np.array(tokens, np.int64),
    "unaligned": unaligned,
    "strided": strided,
    "swapped": lambda tokens: np.array(tokens, ">i4"),
}


def given(stream, tokens):
    """`tokens` in one of the forms that a caller may have them in."""
    return FORMS[stream.item(tuple(FORMS))](tokens)


NOTHING_LEFT = Stream(b"")
