"""What several tests of the example use: texts, and a stub model."""

import json
from types import SimpleNamespace

import numpy as np

from kvpool import KVCachePool

# A prompt of 200 tokens with names, digits, punctuation and two scripts.
TEXT = """The old harbour of Trieste was built between 1868 and 1887. Its warehouses stood empty
for 40 years, until someone counted the windows: 3,072 of them, most of them broken. "Und jetzt?"
asked the mayor. The engineer shrugged, and wrote on the wall: E = mc^2, naïve café, 42 % of 7.
Nobody has painted over it since; the children who came to see it learned to read there. On
Sundays a boat brings people from across the bay, and they buy coffee, and lemons, and bread.
The ferry costs 2.50, dogs travel free, and the last one leaves at 19:45, unless there is fog."""
SHORT_SYSTEM = (
    "You are the assistant of a small library. Answer in one short sentence. "
    "The library is open from Monday to Friday. The chess club meets on Friday at 5 pm. "
    "Books are lent for three weeks. The reading room is quiet. Children pay no late fees."
)
# "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is the capital of France?..."
CAPITAL_TOKENS = json.loads(
    "[1, 9690, 198, 6077, 5453, 30, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, "
    "4649, 47, 2, 198, 1, 520, 9531, 198]"
)


class StubModel:
    """A model whose next token is a checksum of the whole sequence, read back from the pool."""

    VOCAB = 97

    def __init__(self, context_len=10_000):
        self.config = SimpleNamespace(context_len=context_len)
        self.largest_batch = 0

    def forward(self, pool, step, tokens, start_pos, qo_indptr):
        lengths = np.asarray(start_pos) + np.diff(qo_indptr)
        k = np.asarray(tokens, dtype=np.float32).reshape(-1, 1, 1)
        slots = step.window_slot_indices(list(start_pos), np.diff(qo_indptr).tolist())
        step.put(0, start_pos, k, -k, qo_indptr=qo_indptr, slots=slots)
        keys, values = step.get(0, int(lengths.max()), padded=True)
        np.testing.assert_array_equal(keys, -values)
        self.largest_batch = max(self.largest_batch, len(lengths))
        logits = np.zeros((len(lengths), self.VOCAB), dtype=np.float32)
        for row, length in enumerate(lengths):
            logits[row, checksum(keys[row, :length, 0, 0])] = 1.0
        return logits


def checksum(tokens):
    return int((np.asarray(tokens) * (1 + np.arange(len(tokens)) % 31)).sum()) % StubModel.VOCAB


def small_pool(num_pages, page_size=4):
    return KVCachePool(1, num_pages * page_size, 1, 1, page_size=page_size, max_batch_size=8)
