"""The first answer of a process with SmolLM2: on its own, and after another one left its pages.

Each process has a pool of its own over a `FileTier` of one directory. The first one computes the
prompt and writes its pages to the directory, the second one fetches them.
"""

import multiprocessing
import tempfile

import torch
import transformers

from bench.transformers_families import MS, Marks
from examples.smollm2 import weights
from kvpool import KVCacheLayout, KVCachePool
from kvpool.interop.transformers import generate
from kvpool.tiers import FileTier

TIER_BYTES, TIMEOUT_S, PAGE_SIZE = 1 << 30, 60.0, 16


def load_model():
    path = weights.find_gguf()
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


def answer(directory, prompt, num_new_tokens, send):
    """In a process of its own: the first prompt that it is given, and what is in the way."""
    torch.set_num_threads(1)
    model = load_model()
    layout = KVCacheLayout.from_config(model.config)
    tier = FileTier(directory, TIER_BYTES)
    with KVCachePool(
        layout.num_layers, 4096, layout.num_kv_heads, layout.head_dim, page_size=PAGE_SIZE
    ) as pool:
        pool.warm_up()
        tiers = pool.attach_tiers([tier], model="SmolLM2-135M")
        ids = torch.tensor([prompt])
        # Another prompt first, of which nobody else has anything: torch and the pages warm up.
        warm_up = torch.arange(len(prompt))[None] % 1000 + 1000
        generate(model, pool, warm_up, extra_key="warm-up", max_new_tokens=2)
        before = pool.stats()["prefix_match_tokens"]
        marks = Marks()
        found = generate(
            model,
            pool,
            ids,
            torch.ones_like(ids),
            streamer=marks,
            prefetch_timeout_s=TIMEOUT_S,
            max_new_tokens=num_new_tokens,
            do_sample=False,
        )
        matched = pool.stats()["prefix_match_tokens"] - before
        tiers.flush(TIMEOUT_S)
        tiers.close()
        pool.check()
    tier.close()
    send.send((marks.first_token_seconds, matched, found.tolist()))
    send.close()


def ask_process(*arguments):
    """What `answer` sends from a process of its own."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=answer, args=(*arguments, send))
    child.start()
    send.close()  # so that a child that fails is an EOFError
    try:
        return receive.recv()
    finally:
        child.join(TIMEOUT_S)
        if child.is_alive():
            child.kill()


def measure(prompt, num_new_tokens, expected):
    """Seconds to the first token of two processes, and whether both gave the tokens `expected`."""
    with tempfile.TemporaryDirectory() as directory:
        cold, warm = (ask_process(directory, prompt, num_new_tokens) for _ in range(2))
    return {
        "prompt_tokens": len(prompt),
        "matched_tokens": {"first": cold[1], "second": warm[1]},
        "first_token_seconds": {"first": cold[0], "second": warm[0]},
        "same_tokens": cold[2] == warm[2] == expected,
    }


def table(row):
    """The result in Markdown."""
    lines = [
        "| process | prompt | from the tier | first token | of the first | same tokens |",
        "| --- |" + " ---: |" * 4 + " :---: |",
    ]
    first = row["first_token_seconds"]["first"]
    for name, seconds in row["first_token_seconds"].items():
        cells = (
            name,
            row["prompt_tokens"],
            row["matched_tokens"][name],
            f"{seconds * MS:.1f}",
            f"{seconds / first:.2f}",
            "yes" if row["same_tokens"] else "no",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
