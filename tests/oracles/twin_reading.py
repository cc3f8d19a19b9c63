"""The verbs that look: page tables, get, and the bytes in the pages themselves."""

import numpy as np

from kvpool import KVCacheExhaustedError
from tests.oracles.prints import HEAD_DIM, LAYERS, k_rows


class ReadingVerbs:
    # ---- reading

    def table(self, choose):
        twin, rows = self.draw_step(choose)
        if twin is None:
            return
        lengths = [choose.integer(0, row.capacity) for row in rows]
        given = lengths[0] if len(rows) == 1 else lengths
        if choose.integer(0, 3) == 0:
            self.compare_table(twin.step.build_page_table(given), rows, lengths)
            return
        table = twin.step.page_table(given)
        assert twin.step.page_table(given) is table
        twin.lengths = lengths
        self.check_table(twin, rows)

    def check_table(self, twin, rows):
        table = twin.step.current_page_table
        if twin.lengths is None:
            assert table is None
        else:
            self.compare_table(table, rows, twin.lengths)

    def compare_table(self, table, rows, lengths):
        size, pages_for = self.page_size, self.model.pages_for
        indptr = [0]
        for length in lengths:
            indptr.append(indptr[-1] + pages_for(length))
        last = [length - size * (pages_for(length) - 1) if length else 0 for length in lengths]
        assert table.indices.tolist() == [
            page
            for row, length in zip(rows, lengths, strict=True)
            for page in row.pages[: pages_for(length)]
        ]
        assert table.indptr.tolist() == list(table.indptr_host) == indptr
        assert table.last_page_len.tolist() == list(table.last_page_len_host) == last
        assert list(table.lengths_host) == lengths
        assert (table.page_size, table.batch_size) == (size, len(rows))
        assert table.indices.dtype == table.indptr.dtype == table.last_page_len.dtype == np.int32

    def read(self, choose):
        twin, rows = self.draw_step(choose)
        if twin is None:
            return
        padded = bool(choose.integer(0, 1))
        longest = (max if padded else min)(row.capacity for row in rows)
        length = choose.integer(0, longest)
        positions = [[min(p, row.capacity - 1) for p in range(length)] for row in rows]
        slots = [
            row.pages[p // self.page_size] * self.page_size + p % self.page_size
            for row, where in zip(rows, positions, strict=True)
            for p in where
        ]
        if padded or length <= min(row.capacity for row in rows):
            assert twin.step.slot_indices(length).tolist() == slots
        for layer in range(LAYERS):
            k, v = twin.step.get(layer, length, padded=padded)
            expected = np.stack(
                [row.content[layer, where] for row, where in zip(rows, positions, strict=True)]
            )
            self.same(k, k_rows(expected.reshape(len(rows), length), HEAD_DIM))
            np.testing.assert_array_equal(v, -k)
        self.reads += 1

    def read_past_the_end(self, choose):
        twin, rows = self.draw_step(choose)
        if twin is None:
            return
        smallest = min(row.capacity for row in rows)
        with self.refused(KVCacheExhaustedError):
            twin.step.get(0, smallest + 1)
        with self.refused(KVCacheExhaustedError):
            twin.step.require(smallest + 1)
        twin.step.require(smallest)

    def same(self, got, expected):
        known = ~np.isnan(expected)
        np.testing.assert_array_equal(got[known], expected[known])

    def compare_raw(self):
        """What a kernel finds in the pages themselves, cleared tails and all."""
        for request in self.model.requests.values():
            entered = self.model.pages_for(request.high) * self.page_size
            if entered:
                slots = request.slots(0, entered)
                for layer in range(LAYERS):
                    expected = k_rows(request.content[layer, :entered], HEAD_DIM)
                    self.same(self.pool.key_layer(layer)[slots], expected)
                    self.same(self.pool.value_layer(layer)[slots], -expected)
