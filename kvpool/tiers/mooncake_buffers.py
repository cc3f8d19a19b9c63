"""MooncakeBuffers: the memory that Mooncake's engine may move records from and into."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.tiers.contract import Key

_ROWS_AT_ONCE = 32

Move = Callable[[Sequence[Key], list[int], list[int]], Sequence[int]]
"""Moves records of these keys at these addresses, of these lengths; a code for each."""


class MooncakeBuffers:
    """What a client has registered: buffers of callers, and one of its own for all other rows.

    Parameters
    ----------
    client : object
        A client of the store.

    Attributes
    ----------
    num_copied : int
        Records that went through the own buffer.
    """

    def __init__(self, client: Any) -> None:
        self.num_copied = 0
        self._client = client
        self._lock = threading.Lock()
        self._registered: dict[tuple[int, int], int] = {}  # address, length -> times
        self._own_lock = threading.Lock()
        self._own = np.empty((0, 0), np.uint8)

    @property
    def num_bytes(self) -> int:
        """Bytes that callers have registered."""
        with self._lock:
            return sum(num_bytes for _, num_bytes in self._registered)

    def register(self, buffer: NDArray[np.uint8]) -> None:
        """Register a buffer, or count it once more.

        Raises
        ------
        ValueError
            It is not contiguous, or overlaps another one.
        """
        if not buffer.flags.c_contiguous:
            raise ValueError(f"a buffer must be contiguous, got strides {buffer.strides}")
        place = _place(buffer)
        with self._lock:
            if place not in self._registered and buffer.nbytes:
                self._tell(place)
            self._registered[place] = self._registered.get(place, 0) + 1

    def unregister(self, buffer: NDArray[np.uint8]) -> None:
        """Undo one `register`."""
        place = _place(buffer)
        with self._lock:
            left = self._registered.get(place, 0) - 1
            if left > 0:
                self._registered[place] = left
            elif not left:
                del self._registered[place]
                self._client.unregister_buffer(place[0])

    def move(
        self, move: Move, keys: Sequence[Key], rows: NDArray[np.uint8], *, fill: bool
    ) -> list[int]:
        """`move` on rows that are registered: these, or our own in their place.

        Parameters
        ----------
        move : callable
            What the engine is to do.
        keys : sequence of bytes
            ``[n]``.
        rows : ndarray
            uint8 ``[n, record_bytes]``.
        fill : bool
            Whether records go out from `rows`, and not into them.
        """
        if not rows.size:
            return [0] * len(keys)
        if self._has(rows):
            return _move_once(move, keys, *_places(rows))
        codes: list[int] = []
        with self._own_lock:
            for begin in range(0, len(keys), _ROWS_AT_ONCE):
                some = rows[begin : begin + _ROWS_AT_ONCE]
                own = self._own_rows(*some.shape)
                if fill:
                    own[...] = some
                codes += _move_once(move, keys[begin : begin + _ROWS_AT_ONCE], *_places(own))
                if not fill:
                    some[...] = own
            self.num_copied += len(keys)
        return codes

    def _has(self, rows: NDArray[np.uint8]) -> bool:
        begin, num_bytes = _place(rows)
        with self._lock:
            return any(
                start <= begin and begin + num_bytes <= start + length
                for start, length in self._registered
            )

    def _own_rows(self, num_rows: int, record_bytes: int) -> NDArray[np.uint8]:
        if self._own.shape[1] != record_bytes:
            if self._own.size:
                self._client.unregister_buffer(_place(self._own)[0])
            own = np.empty((_ROWS_AT_ONCE, record_bytes), np.uint8)
            self._own = own[:, :0]
            self._tell(_place(own))
            self._own = own
        return self._own[:num_rows]

    def _tell(self, place: tuple[int, int]) -> None:
        code = self._client.register_buffer(*place)
        if code:
            raise ValueError(
                f"Mooncake does not register {place[1]} bytes at {place[0]:#x} (code {code}): a "
                "buffer that overlaps them is registered already, they cannot be pinned, or the "
                "metadata server does not answer"
            )


def _place(array: NDArray[np.uint8]) -> tuple[int, int]:
    return array.__array_interface__["data"][0], array.nbytes


def _places(rows: NDArray[np.uint8]) -> tuple[list[int], list[int]]:
    """Address and length of each row."""
    begin, _ = _place(rows)
    num_rows, record_bytes = rows.shape
    return [begin + i * record_bytes for i in range(num_rows)], [record_bytes] * num_rows


def _move_once(
    move: Move, keys: Sequence[Key], places: list[int], lengths: list[int]
) -> list[int]:
    """`move` in calls that have no key twice: the engine would move one of two, and say both."""
    if len(set(keys)) == len(keys):
        return list(move(keys, places, lengths))
    codes = [0] * len(keys)
    left = list(range(len(keys)))
    while left:
        first = {keys[i]: i for i in reversed(left)}
        some = sorted(first.values())
        found = move(
            [keys[i] for i in some], [places[i] for i in some], [lengths[i] for i in some]
        )
        for i, code in zip(some, found, strict=True):
            codes[i] = code
        left = [i for i in left if first[keys[i]] != i]
    return codes
