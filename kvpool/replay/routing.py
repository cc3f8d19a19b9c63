"""Routing: which instance serves the next request.

``round-robin`` deals the requests out in turn. ``prefix`` is the rule of SGLang's router
(``cache_aware``), with exact knowledge of what each instance has, as a router has it that follows
the instances' events:

- *in balance*, the instance with the longest cached prefix of the prompt serves it: what its pool
  has, and what its host tier has behind that; a shared store is equally near to all;
- *out of balance*, when one instance has more than `window` requests more in flight than another
  and more than 1.5 times as many, the least loaded one does. 1.5 is the default of its gateway;
  the 64 requests that it has there do not know how many an instance takes at once.

Among equals, so for a prompt that nobody knows, the least loaded one does: fewest requests in
flight, then fewest tokens of them, then the lowest number. Nothing is drawn by lot, and two
replays route alike. There is no least share of a prompt below which a match is ignored: the ties
of a prefix that all instances have are broken by load already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

RELATIVE_IMBALANCE = 1.5


class Load(Protocol):
    """What an instance has to do.

    Attributes
    ----------
    requests_in_flight, tokens_in_flight : int
        Requests bound now, and the tokens of them, with their answers.
    """

    requests_in_flight: int
    tokens_in_flight: int


def least_loaded(loads: Sequence[Load]) -> int:
    """Number of the instance with the least to do."""
    return min(range(len(loads)), key=lambda i: (*_load(loads[i]), i))


def is_out_of_balance(loads: Sequence[Load], window: int) -> bool:
    """Whether load goes before prefixes."""
    counts = [load.requests_in_flight for load in loads]
    most, least = max(counts), min(counts)
    return most - least > window and most > RELATIVE_IMBALANCE * least


def by_prefix(loads: Sequence[Load], cached_lens: Sequence[int], window: int) -> int:
    """Number of the instance that serves a prompt.

    Parameters
    ----------
    loads : sequence of Load
        ``[instances]``.
    cached_lens : sequence of int
        ``[instances]``, how much of the prompt each one has near.
    window : int
        Requests that an instance has in flight where all have equally many.
    """
    if is_out_of_balance(loads, window):
        return least_loaded(loads)
    return min(range(len(loads)), key=lambda i: (-cached_lens[i], *_load(loads[i]), i))


def _load(load: Load) -> tuple[int, int]:
    return load.requests_in_flight, load.tokens_in_flight
