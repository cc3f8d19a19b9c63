"""A decoder of a few lines with a draft head, over three pools: small enough to be done by hand.

K and V of a token are prints of the whole history up to it, so a wrong page holds wrong numbers.
The next token is a hash of what the decoder *reads back* through the page table, so that wrong
pages give wrong tokens. The draft head reads K and V of its own, and guesses right about two times
out of three.
"""

import zlib
from dataclasses import dataclass, field

import numpy as np

from kvpool import KVCacheLayout, KVCachePool
from tests.oracles.prints import HEAD_DIM, k_prints

MAIN_LAYERS, VOCABULARY = 3, 50


def history_rows(tokens, start, end, layer):
    """K `[end - start, 1, HEAD_DIM]` of positions `[start, end)` of this history.

    Whole numbers 1 .. 16, which every storage dtype holds exactly, float8_e4m3fn too.
    """
    prints = k_prints(tokens[:end], None, layer + 1)[layer, start:].astype(np.int64)
    digits = prints[:, None] >> 4 * np.arange(HEAD_DIM) & 15
    return (1 + digits[:, None]).astype(np.float32)


def gather(pool, table, row, layer, length):
    """K and V `[length, 1, HEAD_DIM]` of one row of a page table, as an attention kernel walks."""
    pages = table.indices[table.indptr[row] : table.indptr[row + 1]].astype(np.int64)
    slots = (pages[:, None] * pool.page_size + np.arange(pool.page_size)).ravel()[:length]
    assert len(slots) == length, "the page table ends before the window does"
    return pool.key_layer(layer)[slots], pool.value_layer(layer)[slots]


def hash_of(*arrays):
    found = 0
    for array in arrays:
        found = zlib.crc32(np.ascontiguousarray(array).tobytes(), found)
    return found


def guess(*history):
    """What the draft head says after this K and V."""
    return hash_of(*history) % VOCABULARY


def truth(layers):
    """What the main model says: mostly the draft's guess, which layer 0 gives away."""
    everything = hash_of(*(array for pair in layers for array in pair))
    likely = guess(*layers[0])
    return likely if everything % 3 else (likely + 1) % VOCABULARY


