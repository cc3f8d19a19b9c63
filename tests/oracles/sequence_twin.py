"""A pool and its `SequencePool` side by side: the life of requests, and how all is compared."""

import numpy as np

from kvpool import KVCachePool
from tests.oracles.prints import HEAD_DIM, LAYERS, k_rows
from tests.oracles.sequence import NOTHING, SequencePool, keys_of, tree_of

MAX_BATCH, MAX_WINDOW = 8, 6
ROOM = 48  # tokens that a request may generate, windows included
ALPHABET = 7


class SequenceTwin:
    """Verbs that do one thing on both sides. `put` is how tokens get into the pool."""

    def __init__(self, rng):
        self.rng = rng
        self.page_size = int(rng.choice([1, 4, 16, 64]))
        self.zeroes = bool(rng.integers(2))
        num_pages = 4 * MAX_BATCH * (4 + -(-ROOM // self.page_size))
        self.pool = KVCachePool(
            LAYERS,
            num_pages * self.page_size,
            1,
            HEAD_DIM,
            page_size=self.page_size,
            zero_rejected_kv=self.zeroes,
        )
        self.model = SequencePool(num_pages, self.page_size)
        self.stems = [self.draw_tokens(3 * self.page_size) for _ in range(2)]
        self.addresses = {}
        self.reader = None
        self.operations = 0

    # ---- drawing

    def draw(self, low, high):
        """Both ends included."""
        return int(self.rng.integers(low, high + 1))

    def draw_tokens(self, n):
        return self.rng.integers(0, ALPHABET, n).tolist()

    def draw_prompt(self):
        """A piece of one of two stems, so that prefixes are shared, and a tail of its own."""
        stem = self.stems[self.draw(0, 1)]
        return stem[: self.draw(0, len(stem))] + self.draw_tokens(self.draw(1, 4))

    def draw_batch(self):
        """Ids of some bound requests that have room for a window, in any order."""
        ids = [i for i, s in self.model.sequences.items() if s.valid + MAX_WINDOW <= s.capacity]
        picked = self.rng.permutation(ids)[: self.draw(1, max(1, len(ids)))]
        return [int(i) for i in picked]

    # ---- a request's life

    def follow(self):
        """The requests changed: `reader` is a step over all of them."""
        ids = list(self.model.sequences)
        self.reader = self.pool.activate_step(*ids) if ids else None

    def bind(self):
        if len(self.model.sequences) >= MAX_BATCH:
            return
        prompt = self.draw_prompt()
        request_id = self.pool.bind_request(prompt, len(prompt) + ROOM)
        pages = self.pool.request(request_id).page_ids.tolist()
        sequence = self.model.bind(request_id, prompt, pages)
        start = sequence.matched
        while start < len(prompt):  # prefill in chunks
            end = self.draw(start + 1, len(prompt))
            self.put(self.pool.activate_step(request_id), [request_id], [start], end - start)
            start = end
        self.follow()

    def fork(self):
        if not 0 < len(self.model.sequences) < MAX_BATCH:
            return
        parent_id = int(self.rng.choice(list(self.model.sequences)))
        parent = self.model.sequences[parent_id]
        request_id = self.pool.fork_request(parent_id, parent.valid + ROOM)
        self.model.fork(request_id, parent, self.pool.request(request_id).page_ids.tolist())
        self.follow()

    def extend(self):
        """A request that is full goes on."""
        for request_id, sequence in self.model.sequences.items():
            if sequence.valid + MAX_WINDOW > sequence.capacity:
                self.pool.extend_request(request_id, sequence.capacity + MAX_WINDOW)
                pages = self.pool.request(request_id).page_ids.tolist()
                self.model.claim(pages[len(sequence.pages) :])
                sequence.pages = pages
                sequence.content += [NOTHING] * (sequence.capacity - len(sequence.content))
                return

    def draw_list(self, sequence):
        """What a driver hands over: all it wrote, less, or rejected tokens behind it."""
        tokens = sequence.tokens[: sequence.valid]
        kind = self.draw(0, 3)
        if kind == 0:
            return tokens[: self.draw(0, len(tokens))]
        return tokens + self.draw_tokens(0 if kind == 1 else self.draw(1, 2 * MAX_WINDOW))

    def checkpoint(self):
        if self.model.sequences:
            request_id = int(self.rng.choice(list(self.model.sequences)))
            sequence = self.model.sequences[request_id]
            tokens = self.draw_list(sequence)
            new = self.pool.checkpoint_request(request_id, tokens)
            assert new == self.model.checkpoint(sequence, tokens)

    def finish(self):
        if self.model.sequences:
            request_id = int(self.rng.choice(list(self.model.sequences)))
            tokens = self.draw_list(self.model.sequences[request_id])
            new = self.pool.finish_request(request_id, tokens)
            assert new == self.model.finish(request_id, tokens)
            self.follow()

    # ---- comparing

    def table_of(self, table):
        indptr = table.indptr.tolist()
        assert indptr == table.indptr_host.tolist()
        assert table.last_page_len.tolist() == table.last_page_len_host.tolist()
        indices = table.indices[: indptr[-1]].tolist()
        return indptr, indices, table.last_page_len.tolist(), table.block_table().tolist()

    def compare(self, ids, step, lengths, bucket):
        """A step's table for these lengths, then everything else."""
        table = step.page_table(lengths)
        assert table.is_fixed is (bucket is not None)
        assert self.table_of(table) == self.model.table(ids, lengths, bucket)
        assert table.lengths_host.tolist()[: len(ids)] == lengths
        self.compare_all()

    def compare_rows(self):
        for request_id, sequence in self.model.sequences.items():
            info = self.pool.request(request_id)
            assert info.page_ids.tolist() == sequence.pages
            assert (info.valid_len, info.shared_len) == (sequence.valid, sequence.shared)

    def compare_reads(self):
        if self.reader is None:
            return
        rows = list(self.model.sequences.values())
        longest = max(row.capacity for row in rows)
        expected, known = keys_of(rows, longest)
        for layer in range(LAYERS):
            k, v = self.reader.get(layer, longest, padded=True)
            assert np.array_equal(k[known], k_rows(expected[layer], HEAD_DIM)[known])
            assert np.array_equal(v, -k)

    def compare_all(self):
        self.compare_rows()
        self.compare_reads()
        stats = self.pool.stats()
        names = ("pages_free", "pages_private", "pages_tree")
        assert tuple(stats[name] for name in names) == self.model.counts()
        assert tree_of(self.pool.radix, self.page_size) == self.model.tree
        self.pool.check()
        self.operations += 1
