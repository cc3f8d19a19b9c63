"""ReadVerbs: K and V read through every door of a pool, and compared row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.attention import paged_attention
from kvpool.soak.blank import expect_blank
from kvpool.soak.bound import Bound
from kvpool.soak.calls import Said
from kvpool.soak.stage import Stage
from kvpool.soak.wrong_row import wrong_row

MAX_PADDED = 1 << 16  # rows that a padded read may take
DOORS = ("get", "padded", "slots", "paged", "block_table", "attention")


class ReadVerbs(Stage):
    """Operations that read."""

    def read(self, handles: list[int], door: int) -> None:
        """Read all written positions of some requests through one door.

        `get` is asked for more, as it promises zeros behind them.
        """
        name, rows = DOORS[door % len(DOORS)], self.rows_of(handles)
        rows = [bound for bound in rows if (bound.entered if name == "get" else bound.valid_len)]
        if rows:
            self.activate(rows)
            getattr(self, f"_read_{name}")(rows)

    def read_all(self) -> None:
        """Read whatever is bound."""
        for bound in list(self.bound.values()):
            self.read([bound.handle], 0)

    def _read_get(self, rows: list[Bound]) -> None:
        # Pages that were entered, and one that was not: that too reads as zeros.
        longest = max(self.rounded(bound.entered) for bound in rows) + self.page_size
        length = min(longest, *(bound.capacity for bound in rows))
        for layer in range(self.shape.num_layers):
            k, v = self.calls.let("k, v", "step", "get", layer, length)
            k, v = self.to_host(k), self.to_host(v)
            lengths = [min(bound.valid[layer], length) for bound in rows]
            self._compare_batch(rows, layer, k, v, lengths)
            for b, bound in enumerate(rows):
                start = bound.ends[layer]
                for side, found in enumerate((k, v)):
                    text = f"{'kv'[side]}[{b}, {start}:]"
                    place, values = (layer, side, start), self.code.computed
                    expect_blank(self, bound, place, found[b, start:], text, values)

    def _read_padded(self, rows: list[Bound]) -> None:
        lengths = [bound.valid_len for bound in rows]
        longest = max(lengths)
        if longest * len(rows) > MAX_PADDED:
            return self._read_get(rows)
        for layer in range(self.shape.num_layers):
            k, v = self.calls.let("k, v", "step", "get", layer, longest, padded=True)
            self._compare_batch(rows, layer, k, v, lengths)
        return None

    def _read_slots(self, rows: list[Bound]) -> None:
        """Slots made once, for `get` and for whoever reads the buffers."""
        length = min(bound.valid_len for bound in rows)
        slots = self.calls.let("slots", "step", "slot_indices", length)
        for layer in range(self.shape.num_layers):
            k, v = self.calls.let(
                "k, v", "step", "get", layer, length, slots=Said(slots, lambda: "slots")
            )
            self._compare_batch(rows, layer, k, v, [length] * len(rows))
            caches = self.pool.key_layer(layer), self.pool.value_layer(layer)
            for b, bound in enumerate(rows):
                span = slice(b * length, (b + 1) * length)
                text = f"layer({layer})[slots[{span.start}:{span.stop}]]"
                self._compare(
                    bound,
                    layer,
                    [self.to_host(cache[slots[span]]) for cache in caches],
                    [f"pool.key_{text}", f"pool.value_{text}"],
                    self.code.stored,
                )

    def _read_paged(self, rows: list[Bound]) -> None:
        """As an attention kernel reads: pages of the table, tokens of the last page."""
        lengths = [bound.valid_len for bound in rows]
        table = self.calls.let("table", "step", "page_table", lengths)
        self._read_table(rows, lengths, table.indptr_host, table.indices_host, "table")

    def _read_block_table(self, rows: list[Bound]) -> None:
        lengths = [bound.valid_len for bound in rows]
        table = self.calls.let("table", "step", "build_page_table", lengths)
        dense = self.to_host(self.calls.let("dense", "table", "block_table"))
        counts = [-(-length // self.page_size) for length in lengths]
        pages = np.concatenate([dense[b, :count] for b, count in enumerate(counts)])
        self._read_table(rows, lengths, np.cumsum([0, *counts]), pages, "table")
        padding = np.arange(dense.shape[1]) >= np.array(counts)[:, None]
        found = set(dense[padding].tolist())
        scratch = {table.scratch_page}
        self.calls.expect(
            found & scratch, found, "the block table's padding", f"set(dense.ravel()) & {found}"
        )

    def _read_table(
        self,
        rows: list[Bound],
        lengths: list[int],
        indptr: NDArray[Any],
        pages: NDArray[Any],
        name: str,
    ) -> None:
        paged = (-1, self.page_size, self.shape.num_kv_heads, self.shape.head_dim)
        for layer in range(self.shape.num_layers):
            caches = [
                cache.reshape(paged)
                for cache in (self.pool.key_layer(layer), self.pool.value_layer(layer))
            ]
            for b, (bound, length) in enumerate(zip(rows, lengths, strict=True)):
                of_row = self.pool.device.to_device(pages[indptr[b] : indptr[b + 1]])
                found = [
                    self.to_host(cache[of_row]).reshape(-1, *paged[2:])[:length]
                    for cache in caches
                ]
                text = f"_layer({layer}), {name}, {b})"
                texts = [f"paged(pool.key{text}", f"paged(pool.value{text}"]
                self._compare(bound, layer, found, texts, self.code.stored)

    def _read_attention(self, rows: list[Bound]) -> None:
        """Decode attention of a query of zeros: the mean of V over a row's positions."""
        if self.shape.dtype != "float32":
            return self._read_paged(rows)
        lengths = [bound.valid_len for bound in rows]
        table = self.calls.let("table", "step", "page_table", lengths)
        heads, dim = self.shape.num_kv_heads, self.shape.head_dim
        q = self.pool.device.to_device(np.zeros((len(rows), heads, dim), np.float32))
        for layer in range(self.shape.num_layers):
            self.calls.say(f"out = paged_attention(zeros({len(rows)}), pool, {layer}, table)")
            out = self.to_host(paged_attention(q, self.pool, layer, table))
            for b, (bound, length) in enumerate(zip(rows, lengths, strict=True)):
                codes = bound.lineage.codes(layer, 0, length)[1]
                mean = self.code.computed[codes].mean(axis=0, dtype=np.float64)
                close = np.allclose(out[b].ravel(), mean, rtol=1e-3, atol=0)
                if not close:
                    raise self.calls.fail(
                        "attention over the page table",
                        f"request {bound.request_id}: expected {mean.tolist()}, got "
                        f"{out[b].ravel().tolist()}",
                        self._mean_text(bound, layer, b, length),
                    )
                self.rows_read += length
        return None

    def _mean_text(self, bound: Bound, layer: int, row: int, length: int) -> str:
        shape = (length, self.shape.num_kv_heads, self.shape.head_dim)
        expected = self.rows_text(layer, 1, [(bound, 0, length)], shape)
        return f"np.allclose(out[{row}], {expected}.mean(axis=0), rtol=1e-3)"

    # ---- comparing

    def _compare_batch(
        self, rows: list[Bound], layer: int, k: Any, v: Any, lengths: list[int]
    ) -> None:
        k, v = self.to_host(k), self.to_host(v)
        for b, (bound, length) in enumerate(zip(rows, lengths, strict=True)):
            texts = [f"k[{b}, :{length}]", f"v[{b}, :{length}]"]
            found = [k[b, :length], v[b, :length]]
            self._compare(bound, layer, found, texts, self.code.computed)

    def _compare(
        self,
        bound: Bound,
        layer: int,
        found: list[NDArray[Any]],
        texts: list[str],
        values: NDArray[Any],
    ) -> None:
        """Rows from position 0 on, bit by bit: `found` is K and V, ``[n, heads, head_dim]``."""
        length = found[0].shape[0]
        expected = values[bound.lineage.codes(layer, 0, length)]
        bits = np.dtype(f"u{values.itemsize}")
        self.rows_read += 2 * length
        self.bytes_read += expected.nbytes
        for side in (0, 1):
            wanted = expected[side].view(bits)
            rows = found[side].reshape(wanted.shape).view(bits)
            if not np.array_equal(rows, wanted):
                position = int(np.argmax((rows != wanted).any(axis=1)))
                if self.calls.script is not None:
                    name = "stored" if texts[side].startswith("p") else "rows"
                    shape = (length, self.shape.num_kv_heads, self.shape.head_dim)
                    text = self.rows_text(layer, side, [(bound, 0, length)], shape, name)
                    self.calls.say(f"same({texts[side]}, {text})")
                row = rows[position].view(values.dtype)
                raise wrong_row(self, bound, layer, side, position, row, values)
