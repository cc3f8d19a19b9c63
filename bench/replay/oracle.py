"""Every hit by brute force: one entry a page, one exact LRU list, no tree, no node, no split.

A page is named by a hash chained over all tokens before its end. It is cached or not, it has a
count of requests that hold it, and it is as recent as the last end of a request that covered it
(deepest page first, so that a prefix outlives what hangs below it). Compiled, as pages of one
token make three hundred million look-ups a trace.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from bench.replay.trace import BIND

NOTHING = -1
OLDEST, NEWEST, NUM_ENTRIES, FREE_ENTRY, FREE_PAGES = range(5)


class State(NamedTuple):
    """Arrays by entry, but for `buckets` (heads of the hash chains) and `numbers` (see above)."""

    key: np.ndarray
    holders: np.ndarray
    older: np.ndarray
    newer: np.ndarray
    next: np.ndarray
    buckets: np.ndarray
    numbers: np.ndarray


def _new_state(num_pages):
    def entries():
        return np.full(num_pages + 1, NOTHING, np.int32)

    numbers = np.array([NOTHING, NOTHING, 0, NOTHING, num_pages], np.int64)
    buckets = np.full(1 << max(4, (num_pages - 1).bit_length()), NOTHING, np.int32)
    return State(
        np.zeros(num_pages + 1, np.uint64),
        np.zeros(num_pages + 1, np.int32),
        *(entries(), entries(), entries()),
        *(buckets, numbers),
    )


@njit(cache=True)
def _page_names(tokens, page_size):
    names = np.empty(len(tokens) // page_size, np.uint64)
    name = np.uint64(0x9E3779B97F4A7C15)
    for page in range(len(names)):
        for i in range(page * page_size, (page + 1) * page_size):
            name = (name ^ np.uint64(tokens[i])) * np.uint64(0xFF51AFD7ED558CCD)
            name ^= name >> np.uint64(29)
        names[page] = name
    return names


@njit(cache=True)
def _bucket(state, name):
    mixed = (name * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20)
    return mixed & np.uint64(len(state.buckets) - 1)


@njit(cache=True)
def _find(state, name):
    entry = state.buckets[_bucket(state, name)]
    while entry != NOTHING and state.key[entry] != name:
        entry = state.next[entry]
    return entry


@njit(cache=True)
def _unlink(state, entry):
    older, newer = state.older[entry], state.newer[entry]
    if older != NOTHING:
        state.newer[older] = newer
    else:
        state.numbers[OLDEST] = newer
    if newer != NOTHING:
        state.older[newer] = older
    else:
        state.numbers[NEWEST] = older


@njit(cache=True)
def _link_newest(state, entry):
    newest = state.numbers[NEWEST]
    state.older[entry], state.newer[entry] = newest, NOTHING
    if newest != NOTHING:
        state.newer[newest] = entry
    else:
        state.numbers[OLDEST] = entry
    state.numbers[NEWEST] = entry


@njit(cache=True)
def _cache(state, name):
    entry = state.numbers[FREE_ENTRY]
    if entry != NOTHING:
        state.numbers[FREE_ENTRY] = state.next[entry]
    else:
        entry = state.numbers[NUM_ENTRIES]
        state.numbers[NUM_ENTRIES] += 1
    bucket = _bucket(state, name)
    state.key[entry] = name
    state.holders[entry] = 0
    state.next[entry] = state.buckets[bucket]
    state.buckets[bucket] = entry
    _link_newest(state, entry)
    return entry


@njit(cache=True)
def _evict_oldest(state):
    victim = state.numbers[OLDEST]
    _unlink(state, victim)
    bucket = _bucket(state, state.key[victim])
    if state.buckets[bucket] == victim:
        state.buckets[bucket] = state.next[victim]
    else:
        entry = state.buckets[bucket]
        while state.next[entry] != victim:
            entry = state.next[entry]
        state.next[entry] = state.next[victim]
    state.next[victim] = state.numbers[FREE_ENTRY]
    state.numbers[FREE_ENTRY] = victim
    state.numbers[FREE_PAGES] += 1


@njit(cache=True)
def _hold(state, entry):
    if state.holders[entry] == 0:
        _unlink(state, entry)
    state.holders[entry] += 1


@njit(cache=True)
def _bind(state, names, most, num_pages):
    """Pages found and held of the first `most`; the rest of `num_pages` leaves the free ones."""
    hit = 0
    while hit < most:
        entry = _find(state, names[hit])
        if entry == NOTHING:
            break
        _hold(state, entry)
        hit += 1
    while state.numbers[FREE_PAGES] < num_pages - hit:
        _evict_oldest(state)
    state.numbers[FREE_PAGES] -= num_pages - hit
    return hit


@njit(cache=True)
def _publish(state, names, held):
    """Cache what is not; all that nobody holds is recent. Returns the pages that were new."""
    num_new = 0
    for page in range(len(names) - 1, held - 1, -1):
        entry = _find(state, names[page])
        if entry == NOTHING:
            _cache(state, names[page])
            num_new += 1
        elif state.holders[entry] == 0:
            _unlink(state, entry)
            _link_newest(state, entry)
    return num_new


@njit(cache=True)
def _hold_range(state, names, start, end):
    for page in range(start, end):
        _hold(state, _find(state, names[page]))


@njit(cache=True)
def _let_go(state, names, held):
    for page in range(held - 1, -1, -1):
        entry = _find(state, names[page])
        state.holders[entry] -= 1
        if state.holders[entry] == 0:
            _link_newest(state, entry)


def replay_hits(trace, events, page_size, *, capacity=None, publishes="finish"):
    """Hit tokens of each request, int64 ``[len(trace)]``, by the exact LRU rule.

    Parameters
    ----------
    events : ndarray
        From `order_of_events`.
    capacity : int or None
        Tokens of the cache and all requests in flight; None: nothing is ever evicted.
    publishes : str
        When others can hit what a request computes: at its ``"finish"``, after its ``"prefill"``
        (the prompt; the rest at its finish), or at once: ``"bind"``.
    """
    ending = events[events[:, 0] != BIND, 1]
    pages = -(-trace.lengths // page_size)
    state = _new_state(int(pages[ending].sum()) if capacity is None else capacity // page_size)
    free = state.numbers[FREE_PAGES]
    hits = np.zeros(len(trace), np.int64)
    in_flight = {}  # request -> [names, pages held, pages that are its own]
    for kind, i in events:
        if kind == BIND:
            names = _page_names(trace.tokens(i), page_size)
            num_prompt = int(trace.prompt_lens[i])
            hit = _bind(state, names, (num_prompt - 1) // page_size, pages[i])
            hits[i] = hit * page_size
            own = int(pages[i]) - hit
            if publishes != "finish":
                known = len(names) if publishes == "bind" else num_prompt // page_size
                if known > hit:
                    own -= _publish(state, names[:known], hit)
                    _hold_range(state, names, hit, known)
                    hit = known
            in_flight[i] = names, hit, own
        else:
            names, held, own = in_flight.pop(i)
            state.numbers[FREE_PAGES] += own - _publish(state, names, held)
            _let_go(state, names, held)
    assert not in_flight
    assert state.numbers[FREE_PAGES] + _num_cached(state) == free
    return hits


@njit(cache=True)
def _num_cached(state):
    """Entries on the list, walked from its old end."""
    count, entry = 0, state.numbers[OLDEST]
    while entry != NOTHING:
        count, entry = count + 1, state.newer[entry]
    return count
