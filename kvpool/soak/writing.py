"""WriteVerbs: K and V written in every way that a step offers, and taken back."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpool.soak.bound import Bound
from kvpool.soak.calls import Said
from kvpool.soak.stage import Stage

# How a put is made: bits of an operation's `form`.
RAGGED, SLOTS, ONE_START, FLOAT64, STRIDED = 1, 2, 4, 8, 16
TAKE_BACK = ("truncate_to", "seal_length", "invalidate_range")

Span = tuple[Bound, int, int]


class WriteVerbs(Stage):
    """Operations that write."""

    # ---- forward passes

    def write(self, handles: list[int], lengths: list[int], form: int) -> None:
        """The next tokens of some requests on every layer: a prefill chunk, a decode, or both."""
        self._pass(handles, lengths, form, self.shape.num_layers)

    def write_part(self, handle: int, length: int, layers: int) -> None:
        """A forward pass that is aborted behind some layer."""
        self._pass([handle], [length], 0, min(layers, self.shape.num_layers))

    def rewrite(self, handle: int, length: int) -> None:
        """The last tokens once more, as a recomputation does."""
        bound = self.bound.get(handle)
        if bound is None:
            return
        end = bound.valid_len
        start = max(bound.shared, end - length)
        if start < end:
            self._put(self.activate([bound]), [(bound, start, end)], 0, self.shape.num_layers)

    def _pass(self, handles: list[int], lengths: list[int], form: int, layers: int) -> None:
        wanted = dict(zip(handles, lengths, strict=False))
        rows = [bound for bound in self.rows_of(list(wanted)) if bound.room]
        spans = []
        for bound in rows:
            start = bound.valid_len
            spans.append((bound, start, start + max(0, min(wanted[bound.handle], bound.room))))
        if not sum([end - start for _, start, end in spans]):
            return
        self._put(self.activate(rows), spans, form, layers)
        for bound in rows:
            self.check_request(bound)

    def _put(self, step: Any, spans: list[Span], form: int, layers: int) -> None:
        starts = [start for _, start, _ in spans]
        lengths = [end - start for _, start, end in spans]
        dense = len(set(lengths)) == 1 and not form & RAGGED
        start_pos: Any = starts
        if form & ONE_START and len(set(starts)) == 1:
            start_pos = starts[0]
        options: dict[str, Any] = {}
        if not dense:
            options["qo_indptr"] = np.cumsum([0, *lengths]).tolist()
        if form & SLOTS:
            seqlen = lengths[0] if dense else lengths
            slots = self.calls.let("slots", "step", "window_slot_indices", start_pos, seqlen)
            options["slots"] = Said(slots, lambda: "slots")
        for layer in range(layers):
            k, v = self._given(layer, spans, len(spans) if dense else 0, form)
            self.calls.call("step", "put", layer, start_pos, k, v, **options)
            for bound, start, end in spans:
                bound.write(layer, start, end)

    def _given(self, layer: int, spans: list[Span], batch: int, form: int) -> tuple[Said, Said]:
        """K and V as `put` takes them: dense for a `batch`, else ragged."""
        count = sum([end - start for _, start, end in spans])
        lead = (batch, count // batch) if batch else (count,)
        shape = (*lead, self.shape.num_kv_heads, self.shape.head_dim)
        k, v = self.rows(layer, spans, shape)
        if form & FLOAT64:
            k, v = (_as_float64(rows) for rows in (k, v))
        if form & STRIDED:
            k, v = (_strided(rows) for rows in (k, v))
        return k, v

    # ---- writing without put

    def write_raw(self, handle: int, length: int) -> None:
        """Through the buffers, as a kernel of the caller's own: it answers for the last page."""
        bound = self.bound.get(handle)
        if bound is None or not bound.room or length < 1:
            return
        start = bound.valid_len
        end = start + min(length, bound.room)
        self._write_buffers(bound, start, end)
        self.calls.call("pool", "mark_written", bound.request_id, end)
        bound.declare(end)
        self.check_request(bound)

    def _write_buffers(self, bound: Bound, start: int, end: int) -> None:
        pages = self.pool.request(bound.request_id).page_ids
        positions = np.arange(start, self.rounded(end))
        slots = pages[positions // self.page_size].astype(np.int64) * self.page_size
        slots += positions % self.page_size
        # A layer that is further along keeps what it has behind `end`.
        ahead = max(end, max(bound.valid))
        for layer in range(self.shape.num_layers):
            k, v = self.stored_rows(layer, [(bound, start, end)])
            for method, rows in (("key_layer", k), ("value_layer", v)):
                where = self.on_device(slots[: end - start])
                self.calls.put("pool", method, layer, where, rows)
                if ahead < positions[-1] + 1:
                    rest = self.on_device(slots[ahead - start :])
                    self.calls.put("pool", method, layer, rest, 0)

    # ---- speculation

    def speculate(
        self, handles: list[int], window: int, accepted: list[int], how: int, tail: int
    ) -> None:
        """Write a window of drafts, read it, and take back what was not accepted."""
        rows = [b for b in self.rows_of(handles) if b.room >= window and self._may_turn(b)]
        if window < 1 or not rows:
            return
        spans = [(bound, bound.valid_len, bound.valid_len + window) for bound in rows]
        step = self.activate(rows)
        with self.calls.block("step.verify_window()", step.verify_window()):
            self._put(step, spans, how >> 2 & SLOTS, self.shape.num_layers)
        if how & 4:
            self.read([bound.handle for bound in rows], how)
            self.activate(rows)
        sealed = [
            start + min(max(n, 0), window)
            for (_, start, _), n in zip(spans, accepted * len(spans), strict=False)
        ]
        self._take_back(rows, sealed, [end for _, _, end in spans], how, tail)

    def truncate(self, handle: int, back: int, how: int, tail: int) -> None:
        """Take the last tokens back, down to what is shared or was asked for."""
        bound = self.bound.get(handle)
        if bound is None or not self._may_turn(bound):
            return
        # Prompt tokens may be taken back too, but then the same ones must follow.
        sealed = max(bound.shared, bound.valid_len - max(back, 0))
        self.activate([bound])
        self._take_back([bound], [sealed], [max(sealed, max(bound.valid))], how, tail)

    def draft_tree(self, handle: int, width: int, accepted: int, tail: int) -> None:
        """Branches of drafts in a row's own slots; the accepted branch moves to the front."""
        bound = self.bound.get(handle)
        if bound is None or width < 1 or bound.room < 2 * width or not self._may_turn(bound):
            return
        step, start = self.activate([bound]), bound.valid_len
        other = bound.lineage.copy(max(start, bound.prompt_len), tail)
        branch = Bound(-1, bound.request_id, other, 0, 0, None, 0, [], False)
        slots = step.window_slot_indices(start, 2 * width)
        # A copy: slots of the caller's own making declare nothing.
        given = self.on_device(np.array(self.to_host(slots)))
        for layer in range(self.shape.num_layers):
            # The branch that loses stands in front, the one that wins behind it.
            spans = [(branch, start, start + width), (bound, start, start + width)]
            k, v = self._given(layer, spans, 1, 0)
            self.calls.call("step", "put", layer, start, k, v, slots=given)
            bound.touch(layer, start + 2 * width)
        self.check_request(bound)
        end = start + min(max(accepted, 0), width)
        if end > start:
            self._write_buffers(bound, start, end)
            self.calls.call("pool", "mark_written", bound.request_id, end)
            bound.declare(end)
        self.check_request(bound)

    def _may_turn(self, bound: Bound) -> bool:
        """Whether other tokens may follow what is written: no layer is ahead of another."""
        return len(set(bound.valid)) == 1

    def _take_back(
        self, rows: list[Bound], sealed: list[int], ends: list[int], how: int, tail: int
    ) -> None:
        method = TAKE_BACK[how % len(TAKE_BACK)]
        if method == "seal_length":
            self.calls.call("step", method, sealed)
        else:
            self.calls.call("step", method, sealed, ends)
        zeroes = method == "invalidate_range" or (
            method == "truncate_to" and self.shape.zero_rejected_kv
        )
        for bound, length, end in zip(rows, sealed, ends, strict=True):
            bound.seal(length)
            if zeroes:
                bound.zero(length, end)
            if bound.lineage.made > length:
                bound.lineage.change_tail(max(length, bound.prompt_len), tail)
            self.check_request(bound)

    def read(self, handles: list[int], door: int) -> None:
        """Reading is another verb's."""
        raise NotImplementedError


def _as_float64(rows: Said) -> Said:
    return Said(rows.value.astype("float64"), lambda: f"{rows.text()}.astype('float64')")


def _strided(rows: Said) -> Said:
    """The same rows with other elements between theirs."""
    return Said(
        rows.value.repeat(2, -1)[..., ::2], lambda: f"{rows.text()}.repeat(2, -1)[..., ::2]"
    )
