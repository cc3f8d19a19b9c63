"""undisturbed: no clean-up of a caller between a verb of the ledger and what follows it."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


def undisturbed(verb: Callable[Given, Answer]) -> Callable[Given, Answer]:
    """`verb` with the garbage collector off, which might run what binds, unbinds or evicts."""

    @functools.wraps(verb)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Answer:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return verb(*args, **kwargs)
        finally:
            if was_enabled:
                gc.enable()

    return call
