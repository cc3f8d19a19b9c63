"""TierStack: the tiers of a pool, the fastest first, read and written in chunks of pages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvpool.tiers.arena import StagingArena, StagingBuffer
from kvpool.tiers.calls import TierCall
from kvpool.tiers.known import KnownKeys
from kvpool.tiers.lane import Lane
from kvpool.tiers.records import PageRecords

TIER_COUNTERS = (
    "hit_pages",
    "missed_pages",
    "bad_pages",
    "written_pages",
    "unwritten_pages",
    "promoted_pages",
)
Deliver = Callable[[int, NDArray[np.uint8]], bool]


class TierStack:
    """Lanes, and what each tier is known to have; any thread may use it.

    Parameters
    ----------
    lanes : sequence of Lane
        The first is asked first.
    records : PageRecords
        Layout of the pool's records.
    arena : StagingArena
        Buffers for them.
    max_known : int
        Keys to remember for each tier.
    patience_s : float
        How long to wait for a staging buffer.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        records: PageRecords,
        arena: StagingArena,
        max_known: int,
        patience_s: float,
    ) -> None:
        self.lanes, self.records, self.arena = list(lanes), records, arena
        self.known = [KnownKeys(max_known) for _ in lanes]
        # Records that did not verify: `exists` is not believed of them until they are written.
        self._damaged = [KnownKeys(max_known) for _ in lanes]
        self._patience_s = patience_s
        self._lock = threading.RLock()
        self._counts = [dict.fromkeys(TIER_COUNTERS, 0) for _ in lanes]

    def counters(self) -> list[dict[str, int]]:
        """Pages, by what became of them, for each tier."""
        with self._lock:
            return [dict(counts) for counts in self._counts]

    def _count(self, place: int, name: str, number: int) -> None:
        with self._lock:
            self._counts[place][name] += number

    def take_buffer(self) -> StagingBuffer | None:
        """A staging buffer; None where calls that hang have all of them."""
        return self.arena.take(self._patience_s)

    # ---- reading

    def read(self, keys: Sequence[bytes], tokens: NDArray[np.int32], deliver: Deliver) -> int:
        """Find the leading pages that some tier has, and verify them.

        Parameters
        ----------
        keys : sequence of bytes
            ``[n]``, each page below the one before.
        tokens : ndarray
            int32 ``[n, page_size]``.
        deliver : callable
            Called with ``(first, rows)`` for each chunk of verified records, in order; False from
            it ends the reading. The rows are its own only until it returns.

        Returns
        -------
        int
            Pages found.
        """
        start = 0
        while start < len(keys):
            end = min(len(keys), start + self.arena.num_rows)
            buffer = self.take_buffer()
            if buffer is None:
                break
            try:
                chunk = _ChunkRead(self, keys[start:end], tokens[start:end], buffer)
                found = chunk.run()
                if found and not deliver(start, buffer.rows[:found]):
                    return start + found
                chunk.promote(found)
            finally:
                buffer.release()
            start += found
            # A tier that hung has kept the buffer: the others are asked anew.
            if start < end and not chunk.lost_buffer:
                break
        return start

    def answered_read(
        self, place: int, keys: Sequence[bytes], there: Sequence[bool], good: Sequence[bool]
    ) -> None:
        """Remember what the tier at `place` had of `keys`, and count it."""
        had = [key for key, verified in zip(keys, good, strict=True) if verified]
        had_not = [key for key, verified in zip(keys, good, strict=True) if not verified]
        self.known[place].add(had)
        self.known[place].discard(had_not)
        bad = [k for k, has, verified in zip(keys, there, good, strict=True) if has > verified]
        if bad:
            self._damaged[place].add(bad)
            self.lanes[place].send(TierCall("remove", bad))
        self._count(place, "hit_pages", len(had))
        self._count(place, "missed_pages", len(keys) - sum(there))
        self._count(place, "bad_pages", sum(there) - len(had))

    # ---- writing

    def wanting(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Which tier lacks which page, as far as they can be asked now: bool ``[tiers, n]``."""
        lacks = np.zeros((len(self.lanes), len(keys)), np.bool_)
        for place, lane in enumerate(self.lanes):
            unknown = np.flatnonzero(~self.known[place].have(keys)).tolist()
            if not unknown:
                continue
            asked = [keys[i] for i in unknown]
            there = lane.ask(TierCall("exists", asked))
            if there is None:
                continue
            sound = np.array(there, np.bool_) & ~self._damaged[place].have(asked)
            self.known[place].add(
                key for key, has in zip(asked, sound.tolist(), strict=True) if has
            )
            lacks[place, unknown] = ~sound
        return lacks

    def write(
        self, keys: Sequence[bytes], buffer: StagingBuffer, lacks: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Store the first rows of `buffer` in all tiers that lack them, and wait for it.

        Parameters
        ----------
        keys : sequence of bytes
            ``[n]``.
        buffer : StagingBuffer
            Its first `n` rows are sealed records.
        lacks : ndarray
            bool ``[tiers, n]``, from `wanting`.

        Returns
        -------
        ndarray
            bool ``[n]``: pages that some tier took.
        """
        taken = np.zeros(len(keys), np.bool_)
        sent: list[tuple[int, Lane, slice, TierCall]] = []
        for place, lane in enumerate(self.lanes):
            for part in runs_of(lacks[place]):
                call = TierCall("write", keys[part], buffer.rows[part], buffer)
                if lane.send(call):
                    sent.append((place, lane, part, call))
        for place, lane, part, call in sent:
            answers = lane.wait(call)
            if answers is not None:
                taken[part] |= np.array(answers, np.bool_)
            self.answered_write(place, call.keys, "written_pages", answers)
        return taken

    def answered_write(
        self, place: int, keys: Sequence[bytes], counter: str, answers: Sequence[bool] | None
    ) -> None:
        """Remember what the tier at `place` took of `keys`, and count it."""
        if answers is None:
            answers = [False] * len(keys)
        took = [key for key, stored in zip(keys, answers, strict=True) if stored]
        self.known[place].add(took)
        self._damaged[place].discard(took)
        self._count(place, counter, len(took))
        self._count(place, "unwritten_pages", len(keys) - len(took))


class _ChunkRead:
    """The reading of one chunk into one buffer, tier by tier."""

    def __init__(
        self,
        stack: TierStack,
        keys: Sequence[bytes],
        tokens: NDArray[np.int32],
        buffer: StagingBuffer,
    ) -> None:
        self._stack, self._keys, self._tokens, self._buffer = stack, keys, tokens, buffer
        self._found = np.zeros(len(keys), np.bool_)
        # Which tier answered that it has not got a page: there it can be promoted to.
        self._missed = np.zeros((len(stack.lanes), len(keys)), np.bool_)
        self.lost_buffer = False

    def run(self) -> int:
        """Ask until all is found or all were asked; the leading pages found."""
        for place, lane in enumerate(self._stack.lanes):
            is_last = place == len(self._stack.lanes) - 1
            for part in runs_of(~self._found):
                there = self._ask(place, lane, part)
                if there is None or (is_last and not there.all()):
                    break  # nobody is left to fill this gap, so what is behind it is of no use
            if self.lost_buffer or self._found.all():
                break
        return int(np.argmin(self._found)) if not self._found.all() else len(self._keys)

    def _ask(self, place: int, lane: Lane, part: slice) -> NDArray[np.bool_] | None:
        keys, rows = self._keys[part], self._buffer.rows[part]
        there = lane.ask(TierCall("read", keys, rows, self._buffer))
        if there is None:
            # Rows outside of `part` are still this reader's.
            self.lost_buffer = self._buffer.is_shared
            return None
        good = np.array(there, np.bool_)
        for answered in runs_of(good):
            shifted = slice(part.start + answered.start, part.start + answered.stop)
            good[answered] = self._stack.records.verify(
                rows[answered], self._keys[shifted], self._tokens[shifted]
            )
        self._stack.answered_read(place, keys, there, good.tolist())
        self._found[part] = good
        self._missed[place, part] = ~good
        return good

    def promote(self, num_pages: int) -> None:
        """Send the first pages to the tiers that had not got them, and wait for nothing.

        Only while another buffer is free: this one is not until the tiers have the pages.
        """
        stack = self._stack
        for place, lane in enumerate(stack.lanes[:-1]):
            for part in runs_of(self._missed[place, :num_pages]):
                if self.lost_buffer or stack.arena.num_free == 0:
                    return
                keys = self._keys[part]

                then = partial(stack.answered_write, place, keys, "promoted_pages")
                lane.send(TierCall("write", keys, self._buffer.rows[part], self._buffer, then))


def runs_of(flags: NDArray[np.bool_]) -> Iterator[slice]:
    """The stretches of `flags` ``[n]`` that are True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False]))))
    for start, stop in edges.reshape(-1, 2).tolist():
        yield slice(start, stop)