@dataclass
class Pools:
    """The main pool, the draft head's history of every request, and its window of one round."""

    main: KVCachePool
    history: KVCachePool
    round: KVCachePool

    @classmethod
    def of(cls, make_pool, page_size, dtype, *, batch_size, capacity, window):
        num_slots = batch_size * -(-capacity // page_size) * page_size
        sizes = {"page_size": page_size, "dtype": dtype}
        main = make_pool(MAIN_LAYERS, num_slots, 1, HEAD_DIM, **sizes)
        layout = KVCacheLayout(1, 1, HEAD_DIM, max_batch_size=batch_size, max_seq_len=window)
        history = KVCachePool.for_mtp_history(layout, "cpu", dtype, page_size, main.num_slots)
        own = KVCachePool.for_mtp(layout, "cpu", dtype, page_size)
        return cls(main, make_pool.keep(history), make_pool.keep(own))


@dataclass
class Row:
    """One request: tokens known so far; all but the last have K and V in the pools."""

    tokens: list
    prompt_len: int
    request_id: int = 0
    history_id: int = 0
    guesses: list = field(default_factory=list)  # of the present round
    accepted: int = 0
    proposed: int = 0

    @property
    def written(self):
        return len(self.tokens) - 1


class Decoder:
    """Runs requests over the pools, with windows of one token or with drafts.

    `write` and `table` of the main pool are hooks: the test of captured graphs replaces them.
    """

    def __init__(self, pools, prompts, capacity):
        self.pools = pools
        self.rows = []
        for prompt in prompts:
            row = Row([*prompt], len(prompt))
            row.request_id = pools.main.bind_request(prompt, capacity)
            row.history_id = pools.history.bind_request(prompt, capacity)
            self.prefill(row)
            self.rows.append(row)

    # ---- forward passes of the main model

    def prefill(self, row):
        main, end = self.pools.main, row.prompt_len
        start = main.matched_prefix_len(row.request_id)
        step = main.activate_step(row.request_id)
        for layer in range(MAIN_LAYERS):
            k = history_rows(row.tokens, start, end, layer)[None]
            step.put(layer, start, k, -k)
        table = step.page_table(end)
        row.tokens.append(truth([gather(main, table, 0, n, end) for n in range(MAIN_LAYERS)]))
        self.remember(row, 0)

    def forward(self, step, window):
        """Write `window` tokens of each row; the true next token after each, per row."""
        starts = [row.written for row in self.rows]
        histories = [row.tokens + row.guesses for row in self.rows]
        table = self.prepare(step, starts, window)
        for layer in range(MAIN_LAYERS):
            k = np.stack(
                [
                    history_rows(tokens, start, start + window, layer)
                    for tokens, start in zip(histories, starts, strict=True)
                ]
            )
            self.write(step, layer, starts, k)
        return [
            [
                truth([gather(self.pools.main, table, i, n, end) for n in range(MAIN_LAYERS)])
                for end in range(start + 1, start + window + 1)
            ]
            for i, start in enumerate(starts)
        ]

    def prepare(self, step, starts, window):
        self.slots = step.window_slot_indices(starts, window)
        return step.page_table([start + window for start in starts])

    def write(self, step, layer, starts, k):
        step.put(layer, starts, k, -k, slots=self.slots)

    # ---- the draft head

    def remember(self, row, start):
        """Bring the draft's history up to what the main pool holds."""
        end = row.written
        step = self.pools.history.activate_step(row.history_id)
        k = history_rows(row.tokens, start, end, 0)[None]
        step.put(0, start, k, -k)

    def draft(self, window):
        """`window - 1` guesses a row, one after the other, over history and round window."""
        history, own = self.pools.history, self.pools.round
        own.bind_requests(len(self.rows), window)
        for row in self.rows:
            row.guesses = []
        past = history.activate_step(*(row.history_id for row in self.rows))
        lengths = [row.written for row in self.rows]
        past_table = past.page_table(lengths)
        for j in range(window - 1):
            now = own.step
            k = np.stack(
                [
                    history_rows(row.tokens + row.guesses, n + j, n + j + 1, 0)
                    for row, n in zip(self.rows, lengths, strict=True)
                ]
            )
            now.put(0, j, k, -k)
            table = now.page_table(j + 1)
            for i, (row, n) in enumerate(zip(self.rows, lengths, strict=True)):
                sides = zip(
                    gather(history, past_table, i, 0, n),
                    gather(own, table, i, 0, j + 1),
                    strict=True,
                )
                row.guesses.append(guess(*(np.concatenate(side) for side in sides)))

    # ---- rounds

    def step(self):
        """One token a row, no speculation."""
        step = self.pools.main.activate_step(*(row.request_id for row in self.rows))
        for row in self.rows:
            row.guesses = []
        for row, (token,) in zip(self.rows, self.forward(step, 1), strict=True):
            row.tokens.append(token)

    def round(self, window):
        """Draft, verify, accept the longest right run of each row, take the rest back."""
        self.draft(window)
        step = self.pools.main.activate_step(*(row.request_id for row in self.rows))
        starts = [row.written for row in self.rows]
        with step.verify_window():
            found = self.forward(step, window)
        for row, tokens in zip(self.rows, found, strict=True):
            wrong = [a != b for a, b in zip(row.guesses, tokens, strict=False)]
            right = [*wrong, True].index(True)
            row.tokens += tokens[: right + 1]
            row.accepted += right
            row.proposed += window - 1
        sealed = [row.written for row in self.rows]
        step.truncate_to(sealed, [start + window for start in starts])
        for row, start in zip(self.rows, starts, strict=True):
            self.remember(row, start)

    def finish(self, num_tokens, rejected=()):
        """End all requests; their texts, `num_tokens` generated each."""
        texts = []
        for row in self.rows:
            self.pools.main.finish_request(row.request_id, [*row.tokens, *rejected])
            self.pools.history.unbind_request(row.history_id)
            texts.append(row.tokens[: row.prompt_len + num_tokens])
        return texts
