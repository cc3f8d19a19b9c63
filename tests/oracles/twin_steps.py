"""The verbs of a step that write, and those that take back."""

from dataclasses import dataclass

import numpy as np

from kvpool import KVCacheExhaustedError, KVCacheStateError
from tests.oracles.prints import HEAD_DIM, LAYERS, k_rows


@dataclass
class StepTwin:
    """A live step, and the lengths that its shared table describes (None without one)."""

    step: object
    ids: tuple
    lengths: list | None = None


class StepVerbs:
    # ---- steps

    def adopt_step(self, ids):
        step = self.pool.step
        assert tuple(step.request_ids) == tuple(ids)
        self.latest = StepTwin(step, tuple(ids))
        self.steps = [*self.steps[-3:], self.latest]

    def alive(self, twin):
        return all(i in self.model.requests for i in twin.ids)

    def bury_steps(self):
        """A step dies with the first of its requests, and says so."""
        for twin in self.steps:
            if not self.alive(twin):
                try:
                    twin.step.slot_indices(1)
                except KVCacheStateError:
                    continue
                raise AssertionError("a step outlived its requests")
        self.steps = [twin for twin in self.steps if self.alive(twin)]
        if self.latest is not None and self.latest in self.steps:
            assert self.pool.step is self.latest.step
        elif not self.steps:
            try:
                self.pool.step  # noqa: B018 - reading it is the test
            except KVCacheStateError:
                return
            raise AssertionError("a step is active while no request of one is bound")

    def activate(self, choose):
        ids = list(self.model.requests)
        if not ids:
            return None
        picked = list(dict.fromkeys(choose.items(ids, choose.integer(1, 3))))
        self.pool.activate_step(*picked)
        self.adopt_step(picked)
        return self.latest

    def draw_step(self, choose):
        self.bury_steps()
        if not self.steps or choose.integer(0, 2) == 0:
            self.activate(choose)
        if not self.steps:
            return None, []
        twin = choose.item(self.steps)
        return twin, [self.model.requests[i] for i in twin.ids]

    def draw_windows(self, choose, rows, *, most):
        """(starts, seqlens) of a put: mostly where the row ends, sometimes over or past it."""
        starts, seqlens = [], []
        for row in rows:
            start = row.valid_len
            kind = choose.integer(0, 9)
            if kind == 0:
                start = choose.integer(row.shared, max(row.shared, row.high))
            elif kind == 1:
                start += choose.integer(0, self.page_size + 1)
            start = min(max(start, row.shared), row.capacity)
            starts.append(start)
            seqlens.append(min(row.capacity - start, choose.integer(0, most)))
        return starts, seqlens

    def put(self, choose):
        twin, rows = self.draw_step(choose)
        if twin is None:
            return
        most = choose.item((1, self.page_size, 3 * self.page_size, 50 * self.page_size))
        starts, seqlens = self.draw_windows(choose, rows, most=most)
        ragged = choose.integer(0, 1)
        if not ragged:
            seqlens = [min(seqlens)] * len(rows)
        if not sum(seqlens):
            return
        ends = [start + n for start, n in zip(starts, seqlens, strict=True)]
        spans = list(zip(rows, starts, ends, strict=True))
        slots = None
        if choose.integer(0, 1):
            slots = twin.step.window_slot_indices(starts, seqlens if ragged else seqlens[0])
            assert slots.tolist() == [
                slot for row, start, end in spans for slot in row.slots(start, end)
            ]
        start = starts[0] if len(set(starts)) == 1 and choose.integer(0, 1) else starts
        layers = [choose.integer(0, LAYERS - 1)] if choose.integer(0, 9) == 0 else range(LAYERS)
        self.write_rows(twin.step, spans, layers, start, ragged=ragged, slots=slots)

    def write_rows(
        self, step, spans, layers=range(LAYERS), start=None, *, ragged=True, slots=None
    ):
        """Put the rows' own prints into the spans ``(row, start, end)``."""
        start = [a for _, a, _ in spans] if start is None else start
        seqlens = [b - a for _, a, b in spans]
        for layer in layers:
            k = np.concatenate([k_rows(row.prints[layer, a:b], HEAD_DIM) for row, a, b in spans])
            if ragged:
                indptr = np.concatenate([[0], np.cumsum(seqlens)]).tolist()
                step.put(layer, start, k, -k, qo_indptr=indptr, slots=slots)
            else:
                k = k.reshape(len(spans), seqlens[0], 1, HEAD_DIM)
                step.put(layer, start, k, -k, slots=slots)
            for row, a, b in spans:
                row.write(layer, a, b)

    def put_wrongly(self, choose):
        """Past the capacity, or into what is shared."""
        twin, rows = self.draw_step(choose)
        if twin is None:
            return
        row = choose.item(rows)
        one = np.full((len(rows), 1, 1, HEAD_DIM), -7, np.float32)
        starts = [r.shared for r in rows]
        full = [r for r in rows if r.shared >= r.capacity and r is not row]
        if full:
            return
        starts[rows.index(row)] = row.capacity
        with self.refused(KVCacheExhaustedError):
            twin.step.put(0, starts, one, one)
        if row.shared:
            starts[rows.index(row)] = choose.integer(0, row.shared - 1)
            with self.refused(ValueError):
                twin.step.put(0, starts, one, one)

    def mark_written(self, choose):
        """A model that writes through key_layer and clears the rest of its last page."""
        request = self.draw_request(choose)
        if request is None:
            return
        start = max(request.shared, request.valid_len)
        end = min(request.capacity, start + choose.integer(0, 2 * self.page_size))
        if end > start:
            self.write_raw(request.slots(start, end), request.prints[:, start:end])
            request.content[:, start:end] = request.prints[:, start:end]
            # one layer may be further along: what it has written is not the rest
            rest = max(end, int(request.valid.max()))
            page_end = max(rest, -(-end // self.page_size) * self.page_size)
            self.write_raw(
                request.slots(rest, page_end), np.zeros((LAYERS, page_end - rest), np.float32)
            )
            request.content[:, rest:page_end] = 0
        self.pool.mark_written(request.id, end)
        request.declare(end)

    # ---- speculative reject

    def rejected(self, choose, rows):
        """(sealed, written_end) a row; sealing what is shared is nothing an engine does."""
        sealed = [choose.integer(min(row.shared, row.high), row.high) for row in rows]
        return sealed, [choose.integer(s, row.high) for s, row in zip(sealed, rows, strict=True)]

    def bumped(self, twin, lengths):
        """What seal answers: the shared table is still right with no page more or less."""
        if twin.lengths is None:
            return False
        pages = self.model.pages_for
        same = [pages(a) for a in twin.lengths] == [pages(b) for b in lengths]
        twin.lengths = lengths
        return same

    def seal(self, choose):
        twin, rows = self.draw_step(choose)
        if twin is None:
            return
        sealed, _ = self.rejected(choose, rows)
        if choose.integer(0, 3) == 0:  # above what is written: legal, raises nothing
            sealed = [choose.integer(s, row.capacity) for s, row in zip(sealed, rows, strict=True)]
        answer = twin.step.seal_length(sealed[0] if len(rows) == 1 else sealed)
        assert answer is self.bumped(twin, sealed)
        for row, length in zip(rows, sealed, strict=True):
            row.seal(length)
            self.change_mind(choose, row)
        self.check_table(twin, rows)

    def truncate(self, choose):
        twin, rows = self.draw_step(choose)
        if twin is None:
            return
        sealed, ends = self.rejected(choose, rows)
        answer = twin.step.truncate_to(sealed, ends)
        assert answer is self.bumped(twin, sealed)
        for row, start, end in zip(rows, sealed, ends, strict=True):
            row.seal(start)
            row.zero(start, end)
            self.change_mind(choose, row)
        self.check_table(twin, rows)
        if rows[0].shared:
            with self.refused(ValueError):
                starts = [rows[0].shared - 1, *(row.high for row in rows[1:])]
                twin.step.truncate_to(starts, [max(row.shared, row.high) for row in rows])

    def invalidate(self, choose):
        twin, rows = self.draw_step(choose)
        if twin is None:
            return
        starts, ends = self.rejected(choose, rows)
        twin.step.invalidate_range(starts, ends)
        for row, start, end in zip(rows, starts, ends, strict=True):
            row.zero(start, end)

    def change_mind(self, choose, row):
        """After a reject other tokens may follow, never other prompt tokens."""
        kept = max(row.high, len(row.prompt or [])) if choose.integer(0, 1) else row.capacity
        kept = min(max(kept, int(row.valid.max())), row.capacity)
        row.set_tokens(row.tokens[:kept] + self.draw_tokens(choose, row.capacity - kept))
