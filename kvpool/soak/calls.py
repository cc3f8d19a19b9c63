"""Calls: public calls of a pool, made and, where a script is wanted, written down before.

What the soak asks a pool for goes through here, by the name of an object and of a method. So the
script of a failure is not made up afterwards: it is what was called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvpool.soak.finding import Finding


class Said:
    """An argument, and how a script spells it.

    Parameters
    ----------
    value : object
        What is passed.
    text : callable
        Makes the source; asked only where a script is written.
    """

    __slots__ = ("text", "value")

    def __init__(self, value: Any, text: Callable[[], str]) -> None:
        self.value = value
        self.text = text


class Calls:
    """Makes calls on named objects.

    Parameters
    ----------
    script : list of str, optional
        Takes a line for each call; None writes nothing, and costs nothing.
    """

    def __init__(self, script: list[str] | None = None) -> None:
        self.script = script
        self.names: dict[str, Any] = {}
        self._indent = ""

    def say(self, line: str) -> None:
        """Write a line of the script."""
        if self.script is not None:
            self.script.append(self._indent + line)

    def call(self, target: str, method: str, *args: Any, **options: Any) -> Any:
        """``target.method(*args)``."""
        if self.script is not None:
            self.say(source(target, method, args, options))
        return self._run(target, method, args, options)

    def let(self, name: str, target: str, method: str, *args: Any, **options: Any) -> Any:
        """``name = target.method(*args)``; later calls may be on `name`."""
        if self.script is not None:
            self.say(f"{name} = {source(target, method, args, options)}")
        found = self._run(target, method, args, options)
        self.names[name] = found
        return found

    def put(self, target: str, method: str, layer: int, slots: Any, rows: Any) -> None:
        """``target.method(layer)[slots] = rows``, for an array that is a view of the pool's."""
        if self.script is not None:
            self.say(f"{source(target, method, (layer,), {})}[{spell(slots)}] = {spell(rows)}")
        self._run(target, method, (layer,), {})[plain(slots)] = plain(rows)

    def attempt(
        self, errors: type[BaseException], target: str, method: str, *args: Any, **options: Any
    ) -> Any:
        """A call that `errors` may refuse; the error itself is the answer then."""
        mark = self.mark()
        if self.script is not None:
            self.say(f"with suppress({errors.__name__}):")
            self.say(f"    {source(target, method, args, options)}")
        try:
            found = self._run(target, method, args, options)
            if self.script is not None:
                self.unsay(mark)
                answer = f"  # {found}" if isinstance(found, int) else ""
                self.say(source(target, method, args, options) + answer)
            return found
        except errors as error:
            if self.script is not None:
                self.script[mark] = f"{self._indent}with raises({errors.__name__}):"
            # Its frames would hold whoever keeps it, and the pool, until a collection.
            return error.with_traceback(None)

    def refused(
        self,
        errors: type[BaseException] | tuple[type[BaseException], ...],
        target: str,
        method: str,
        *args: Any,
        **options: Any,
    ) -> BaseException:
        """A call that must raise one of `errors`."""
        wanted = errors if isinstance(errors, tuple) else (errors,)
        if self.script is not None:
            names = ", ".join(error.__name__ for error in wanted)
            self.say(f"with raises({names}):")
            self.say(f"    {source(target, method, args, options)}")
        try:
            found = self._run(target, method, args, options)
        except wanted as error:
            return error.with_traceback(None)
        raise Finding(
            f"{target}.{method} accepted what it must refuse",
            f"{source(target, method, args, options)[:300]} gave {str(found)[:100]}",
        )

    @contextmanager
    def block(self, name: str, manager: Any) -> Iterator[None]:
        """``with name:``."""
        self.say(f"with {name}:")
        before, self._indent = self._indent, self._indent + "    "
        try:
            with manager:
                yield
        finally:
            self._indent = before

    def mark(self) -> int:
        """Where the script ends now."""
        return 0 if self.script is None else len(self.script)

    def unsay(self, mark: int, count: int | None = None) -> None:
        """Take lines back that asked for something and found nothing."""
        if self.script is not None:
            del self.script[mark : None if count is None else mark + count]

    def fail(self, kind: str, details: str, assertion: str) -> Finding:
        """The finding that `assertion` does not hold; ``found`` is the last call's answer."""
        if self.script:
            if re.search(r"\bfound\b", assertion):
                line = self.script[-1].lstrip()
                indent = self.script[-1][: -len(line)]
                self.script[-1] = f"{indent}found = {line}"
            self.say(f"assert {assertion}")
        return Finding(kind, details)

    def expect(self, expected: Any, found: Any, what: str, question: str = "") -> None:
        """Finding unless both are equal; `question` is what a script asks for `found`.

        Without it that is the answer of the last call.
        """
        if found == expected:
            return
        raise self.fail(
            f"{what} is wrong",
            f"expected {expected}, got {found}",
            f"{question or 'found'} == {expected!r}, {question or 'found'}",
        )

    def _run(
        self, target: str, method: str, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        function = getattr(self.names[target], method)
        args = tuple(a.value if type(a) is Said else a for a in args)
        if options:
            options = {k: plain(v) for k, v in options.items() if v is not None}
            return function(*args, **options)
        return function(*args)


def plain(value: Any) -> Any:
    """What is passed for an argument."""
    return value.value if type(value) is Said else value


def source(target: str, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> str:
    """A call as Python."""
    words = [spell(value) for value in args]
    words += [f"{k}={spell(v)}" for k, v in options.items() if v is not None]
    return f"{target}.{method}({', '.join(words)})"


def spell(value: Any) -> str:
    """An argument as Python."""
    if type(value) is Said:
        return value.text()
    if isinstance(value, np.ndarray):
        if value.dtype == np.int32 and value.ndim == 1:
            return repr(value.tolist())
        return f"np.array({value.tolist()!r}, np.{value.dtype})"
    if isinstance(value, tuple):
        return f"({''.join(spell(item) + ', ' for item in value)})"
    return repr(value)
