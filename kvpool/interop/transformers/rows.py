"""BatchRows: the requests of a batch, their order, and the tokens that each has been given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvpool.interop.transformers.leftovers import give_back
from kvpool.interop.transformers.prompts import Prompts
from kvpool.numbers import whole_number

if TYPE_CHECKING:
    from kvpool.pool import KVCachePool
    from kvpool.request import ExtraKey
    from kvpool.step import Step


class BatchRows:
    """One bound request for each row of a batch.

    ``generate`` speaks of columns, of which all rows have as many; the pool of the positions of a
    request. Column ``c`` of a row is position ``c - pad``.

    Parameters
    ----------
    pool : KVCachePool
        Where they are bound.
    prompts : Prompts
        What they are bound with.
    max_new_tokens : int
        Tokens that are reserved for each row beyond its prompt.
    rows_per_prompt : int
        Rows that go on from each prompt: beams, or returned sequences.
    extra_key : str, bytes, int or None
        Namespace.
    priority : int
        Of what they will insert.

    Raises
    ------
    KVCacheExhaustedError
        The pages cannot be had; then nothing is bound.
    """

    def __init__(
        self,
        pool: KVCachePool,
        prompts: Prompts,
        max_new_tokens: int,
        rows_per_prompt: int,
        extra_key: ExtraKey,
        priority: int,
    ) -> None:
        self.request_ids: list[int] = []
        self.pool, self.prompts = pool, prompts
        # Of each row: its prompt, and the ids that followed it.
        self.prompt_of: list[int] = []
        self.continuations: list[list[int]] = []
        self._capacities: list[int] = []
        self._step: Step | None = None
        try:
            for index, tokens in enumerate(prompts.tokens):
                capacity = len(tokens) + max_new_tokens
                self.request_ids.append(
                    pool.bind_request(tokens, capacity, extra_key=extra_key, priority=priority)
                )
                self.prompt_of.append(index)
                self.continuations.append([])
                self._capacities.append(capacity)
            self.matched_lens = [pool.matched_prefix_len(i) for i in self.request_ids]
            if rows_per_prompt > 1:
                self.repeat(rows_per_prompt)
        except BaseException:
            self.unbind()
            raise

    def __len__(self) -> int:
        return len(self.request_ids)

    # ---- where they are

    @property
    def pads(self) -> list[int]:
        """Padding columns of each row."""
        return [self.prompts.pads[index] for index in self.prompt_of]

    @property
    def matched(self) -> list[int]:
        """Leading tokens of each row that the pool had: they are read-only, and there already."""
        return [self.matched_lens[index] for index in self.prompt_of]

    @property
    def reused_columns(self) -> int:
        """Leading columns that no row needs to compute; at least one is left to compute."""
        ends = [
            pad + matched
            for pad, matched in zip(self.prompts.pads, self.matched_lens, strict=True)
        ]
        return min(*ends, self.prompts.length - 1)

    @property
    def step(self) -> Step:
        """The rows as they are now, as a step of the pool."""
        if self._step is None or not self._step.is_alive:
            self._step = self.pool.activate_step(self.request_ids)
        return self._step

    # ---- tokens

    def note(self, past: int, columns: Any) -> None:
        """Remember the ids of columns from `past` on, ``[rows, n]``, as what the rows hold."""
        length = self.prompts.length
        kept, first = max(past - length, 0), max(length - past, 0)
        for continuation, given in zip(self.continuations, columns, strict=True):
            continuation[kept:] = given[first:].tolist()

    def tokens(self, row: int, end: int) -> list[int]:
        """Ids of a row up to column `end`, without padding."""
        prompt = self.prompts.tokens[self.prompt_of[row]].tolist()
        whole: list[int] = prompt + self.continuations[row]
        return whole[: max(end - self.pads[row], 0)]

    def reserve(self, end: int) -> None:
        """See to it that each row has pages up to column `end`."""
        for row, pad in enumerate(self.pads):
            if end - pad > self._capacities[row]:
                self.pool.extend_request(self.request_ids[row], end - pad)
                self._capacities[row] = end - pad

    # ---- rows come and go

    def repeat(self, times: int) -> None:
        """Have `times` rows for each row, side by side."""
        times = whole_number(times, "repeats", at_least=1)
        self.select([row for row in range(len(self)) for _ in range(times)])

    def select(self, sources: Sequence[int]) -> None:
        """Make row ``i`` go on from what row ``sources[i]`` is now.

        The first row that goes on from a source is that request, the others are forks of it: whole
        pages are held by all of them, the last one is copied.

        Raises
        ------
        KVCacheExhaustedError
            More rows than before, and no pages for them; then nothing was changed.
        ValueError
            A source that is no row.
        """
        count = len(self)
        bad = [source for source in sources if not 0 <= source < count]
        if bad or not sources:
            raise ValueError(f"rows must be in 0 .. {count - 1}, got {list(sources)}")
        if list(sources) == list(range(count)):
            return
        pool, old = self.pool, self.request_ids
        # First, as a row that is gone leaves at least the pages that one fork needs.
        ended = [row for row in range(count) if row not in set(sources)]
        for row in ended:
            pool.unbind_request(old[row])
        forks: list[int] = []
        request_ids: list[int] = []
        taken: set[int] = set()
        try:
            for source in sources:
                if source in taken:
                    forks.append(pool.fork_request(old[source], self._capacities[source]))
                    request_ids.append(forks[-1])
                else:
                    taken.add(source)
                    request_ids.append(old[source])
        except BaseException:
            for request_id in forks:
                pool.unbind_request(request_id)
            if ended:
                self.unbind()
            raise
        self.request_ids = request_ids
        self.prompt_of = [self.prompt_of[source] for source in sources]
        self.continuations = [[*self.continuations[source]] for source in sources]
        self._capacities = [self._capacities[source] for source in sources]
        self._step = None

    def finish(self, ends: Sequence[int]) -> int:
        """Insert the tokens of each row before column ``ends[row]``, then unbind it."""
        num_inserted = 0
        for row, end in enumerate(ends):
            tokens = self.tokens(row, end)
            num_inserted += self.pool.finish_request(self.request_ids[row], tokens)
        self.request_ids = []
        return num_inserted

    def unbind(self) -> None:
        """Give back what the rows hold; nothing is inserted. Never an error."""
        give_back(self.pool, self.request_ids)
        self.request_ids = []

    def __del__(self) -> None:
        # Of a cache that nobody closed, in whatever thread.
        if self.request_ids:
            self.unbind()
