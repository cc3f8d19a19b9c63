"""What several tests of the example use: texts, and a stub model."""

import json
from types import SimpleNamespace

import numpy as np

from examples.smollm2.model import Llama
from examples.smollm2.weights import LayerWeights, LlamaConfig, LlamaWeights
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
    """A model whose next token is a checksum of the whole sequence, read back from the pool.

    ``likely``: by how much the logit of that token beats all others.
    """

    VOCAB = 97

    def __init__(self, context_len=10_000, likely=1.0):
        self.config = SimpleNamespace(context_len=context_len)
        self.likely = likely
        self.passes = []  # (lengths of the windows, whether they were declared a verify window)

    @property
    def largest_batch(self):
        return max((len(windows) for windows, _ in self.passes), default=0)

    def next_token(self, tokens):
        return checksum(tokens)

    def forward(self, pool, step, tokens, start_pos, qo_indptr, *, logits_of=None):
        start_pos, windows = np.asarray(start_pos), np.diff(qo_indptr)
        k = np.asarray(tokens, dtype=np.float32).reshape(-1, 1, 1)
        slots = step.window_slot_indices(start_pos.tolist(), windows.tolist())
        step.put(0, start_pos, k, -k, qo_indptr=qo_indptr, slots=slots)
        keys, values = step.get(0, int((start_pos + windows).max()), padded=True)
        np.testing.assert_array_equal(keys, -values)
        self.passes.append((windows.tolist(), step.in_verify_window))
        logits_of = qo_indptr[1:] - 1 if logits_of is None else logits_of
        logits = np.zeros((len(logits_of), self.VOCAB), dtype=np.float32)
        for i, index in enumerate(logits_of):
            row = int(np.searchsorted(qo_indptr, index, side="right")) - 1
            length = start_pos[row] + index - qo_indptr[row] + 1
            seen = keys[row, :length, 0, 0].astype(int).tolist()
            logits[i, self.next_token(seen)] = self.likely
        return logits


class QuotingModel(StubModel):
    """Mostly the next token follows from the last two, as in a quote; now and then from all."""

    def next_token(self, tokens):
        whole = checksum(tokens)
        return whole if whole % 6 == 0 else 10 + (2 * tokens[-1] + sum(tokens[-2:-1])) % 5


class ScriptedModel(StubModel):
    """Says the tokens of a script, whose first stands behind the prompt."""

    def __init__(self, prompt_len, script, **options):
        super().__init__(**options)
        self.prompt_len, self.script = prompt_len, script

    def next_token(self, tokens):
        index = len(tokens) - self.prompt_len
        return self.script[index] if index < len(self.script) else 0


def tiny_llama(seed, context_len=256):
    """A Llama of two layers with random weights, so small that a pass takes a millisecond."""
    rng = np.random.default_rng(seed)
    config = LlamaConfig(
        num_layers=2,
        hidden_dim=24,
        ffn_dim=40,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=17,  # so few that runs of tokens come again
        context_len=context_len,
        rope_theta=1e4,
        rms_eps=1e-5,
    )

    def matrix(rows, columns):
        return rng.standard_normal((rows, columns), dtype=np.float32) * 2 / columns**0.5

    hidden, ffn, ones = 24, 40, np.ones(24, dtype=np.float32)
    layers = [
        LayerWeights(
            attn_norm=ones,
            qkv=matrix((4 + 2 + 2) * 8, hidden),
            attn_out=matrix(hidden, 4 * 8),
            ffn_norm=ones,
            gate_up=matrix(2 * ffn, hidden),
            down=matrix(hidden, ffn),
        )
        for _ in range(config.num_layers)
    ]
    embedding, output = matrix(config.vocab_size, hidden), matrix(config.vocab_size, hidden)
    return Llama(LlamaWeights(config, embedding, layers, ones, output))


def checksum(tokens):
    return int((np.asarray(tokens) * (1 + np.arange(len(tokens)) % 31)).sum()) % StubModel.VOCAB


def small_pool(num_pages, page_size=4):
    return KVCachePool(1, num_pages * page_size, 1, 1, page_size=page_size, max_batch_size=8)
