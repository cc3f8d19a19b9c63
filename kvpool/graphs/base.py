"""Graph: buffers by batch bucket, and the block in which they stand for a step's tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvpool.device import Device
from kvpool.errors import KVCacheStateError
from kvpool.graph_buffers import GraphBuffers, GraphMode
from kvpool.layout import KVCacheLayout
from kvpool.numbers import INT32_MAX, whole_number
from kvpool.page_map import PageMap
from kvpool.page_table import PageTable
from kvpool.paging import num_pages_for_length
from kvpool.step import Positions, Step
from kvpool_ext.gate import Gate
from kvpool_ext.tables import StepRows

GraphT = TypeVar("GraphT", bound="Graph")


class GraphWiring(NamedTuple):
    """What the graphs of one pool work with."""

    gate: Gate
    mode: GraphMode
    active_step: Callable[[], Step]
    page_map: PageMap
    device: Device
    layout: KVCacheLayout
    page_size: int
    num_slots: int


class Graph:
    """What both kinds of graphs have; `KVCachePool.decode_graph` and `verify_graph` make them.

    ``with graph:`` is for a captured or replayed pass: inside of it `Step.put`, `Step.page_table`
    and `Step.window_slot_indices` of the prepared step are the graph's, so that model code is the
    same with and without a graph. Blocks nest; the innermost counts. `prepare` comes before the
    block or in it, and once for each pass.
    """

    name = "graph"
    _may_grow = False

    def __init__(self, wiring: GraphWiring) -> None:
        self._wiring = wiring
        self._by_bucket: dict[int, GraphBuffers] = {}
        self._batch_buckets: tuple[int, ...] = ()
        self.buffers: GraphBuffers | None = None
        """The buffers that were prepared last."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(buckets={sorted(self._by_bucket)}, enabled={self.enabled})"

    # ---- the block

    @property
    def enabled(self) -> bool:
        """Whether a block of this graph runs."""
        return self._wiring.mode.is_in(self)

    def __enter__(self: GraphT) -> GraphT:
        self._wiring.gate.check()
        self._wiring.mode.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._wiring.mode.leave()
        if self.buffers is not None and self.buffers.filling is not None and not self.enabled:
            # The next pass writes elsewhere: its positions are not known until a prepare.
            self.buffers.filling.may_put = False

    def holds(self, rows: StepRows) -> bool:
        """Whether the buffers prepared last are for these rows of a step, and their pages."""
        filling = None if self.buffers is None else self.buffers.filling
        return filling is not None and filling.rows is rows and filling.has_its_pages

    # ---- buckets

    @property
    def batch_buckets(self) -> tuple[int, ...]:
        """Batch sizes to keep buffers for; empty for powers of two up to `max_batch_size`.

        Settable until the first buffers are made: an engine captures its own sizes. A batch larger
        than all of them gets a bucket of the next power of two.
        """
        return self._batch_buckets

    @batch_buckets.setter
    def batch_buckets(self, buckets: Sequence[int]) -> None:
        self._wiring.gate.check()
        found = tuple(whole_number(bucket, "a batch bucket", 1, INT32_MAX) for bucket in buckets)
        if list(found) != sorted(set(found)):
            raise ValueError(f"batch_buckets must be ascending and at least 1, got {found}")
        if self._by_bucket:
            raise KVCacheStateError(
                f"buffers for the buckets {sorted(self._by_bucket)} are there, and graphs may "
                "have been captured over them: set batch_buckets before the first prepare"
            )
        self._batch_buckets = found

    def bucket(self, batch_size: int) -> int:
        """Rows of the buffers that serve a batch: pad the rows of a captured pass to it."""
        batch_size = whole_number(batch_size, "batch_size", 1)
        for bucket in self._batch_buckets:
            if batch_size <= bucket:
                return bucket
        power = 1 << (batch_size - 1).bit_length()
        largest = self._wiring.layout.max_batch_size
        return largest if not self._batch_buckets and batch_size <= largest < power else power

    def buffers_for(
        self, rows: StepRows, lengths: NDArray[np.int64], window_len: int
    ) -> GraphBuffers:
        """The buffers for such a step, made where there are none yet; for `kvpool.step`.

        Raises
        ------
        ValueError
            Buffers that may not move are too small.
        """
        wiring, bucket = self._wiring, self.bucket(rows.batch_size)
        needed = rows.num_pages_over(lengths)
        found = self._by_bucket.get(bucket)
        if (
            found is not None
            and needed <= found.num_indices
            and window_len <= found.max_window_len
        ):
            return found
        # No row has more pages than the pool, whatever it was made for.
        max_seq_len = min(wiring.layout.max_seq_len, wiring.num_slots)
        num_indices = bucket * num_pages_for_length(max_seq_len, wiring.page_size)
        if needed > num_indices or found is not None:
            if not self._may_grow:
                raise ValueError(
                    f"the step's page table lists {needed} pages, the buffers of the "
                    f"{self.name} for {bucket} rows hold {num_indices}: make the pool with a "
                    f"max_seq_len above {max_seq_len}"
                )
            num_indices = max(num_indices, 2 * needed)
        if found is not None:
            num_indices = max(num_indices, found.num_indices)
            window_len = max(window_len, found.max_window_len)
        made = GraphBuffers(
            bucket,
            num_indices,
            window_len,
            wiring.page_size,
            wiring.num_slots,
            wiring.device,
            wiring.page_map,
        )
        self._replace(bucket, made)
        return made

    def _replace(self, bucket: int, made: GraphBuffers) -> None:
        self._by_bucket[bucket] = made

    def _prepare(self, cache_len: Positions, start_pos: Positions, window_len: int) -> PageTable:
        step = self._wiring.active_step()
        self.buffers = step.fill_graph(self, cache_len, start_pos, window_len)
        return self.buffers.table

    def _prepared(self, batch: int) -> GraphBuffers:
        """The buffers for a batch, if they hold something."""
        self._wiring.gate.check()
        found = self._by_bucket.get(self.bucket(batch))
        if found is None or found.filling is None:
            raise KVCacheStateError(
                f"the {self.name} was not prepared for a batch of {batch}: call prepare first"
            )
        return found
