"""Request traces: which tokens each request has, and in which order requests begin and end.

A trace is a file of JSON lines, as Mooncake released them: `input_length`, `output_length`, and
`hash_ids`, one for each block of 512 prompt tokens (the last may be partial). Equal ids are equal
blocks after equal prefixes. A hash id becomes 512 token ids drawn from a generator seeded by it;
the output of request `i` is drawn from one seeded by ``(7, i)``.
"""

import json
import mmap
import os
from collections import deque
from pathlib import Path

import numpy as np

BLOCK = 512  # tokens of one hash id
VOCABULARY = 128_256
SOURCE = "https://github.com/kvcache-ai/Mooncake, folder FAST25-release/traces (Apache-2.0)"
FOLDER_VARIABLE = "KVPOOL_TRACES"
MADE_UP = "made-up"
BIND, FINISH = 0, 1


class Trace:
    """Requests in order of arrival. Token blocks lie in memory that forked processes share.

    Parameters
    ----------
    name : str
        What tables call it.
    requests : iterable of (int, int, list of int)
        Prompt tokens, output tokens and hash ids of each request.
    """

    def __init__(self, name, requests):
        requests = list(requests)
        self.name = name
        self.prompt_lens = np.array([prompt for prompt, _, _ in requests], np.int64)
        self.output_lens = np.array([output for _, output, _ in requests], np.int64)
        num_ids = [len(ids) for _, _, ids in requests]
        self._ends = np.cumsum([0, *num_ids])
        flat = np.concatenate([np.asarray(ids, np.int64) for _, _, ids in requests])
        names, self._blocks_of = np.unique(flat, return_inverse=True)
        if (np.multiply(num_ids, BLOCK) < self.prompt_lens).any():
            raise ValueError(f"trace {name}: a request has fewer hash ids than its prompt needs")
        # Not written after the fork, so no contender's memory counts it.
        memory = mmap.mmap(-1, max(1, len(names)) * BLOCK * 4)
        self._blocks = np.frombuffer(memory, np.int32).reshape(-1, BLOCK)
        for block, seed in zip(self._blocks, names, strict=True):
            block[:] = np.random.default_rng(seed).integers(0, VOCABULARY, BLOCK, dtype=np.int32)

    def __len__(self):
        return len(self.prompt_lens)

    @property
    def lengths(self):
        """Prompt and output tokens of each request."""
        return self.prompt_lens + self.output_lens

    def tokens(self, i):
        """Prompt and output of request `i`, joined: int32 ``[lengths[i]]``."""
        blocks = self._blocks_of[self._ends[i] : self._ends[i + 1]]
        prompt = self._blocks[blocks].reshape(-1)[: self.prompt_lens[i]]
        output = np.random.default_rng((7, i)).integers(
            0, VOCABULARY, self.output_lens[i], dtype=np.int32
        )
        return np.concatenate([prompt, output])


def read_trace(path, limit=None):
    """The trace in a file, or `MADE_UP`; only its first `limit` requests."""
    if str(path) == MADE_UP:
        return Trace(MADE_UP, made_up_requests(limit or 2_000))
    requests = []
    with open(path) as file:
        for line in file:
            if limit is not None and len(requests) == limit:
                break
            fields = json.loads(line)
            lengths = fields["input_length"], fields["output_length"]
            requests.append((*lengths, fields["hash_ids"]))
    return Trace(Path(path).stem.removeprefix("mooncake_").removesuffix("_trace"), requests)


def find_trace(name):
    """The file of a trace by its name (`conversation`, `synthetic`) or its path."""
    if name == MADE_UP or os.path.isfile(name):
        return name
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        raise FileNotFoundError(
            f"no trace {name!r}: set {FOLDER_VARIABLE} to a folder with {name}_trace.jsonl, or "
            f"give a file, or --trace {MADE_UP}; the traces are at {SOURCE}"
        )
    for file in (f"{name}_trace.jsonl", f"mooncake_{name}.jsonl", f"{name}.jsonl"):
        if os.path.isfile(os.path.join(folder, file)):
            return os.path.join(folder, file)
    raise FileNotFoundError(
        f"no {name}_trace.jsonl in the folder of {FOLDER_VARIABLE}; get it from {SOURCE}"
    )


def made_up_requests(num_requests, seed=0):
    """Chats: a few shared system prompts, then turns that each repeat all the turns before."""
    rng = np.random.default_rng(seed)
    chats, next_id = [], 100
    for _ in range(num_requests):
        if not chats or rng.random() < 0.5:
            chats.append(list(range(rng.integers(0, 4) * 4, rng.integers(0, 4) * 4 + 4)))
        chat = chats[-1 - min(int(rng.geometric(0.05)) - 1, len(chats) - 1)]
        num_new = int(rng.integers(1, 6))
        chat.extend(range(next_id, next_id + num_new))
        next_id += num_new
        cut = int(rng.integers(0, BLOCK))  # of the last block
        yield len(chat) * BLOCK - cut, int(rng.integers(1, 600)), list(chat)


def order_of_events(lengths, *, window, capacity, page_size):
    """``[(BIND or FINISH, request)]`` int32: at most `window` in flight, the oldest ends first.

    A request begins when all in flight fit into `capacity` with it, two pages to spare each, so
    that no contender is ever short. One that never fits is left out.
    """
    events, in_flight, reserved = [], deque(), 0
    for i, length in enumerate(lengths):
        need = int(length) + 2 * page_size
        if need > capacity:
            continue
        while in_flight and (len(in_flight) >= window or reserved + need > capacity):
            oldest, held = in_flight.popleft()
            reserved -= held
            events.append((FINISH, oldest))
        in_flight.append((i, need))
        reserved += need
        events.append((BIND, i))
        if window == 1:
            in_flight.pop()
            reserved = 0
            events.append((FINISH, i))
    events.extend((FINISH, i) for i, _ in in_flight)
    return np.array(events, np.int32).reshape(-1, 2)
