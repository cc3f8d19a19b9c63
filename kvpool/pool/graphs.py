"""PoolGraphs: the buffers of captured passes, made when asked for."""

from __future__ import annotations

import weakref
from typing import Any

from kvpool.errors import KVCacheStateError
from kvpool.graphs import DecodeGraph, Graph, GraphWiring, VerifyGraph
from kvpool.page_map import page_map_of
from kvpool.pool.bound import PoolRequests
from kvpool.step import Step


class PoolGraphs(PoolRequests):
    """The graphs of a pool, one of each kind."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._graphs: dict[type[Graph], Graph] = {}
        self._graph_wiring: GraphWiring | None = None

    @property
    def decode_graph(self) -> DecodeGraph:
        """Fixed-address buffers for captured decode passes."""
        graph: DecodeGraph = self._graph(DecodeGraph)
        return graph

    @property
    def verify_graph(self) -> VerifyGraph:
        """Fixed-address buffers for captured verify windows."""
        graph: VerifyGraph = self._graph(VerifyGraph)
        return graph

    def _graph(self, kind: type[Any]) -> Any:
        try:
            self._gate.enter()
            if self._graph_wiring is None:
                self._graph_wiring = self._wire()
            if kind not in self._graphs:
                self._graphs[kind] = kind(self._graph_wiring)
            return self._graphs[kind]
        finally:
            self._gate.leave()

    def _wire(self) -> GraphWiring:
        # Weakly: a pool that is dropped gives its memory back at once, not at a collection.
        this = weakref.ref(self)

        def active_step() -> Step:
            pool = this()
            if pool is None:
                raise KVCacheStateError("the pool of this graph is gone")
            return pool.step

        return GraphWiring(
            self._gate,
            self._graph_mode,
            active_step,
            page_map_of(self._device, self._page_size),
            self._device,
            self._layout,
            self._page_size,
            self._num_slots,
        )
