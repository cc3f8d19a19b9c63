"""undisturbed: no clean-up of a caller between a verb of the ledger and what follows it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kvpool_ext.quiet import Quiet

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


def undisturbed(verb: Callable[Given, Answer]) -> Callable[Given, Answer]:
    """`verb` with the garbage collector off, which might run what binds, unbinds or evicts."""

    @functools.wraps(verb)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Answer:
        # An object, and not two calls: an interrupt between them would leave the collector off.
        quiet = Quiet()
        try:
            return verb(*args, **kwargs)
        finally:
            # A traceback keeps the frame.
            del quiet

    return call
