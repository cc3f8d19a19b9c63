"""Forward passes of a `SequenceTwin`: eager and captured windows, and what is rejected of them."""

import contextlib

import numpy as np

from tests.oracles.prints import HEAD_DIM, LAYERS, k_rows
from tests.oracles.sequence_twin import MAX_BATCH, MAX_WINDOW, SequenceTwin


class SpeculationTwin(SequenceTwin):
    # ---- writing

    def keys_at(self, ids, starts, size):
        """K `[layers, batch, size, 1, HEAD_DIM]` of the tokens that the model has there."""
        prints = [
            self.model.sequences[i].prints(start, start + size)
            for i, start in zip(ids, starts, strict=True)
        ]
        return k_rows(np.moveaxis(np.array(prints, np.float32), -1, 0), HEAD_DIM)

    def put(self, step, ids, starts, size, *, bucket=0):
        """Through `step.put`: dense or ragged, and in a graph with or without padding rows."""
        ragged, slots = bool(self.draw(0, 1)), None
        if not bucket and self.draw(0, 1):
            slots = step.window_slot_indices(starts, size)
        padding = max(0, bucket - len(ids)) * self.draw(0, 1)
        for layer, k in enumerate(self.keys_at(ids, starts, size)):
            k = np.concatenate([k, np.full((padding, *k.shape[1:]), -7, np.float32)])
            indptr = None
            if ragged:
                indptr = np.arange(len(k) + 1) * size
                k = k.reshape(-1, 1, HEAD_DIM)
            step.put(layer, starts, k, -k, qo_indptr=indptr, slots=slots)
        self.wrote(ids, starts, size)

    def replay(self, slots, ids, starts, size):
        """As a captured kernel does: through the slots alone, the host sees nothing."""
        for layer, k in enumerate(self.keys_at(ids, starts, size)):
            k = k.reshape(-1, 1, HEAD_DIM)
            k = np.concatenate([k, np.full((len(slots) - len(k), 1, HEAD_DIM), -7, np.float32)])
            for cache, rows in zip(self.pool.layer_with_scratch(layer), (k, -k), strict=True):
                cache[slots] = rows
        self.wrote(ids, starts, size)

    def wrote(self, ids, starts, size):
        for i, start in zip(ids, starts, strict=True):
            self.model.sequences[i].write(start, start + size)

    def propose(self, ids, starts, size):
        """Draft tokens of a window into the model."""
        for i, start in zip(ids, starts, strict=True):
            self.model.sequences[i].tokens[start:] = self.draw_tokens(size)

    def note_addresses(self, kind, table, slots):
        """Arrays of a bucket may move only where the verify graph says so."""
        found = [a.ctypes.data for a in (table.indptr, table.indices, table.last_page_len, slots)]
        key = kind, table.batch_size
        if kind == "verify" and self.pool.verify_graph.take_reallocated():
            self.addresses.pop(key, None)
        assert self.addresses.setdefault(key, found) == found

    # ---- a forward pass

    def window(self):
        """One window of each row of a batch, eager or captured, and what is rejected of it."""
        self.forward(self.draw(1, MAX_WINDOW), "verify")

    def decode(self):
        """One token a row, mostly accepted."""
        self.forward(1, "decode")

    def forward(self, size, kind):
        ids = self.draw_batch()
        if not ids:
            return
        step = self.pool.activate_step(*ids)
        starts = [self.model.sequences[i].valid for i in ids]
        ends = [start + size for start in starts]
        self.propose(ids, starts, size)
        captured = bool(self.draw(0, 1))
        if not captured:
            table = step.page_table(ends)
            with step.verify_window() if size > 1 else contextlib.nullcontext():
                self.put(step, ids, starts, size)
            self.compare(ids, step, ends, None)
            self.take_back(step, ids, starts, ends, table)
            return
        graph = self.pool.verify_graph if kind == "verify" else self.pool.decode_graph
        with graph:
            if kind == "decode" and self.draw(0, 3) == 0:
                self.prefetch(graph, step, ids, starts, ends)
                self.compare_all()
            extra = (size,) if kind == "verify" else ()
            table = graph.prepare(ends, starts, *extra)
            slots = graph.write_slots() if extra else graph.write_slots(len(ids))
            self.note_addresses(kind, table, slots)
            bucket = graph.bucket(len(ids))
            if kind == "decode" and self.draw(0, 3) == 0:
                self.prefetch(graph, step, ids, starts, ends)
            if self.draw(0, 1):
                self.put(step, ids, starts, size, bucket=bucket)
            else:
                self.replay(slots, ids, starts, size)
            self.compare(ids, step, ends, bucket)
            inside = bool(self.draw(0, 1))
            if inside:
                self.take_back(step, ids, starts, ends, table)
        if not inside:
            self.take_back(step, ids, starts, ends, None)

    def prefetch(self, graph, step, ids, starts, ends):
        """A capture ahead, before or after prepare: scratch takes all, nothing is left of it."""
        ahead = min(self.model.sequences[i].capacity for i in ids)
        if ahead < max(ends):
            return
        expected = self.model.table(ids, [ahead] * len(ids), graph.bucket(len(ids)))
        with graph.prefetch(ahead, ahead - 1, len(ids)) as table:
            self.note_addresses("decode", table, graph.write_slots(len(ids)))
            assert self.table_of(table) == expected
            k = np.full((len(ids), 1, 1, HEAD_DIM), -7, np.float32)
            step.put(self.draw(0, LAYERS - 1), starts, k, -k)

    def take_back(self, step, ids, starts, ends, table):
        """Seal, truncate or invalidate at random; `table` is the one that should follow."""
        rows = [self.model.sequences[i] for i in ids]
        floors = [max(row.shared, len(row.prompt)) for row in rows]
        sealed = [
            self.draw(max(floor, start - self.draw(0, 3)), end)
            for floor, start, end in zip(floors, starts, ends, strict=True)
        ]
        verb = ("seal_length", "truncate_to", "invalidate_range", None)[self.draw(0, 3)]
        if verb is None:  # everything was accepted
            return
        pages = self.model.pages_for
        in_place = [pages(n) for n in ends] == [pages(n) for n in sealed]
        if verb == "invalidate_range":
            step.invalidate_range(sealed, ends)
        else:
            extra = (ends,) if verb == "truncate_to" else ()
            answer = getattr(step, verb)(sealed, *extra)
            assert answer is (table is not None and in_place)
        for row, start, end in zip(rows, sealed, ends, strict=True):
            if verb != "invalidate_range":
                row.seal(start)
            if verb == "invalidate_range" or (verb == "truncate_to" and self.zeroes):
                row.zero(start, end)
            del row.tokens[row.valid :]
        if table is not None and verb != "invalidate_range":
            if in_place:
                assert step.current_page_table is table
            bucket = table.batch_size if table.is_fixed else None
            self.compare(ids, step, sealed, bucket)


VERBS = {
    "window": 10,
    "decode": 5,
    "bind": 2,
    "checkpoint": 2,
    "finish": 1.5,
    "fork": 1,
    "extend": 1,
}


def run_episode(rng):
    """Bind, speculate, finish; how many times both sides were compared."""
    twin = SpeculationTwin(rng)
    weights = np.array(list(VERBS.values()))
    for _ in range(twin.draw(1, MAX_BATCH)):
        twin.bind()
        twin.compare_all()
    for verb in rng.choice(list(VERBS), twin.draw(6, 16), p=weights / weights.sum()):
        getattr(twin, verb)()
        twin.compare_all()
    while twin.model.sequences:
        twin.finish()
        twin.compare_all()
    twin.pool.close()
    return twin.operations
