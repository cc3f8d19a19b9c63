"""Lineage: the tokens of one request, and the K and V rows that belong to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.soak.prints import GOLDEN, RowCode, extend_sums, mixed, stream, word

Text = Sequence[Sequence[int]]
"""Tokens in short: pairs of a seed and how many tokens of its stream are meant."""

_BLOCK = 32  # tokens made at a time


def length_of(text: Text) -> int:
    """Tokens of a text."""
    return sum(length for _, length in text)


def cut(text: Text, length: int) -> list[list[int]]:
    """The first `length` tokens of a text, as a text."""
    kept: list[list[int]] = []
    for seed, count in text:
        if length <= 0:
            break
        kept.append([seed, min(count, length)])
        length -= count
    return kept


def tokens_of(text: Text, vocabulary: int) -> NDArray[np.int32]:
    """The tokens of a text."""
    parts = [stream(seed, 0, count, vocabulary) for seed, count in text]
    return np.concatenate([np.zeros(0, np.int32), *parts])


class Lineage:
    """What a request's tokens are up to any length, and their rows.

    Made in blocks as far as somebody asks, and forgotten from where the text changes.

    Parameters
    ----------
    text : Text
        The first tokens.
    tail : int
        Seed of all tokens behind them.
    key : int
        Number of the namespace.
    vocabulary : int
        Different tokens that there are.
    code : RowCode
        What the pool's rows look like.
    weights : int
        Number of the model's weights: with others, the same tokens have other rows.
    """

    def __init__(
        self, text: Text, tail: int, key: int, vocabulary: int, code: RowCode, weights: int = 0
    ) -> None:
        self.text = [list(part) for part in text]
        self.tail = tail
        self.key = key
        self.weights = weights
        self._vocabulary = vocabulary
        self._code = code
        self._salt = word(key, 1 + weights)
        self._made = 0
        self._tokens = np.zeros(_BLOCK, np.int32)
        self._sums = np.zeros(_BLOCK, np.uint64)
        self._prints = np.zeros(_BLOCK, np.uint64)
        self._codes = np.zeros((code.num_layers, 2, _BLOCK, code.num_elements), np.uint16)

    @property
    def made(self) -> int:
        """Tokens that were made so far."""
        return self._made

    def tokens(self, length: int) -> NDArray[np.int32]:
        """The first `length` tokens, a view."""
        self._make(length)
        return self._tokens[:length]

    def prints(self, start: int, end: int) -> NDArray[np.uint64]:
        """Fingerprints of positions ``[start, end)``, a view."""
        self._make(end)
        return self._prints[start:end]

    def page_prints(self, length: int, page_size: int) -> list[int]:
        """Fingerprints at the ends of the whole pages of the first `length` tokens."""
        found: list[int] = self.prints(0, length)[page_size - 1 :: page_size].tolist()
        return found

    def codes(self, layer: int, start: int, end: int) -> NDArray[np.uint16]:
        """Codes of K and V at positions ``[start, end)``, ``[2, n, heads * head_dim]``, a view."""
        self._make(end)
        return self._codes[layer, :, start:end]

    def text_upto(self, length: int) -> list[list[int]]:
        """The first `length` tokens as a text."""
        known = cut(self.text, length)
        rest = length - length_of(known)
        return [*known, [self.tail, rest]] if rest else known

    def change_tail(self, length: int, tail: int) -> None:
        """Other tokens from `length` on, which is not within the text that was given."""
        self.text = self.text_upto(length)
        self.tail = tail
        self._made = min(self._made, length)

    def copy(self, length: int, tail: int) -> Lineage:
        """A lineage that shares the first `length` tokens."""
        text = self.text_upto(length)
        made = Lineage(text, tail, self.key, self._vocabulary, self._code, self.weights)
        kept = min(self._made, length)
        made._grow(kept)
        made._made = kept
        made._tokens[:kept] = self._tokens[:kept]
        made._sums[:kept] = self._sums[:kept]
        made._prints[:kept] = self._prints[:kept]
        made._codes[:, :, :kept] = self._codes[:, :, :kept]
        return made

    def _make(self, length: int) -> None:
        if length <= self._made:
            return
        start, end = self._made, -(-length // _BLOCK) * _BLOCK
        self._grow(end)
        tokens = self._stream(start, end)
        before = self._sums[start - 1] if start else np.uint64(0)
        sums = extend_sums(before, tokens, start)
        places = np.arange(start, end, dtype=np.uint64) * np.uint64(GOLDEN)
        prints = mixed(sums + places + self._salt)
        self._tokens[start:end] = tokens
        self._sums[start:end] = sums
        self._prints[start:end] = prints
        self._codes[:, :, start:end] = self._code.codes(prints)
        self._made = end

    def _stream(self, start: int, end: int) -> NDArray[np.int32]:
        parts, at = [], 0
        for seed, count in self.text:
            if at + count > start and at < end:
                part = (max(start - at, 0), min(end - at, count))
                parts.append(stream(seed, *part, self._vocabulary))
            at += count
        if end > at:
            parts.append(stream(self.tail, max(start - at, 0), end - at, self._vocabulary))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _grow(self, length: int) -> None:
        room = self._tokens.size
        if length <= room:
            return
        room = max(length, 2 * room)
        self._tokens = _longer(self._tokens, room)
        self._sums = _longer(self._sums, room)
        self._prints = _longer(self._prints, room)
        codes = np.zeros((*self._codes.shape[:2], room, self._codes.shape[3]), np.uint16)
        codes[:, :, : self._made] = self._codes[:, :, : self._made]
        self._codes = codes


def _longer(array: NDArray[Any], room: int) -> NDArray[Any]:
    made = np.zeros(room, array.dtype)
    made[: array.size] = array
    return made
