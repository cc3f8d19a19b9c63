"""Records of a tree's journal, as `kvpool_ext.journal` writes them, taken apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.request import ExtraKey

CLEARED, STORED, REMOVED = 0, 1, 2
_HEADER = 3  # kind, number of pages, what is above


class Record(NamedTuple):
    """One change of a tree; the arrays are views of the journal's buffer.

    Attributes
    ----------
    kind : int
        `CLEARED`, `STORED` or `REMOVED`.
    page_ids : ndarray
        int32 ``[n]``; of removals in the order of eviction.
    above : int
        Id of the page above the first stored one, -1 where that begins its namespace.
    extra_key : str, bytes, int or None
        The namespace that a stored page begins; None otherwise.
    generations : ndarray
        uint32 ``[n]`` of stored pages, else empty.
    tokens : ndarray
        int32 ``[n, page_size]`` of stored pages, else empty.
    """

    kind: int
    page_ids: NDArray[np.int32]
    above: int
    extra_key: ExtraKey
    generations: NDArray[np.uint32]
    tokens: NDArray[np.int32]


def split_records(
    words: NDArray[np.int32], names: Sequence[ExtraKey], page_size: int
) -> Iterator[Record]:
    """Yield the records in `words` ``[num_words]``, whose namespaces are in `names`."""
    begin = 0
    while begin < len(words):
        kind, n, above = words[begin : begin + _HEADER].tolist()
        begin += _HEADER
        page_ids = words[begin : begin + n]
        begin += n
        stored = n if kind == STORED else 0
        generations = words[begin : begin + stored].view(np.uint32)
        begin += stored
        tokens = words[begin : begin + stored * page_size].reshape(stored, page_size)
        begin += stored * page_size
        extra_key = names[-2 - above] if above < -1 else None
        yield Record(kind, page_ids, max(above, -1), extra_key, generations, tokens)
