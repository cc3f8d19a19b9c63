"""GraphVerbs: decode and verify passes through the fixed buffers of a graph."""

from __future__ import annotations

from typing import Any

from kvpool.soak.bound import Bound
from kvpool.soak.calls import Said
from kvpool.soak.writing import WriteVerbs


class GraphVerbs(WriteVerbs):
    """Operations that a captured pass replays; eager here."""

    def decode_graph(self, handles: list[int], padded: int) -> None:
        """One token a row through the decode graph, with or without rows of padding."""
        rows = [bound for bound in self.rows_of(handles) if bound.room]
        if rows:
            lengths = [bound.valid_len + 1 for bound in rows]
            starts = [length - 1 for length in lengths]
            self._in_graph("decode_graph", rows, (lengths, starts), 1, padded)

    def verify_graph(
        self, handles: list[int], window: int, accepted: list[int], how: int, tail: int
    ) -> None:
        """A window of drafts a row through the verify graph; then the rejected go."""
        rows = [b for b in self.rows_of(handles) if b.room >= window and self._may_turn(b)]
        if window < 1 or not rows:
            return
        starts = [bound.valid_len for bound in rows]
        ends = [start + window for start in starts]
        self._in_graph("verify_graph", rows, (ends, starts, window), window, how & 4)
        sealed = [
            start + min(max(n, 0), window)
            for start, n in zip(starts, accepted * len(rows), strict=False)
        ]
        self._take_back(rows, sealed, ends, how, tail)

    def _in_graph(
        self, name: str, rows: list[Bound], prepared: tuple[Any, ...], window: int, padded: int
    ) -> None:
        self.activate(rows)
        graph = getattr(self.pool, name)
        self.calls.names[f"pool.{name}"] = graph
        self.calls.let("table", f"pool.{name}", "prepare", *prepared)
        spans = [(bound, bound.valid_len, bound.valid_len + window) for bound in rows]
        padding = graph.bucket(len(rows)) - len(rows) if padded else 0
        with self.calls.block(f"pool.{name}", graph):
            for layer in range(self.shape.num_layers):
                k, v = self._given(layer, spans, len(rows), 0)
                if padding:
                    k, v = self._padded(k, padding), self._padded(v, padding)
                self.calls.call("step", "put", layer, 0, k, v)
        for bound, start, end in spans:
            for layer in range(self.shape.num_layers):
                bound.write(layer, start, end)
            self.check_request(bound)
        lengths = [bound.valid_len for bound in rows]
        table = self.calls.names["table"]
        self._read_table(rows, lengths, table.indptr_host, table.indices_host, "table")

    def _padded(self, rows: Said, count: int) -> Said:
        xp = self.pool.array_namespace
        shape = (count, *rows.value.shape[1:])
        blank = xp.zeros(shape, rows.value.dtype)
        return Said(
            xp.concatenate([rows.value, blank]),
            lambda: f"padded({rows.text()}, {count})",
        )

    def _read_table(
        self, rows: list[Bound], lengths: list[int], indptr: Any, pages: Any, name: str
    ) -> None:
        """Reading is another verb's."""
        raise NotImplementedError
