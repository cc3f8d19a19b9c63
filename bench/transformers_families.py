"""Small random models of three families by `model.generate`: the same tokens, and how soon.

Each is asked greedily, by sampling, as a padded batch and by beams, of prompts that the pool does
not know, and then again. Timed is the first token of a prompt of which the pool has all but the
last words, beside `generate` as it is called by default.
"""

import statistics
import time
from itertools import pairwise

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from kvpool import KVCacheLayout, KVCachePool
from kvpool.interop.transformers import generate

SIZES = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,  # so that the logits of random weights are far from ties
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOWS = {"sliding_window": 64, "layer_types": ["sliding_attention"] * 7 + ["full_attention"]}
FAMILIES = {
    "Llama": ("LlamaConfig", {}),
    "Qwen 3": ("Qwen3Config", {}),
    "Gemma 3, 7 of 8 layers with windows": ("Gemma3TextConfig", WINDOWS),
}
PROMPT_LEN, NEW_LEN, PAGE_SIZE = 400, 20, 16
MS = 1e3


class Marks(BaseStreamer):
    """The moments at which tokens came, in seconds of the processor."""

    def __init__(self):
        self.start = time.process_time()
        self.moments = []

    def put(self, value):
        self.moments.append(time.process_time())

    def end(self):
        """Nothing to do."""

    @property
    def first_token_seconds(self):
        return self.moments[1] - self.start  # the first one is the prompt's

    @property
    def step_seconds(self):
        return statistics.median(b - a for a, b in pairwise(self.moments[1:]))


def random_model(kind, options):
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SIZES, **options)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def questions():
    """way -> ids, mask, options of `generate`."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(1, SIZES["vocab_size"], (3, PROMPT_LEN), generator=draw)
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 40, 150)):
        ids[row, :pad], mask[row, :pad] = 0, 0
    one, ones = ids[:1, :200], mask[:1, :200]
    return {
        "greedy": (one, ones, {}),
        "sampled": (one, ones, {"do_sample": True, "num_return_sequences": 3}),
        "padded": (ids, mask, {}),
        "beams": (one, ones, {"num_beams": 4, "num_return_sequences": 2}),
    }


def same_tokens(model, pool):
    """way -> whether all tokens were those of transformers' own cache, cold and warm."""
    found = {}
    for way, (ids, mask, options) in questions().items():
        options = {"max_new_tokens": NEW_LEN, "do_sample": False, **options}
        torch.manual_seed(2)
        expected = model.generate(ids, attention_mask=mask, **options)
        pool.reset_prefix_cache()
        answers = []
        for _ in range(2):
            torch.manual_seed(2)
            answers.append(generate(model, pool, ids, mask, **options))
        found[way] = all(torch.equal(answer, expected) for answer in answers)
    return found


def times(model, pool, num_rounds):
    """Seconds to the first token and of a decode step, the best of the rounds, by contender."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(1, SIZES["vocab_size"], (1, PROMPT_LEN), generator=draw)
    mask, known = torch.ones_like(ids), PROMPT_LEN - 20
    options = {"max_new_tokens": NEW_LEN, "do_sample": False}
    best = {}
    for number in range(num_rounds + 1):
        pool.reset_prefix_cache()
        generate(model, pool, ids[:, :known], mask[:, :known], max_new_tokens=1)
        before = pool.stats()["prefix_match_tokens"]
        for name in ("fresh", "pool"):
            marks = Marks()
            if name == "fresh":
                model.generate(ids, attention_mask=mask, streamer=marks, **options)
            else:
                generate(model, pool, ids, mask, streamer=marks, **options)
            if number == 0:  # kernels are compiled, pages touched
                continue
            for what in ("first_token_seconds", "step_seconds"):
                seconds = getattr(marks, what)
                now = best.setdefault(what, {})
                now[name] = min(seconds, now.get(name, seconds))
        matched = pool.stats()["prefix_match_tokens"] - before
    return {"prompt_tokens": PROMPT_LEN, "matched_tokens": matched, **best}


def measure(num_rounds):
    """Rows of the result, one a family."""
    rows = []
    for family, (kind, options) in FAMILIES.items():
        model = random_model(kind, options)
        layout = KVCacheLayout.from_config(model.config)
        with KVCachePool(
            layout.num_layers, 8192, layout.num_kv_heads, layout.head_dim, page_size=PAGE_SIZE
        ) as pool:
            pool.warm_up()
            row = {"family": family, "same_tokens": same_tokens(model, pool)}
            rows.append(row | times(model, pool, num_rounds))
            pool.check()
    return rows


def table(rows):
    """The rows in Markdown."""
    ways = [*questions()]
    lines = [
        f"| family | same tokens: {' | '.join(ways)} | prompt | matched | first token: fresh "
        "| pool | of fresh | step: fresh | pool | of fresh |",
        "| --- |" + " :---: |" * len(ways) + " ---: |" * 8,
    ]
    for row in rows:
        cells = [row["family"], *("yes" if row["same_tokens"][way] else "no" for way in ways)]
        cells += [row["prompt_tokens"], row["matched_tokens"]]
        for what in ("first_token_seconds", "step_seconds"):
            seconds = row[what]
            cells += [f"{seconds[name] * MS:.1f}" for name in ("fresh", "pool")]
            cells.append(f"{seconds['pool'] / seconds['fresh']:.2f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
