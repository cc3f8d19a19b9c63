"""Player: performs the operations of a trace on a pool, and checks what comes of each."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from kvpool.soak.binding import BindVerbs
from kvpool.soak.ending import EndVerbs
from kvpool.soak.finding import Finding
from kvpool.soak.graphing import GraphVerbs
from kvpool.soak.misuse import MisuseVerbs
from kvpool.soak.reading import ReadVerbs
from kvpool.soak.stage import Stage
from kvpool.soak.tiering import TierVerbs
from kvpool.soak.trace import Operation, TraceError

MAX_TEXT = 1 << 20
CHECK_EVERY = 16  # operations between two full checks; of a large pool, more


class Player(ReadVerbs, BindVerbs, EndVerbs, GraphVerbs, TierVerbs, MisuseVerbs):
    """A pool under test and what must be true of it.

    `perform` is one operation; its name is a method, its arguments are integers. It raises
    `Finding`, and nothing else, when something is wrong.
    """

    def perform(self, operation: Operation) -> None:
        """Play one operation, then check what always holds.

        Raises
        ------
        Finding
            Something is not as it must be.
        """
        verb, *args = operation
        try:
            getattr(self, verb)(*args)
            self.check_sums()
            self.num_operations += 1
            if self.num_operations % self.check_every == 0:
                self.check()
                self.read_all()
        except Finding:
            raise
        except Exception as error:
            kind = f"{verb} raised {type(error).__name__}"
            raise Finding(kind, str(error)) from error

    @property
    def check_every(self) -> int:
        """Operations between two full checks: a large pool is looked at less often."""
        return CHECK_EVERY * (1 + self.shape.num_slots // 2048)

    def finish_up(self) -> None:
        """The end of an episode: give all back, and close.

        Raises
        ------
        Finding
            Not all came back.
        """
        try:
            self.read_all()
            self.wind_down()
            self.check_sums()
            self.count_fetched()
            self.calls.call("pool", "close")
            self._forget_fetches()
            self._let_go()
            if self.store is not None:
                self.store.close()
        except Finding:
            raise
        except Exception as error:
            raise Finding(f"the end raised {type(error).__name__}", str(error)) from error

    def _let_go(self) -> None:
        """Nothing holds a closed pool but its caller: it goes at once, without a collection."""
        left = weakref.ref(self.pool)
        self.calls.names.clear()
        del self.pool
        if left() is not None:
            holders = [type(holder).__name__ for holder in gc.get_referrers(left())]
            raise self.calls.fail(
                "the closed pool outlives its last reference", f"held by {holders}", "False"
            )

    def play(self, operations: Iterable[Operation]) -> None:
        """A whole trace, and its end."""
        for operation in operations:
            self.perform(operation)
        self.finish_up()


def _verbs() -> dict[str, Callable[..., Any]]:
    """Methods that are operations: public, of the mixins, and taking integers."""
    parts = [part for part in Player.__mro__[1:] if issubclass(part, Stage) and part is not Stage]
    names = {name for part in parts for name in vars(part) if not name.startswith("_")}
    return {name: getattr(Player, name) for name in names - set(vars(Stage))}


VERBS = _verbs()


def check_operations(operations: Iterable[Operation]) -> None:
    """Refuse operations that no player knows, and texts that nobody should make.

    Raises
    ------
    TraceError
        An unknown verb, or arguments that it does not take.
    """
    for i, (verb, *args) in enumerate(operations, 1):
        if verb not in VERBS:
            raise TraceError(f"operation {i}: no verb {verb!r}; there are {sorted(VERBS)}")
        parameters = list(inspect.signature(VERBS[verb]).parameters.values())[1:]
        fits = len(args) == len(parameters) and all(
            _FITS[parameter.annotation](value)
            for value, parameter in zip(args, parameters, strict=True)
        )
        if not fits:
            expected = ", ".join(f"{p.name}: {p.annotation}" for p in parameters)
            raise TraceError(
                f"operation {i}: {verb} takes ({expected}), a text being pairs of a seed and a "
                f"length of {MAX_TEXT} tokens in all, got {str(args)[:200]}"
            )


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _is_text(value: Any) -> bool:
    return (
        isinstance(value, list)
        and all(_is_list(part) and len(part) == 2 and part[1] >= 0 for part in value)
        and sum(part[1] for part in value) <= MAX_TEXT
    )


# What an argument must be, by its annotation.
_FITS: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: type(value) is int,
    "list[int]": _is_list,
    "Text": _is_text,
}
