"""ValkeyTier: records in a Valkey or Redis server, which bounds and evicts by its own settings."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from kvpool.numbers import positive_seconds
from kvpool.tiers.contract import Key, check_keys, check_name, check_rows
from kvpool.tiers.open_calls import OpenCalls

_COUNTED = ("read_records", "missed_records", "written_records", "refused_records")


class ValkeyTier:
    """Keeps records as values of a server.

    How much it keeps and what goes first is the server's to say: ``maxmemory`` and
    ``maxmemory-policy allkeys-lru``. With the policy ``noeviction`` a full server refuses.

    Parameters
    ----------
    url : str
        ``"valkey://host:6379/0"``, or what else ``valkey.Valkey.from_url`` takes.
    name : str
        What counters and messages call this tier.
    timeout_s : float
        How long the server may take to accept a connection, or for the next bytes.

    Raises
    ------
    ImportError, ConnectionError
        The client is not installed (extra ``valkey``); no server answers, or it refuses.
    TypeError, ValueError
        A URL that is none, a time-out that is none.
    """

    def __init__(self, url: str, *, name: str = "valkey", timeout_s: float = 5.0) -> None:
        self.name = check_name(name)
        self._timeout_s = positive_seconds(timeout_s, "timeout_s")
        if not isinstance(url, str):
            raise TypeError(f"url must be a str, got {type(url).__name__}")
        try:
            import valkey
        except ImportError as error:
            raise ImportError("a ValkeyTier needs valkey: install kvpool[valkey]") from error
        place = urlsplit(url)  # without the password that it may have
        self._place = f"{place.hostname}:{place.port or 6379}" if place.hostname else place.path
        self._errors = valkey.exceptions
        self._client: Any = valkey.Valkey.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s
        )
        self._calls = OpenCalls(f"tier {name!r}")
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._ask(lambda pipe: pipe.ping())

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key has a record; for the server that is a use."""
        check_keys(keys)
        found = self._ask(lambda pipe: [pipe.exists(_name(key)) for key in keys])
        return [number == 1 for number in found]

    def read(self, keys: Sequence[Key], rows: NDArray[np.uint8]) -> list[bool]:
        """Fill ``rows[i]`` with the record of ``keys[i]``; one of another length is none."""
        check_rows(keys, rows, fill=True)
        values = self._ask(lambda pipe: [pipe.get(_name(key)) for key in keys])
        length = rows.shape[1]
        answers = [isinstance(value, bytes) and len(value) == length for value in values]
        for row, value, is_there in zip(rows, values, answers, strict=True):
            if is_there:
                row[...] = np.frombuffer(value, np.uint8)
        self._count("read_records", "missed_records", answers)
        return answers

    def write(self, keys: Sequence[Key], rows: NDArray[np.uint8]) -> list[bool]:
        """Store each row; False where the server refuses, for it is full."""
        check_rows(keys, rows)
        pairs = [(_name(key), row.tobytes()) for key, row in zip(keys, rows, strict=True)]
        done = self._ask(lambda pipe: [pipe.set(*pair) for pair in pairs])
        answers = [each is True for each in done]
        self._count("written_records", "refused_records", answers)
        return answers

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        """Forget records; whether each was there."""
        check_keys(keys)
        found = self._ask(lambda pipe: [pipe.unlink(_name(key)) for key in keys])
        return [number == 1 for number in found]

    def register(self, buffer: NDArray[np.uint8]) -> None:
        """Nothing to do: records go through a socket."""

    def unregister(self, buffer: NDArray[np.uint8]) -> None:
        """Nothing to do."""

    def stats(self) -> Mapping[str, int]:
        """What this client did."""
        with self._lock:
            return {name: self._counts[name] for name in _COUNTED}

    def close(self) -> None:
        """Let go of the connections; the records stay."""
        if self._calls.refuse(self._timeout_s):
            self._client.close()

    def _ask(self, commands: Any) -> list[Any]:
        """The answers to a pipeline of commands; of errors only those that are about one record.

        Raises
        ------
        ConnectionError
            No answer, or the server refuses this client: no rights, read-only, loading.
        """
        with self._calls.call():
            pipe = self._client.pipeline(transaction=False)
            try:
                commands(pipe)
                answers = list(pipe.execute(raise_on_error=False))
            except (self._errors.ConnectionError, self._errors.TimeoutError) as error:
                raise ConnectionError(f"no answer from {self._place}: {error}") from None
            except self._errors.ResponseError as error:  # to what opens a connection
                raise ConnectionError(f"{self._place} refuses: {error}") from None
            for answer in answers:
                if isinstance(answer, Exception) and not self._is_of_one_record(answer):
                    raise ConnectionError(f"{self._place} refuses: {answer}")
            return answers

    def _is_of_one_record(self, error: Exception) -> bool:
        """Whether it says that there is no room, or that a key is in other use."""
        return isinstance(error, self._errors.OutOfMemoryError) or str(error).startswith(
            "WRONGTYPE"
        )

    def _count(self, done: str, not_done: str, answers: list[bool]) -> None:
        with self._lock:
            self._counts[done] += sum(answers)
            self._counts[not_done] += len(answers) - sum(answers)


def _name(key: Key) -> bytes:
    return b"kvpool-" + key
