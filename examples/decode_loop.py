"""The loop to copy into an engine: grow, admit, run one step, take tokens, finish.

There is no model: random numbers stand in for q, k, v and sampled tokens. On a GPU it runs as
``python examples/decode_loop.py cuda``. docs/engine.md explains each part, and what comes next.
"""

import sys

import numpy as np

from kvpool import KVCacheExhaustedError, KVCachePool
from kvpool.attention import PagedAttention

NUM_LAYERS, Q, KV, CHUNK_LEN, EOS = 2, (8, 64), (2, 64), 64, 0  # Q, KV: num_heads, head_dim
device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
pool = KVCachePool(NUM_LAYERS, 512, *KV, device=device, dtype="float16")
xp, rng = pool.array_namespace, np.random.default_rng(0)

# Prompts, in tokens, and what runs: request id -> prompt and answer so far.
waiting, running = [[*range(1, 101), *range(200, 200 + 30 * i)] for i in range(1, 6)], {}
while waiting or running:
    # Grow by what was sampled. Who is short of a page goes back to wait; its prefix stays cached.
    for request, tokens in [*running.items()]:
        try:
            pool.extend_request(request, len(tokens))
        except KVCacheExhaustedError:
            pool.finish_request(request, running.pop(request))
            waiting.insert(0, tokens)

    # Admit, in order. Who finds no pages waits until somebody finishes.
    while waiting:
        try:
            request = pool.bind_request(waiting[0], len(waiting[0]) + 1)
        except KVCacheExhaustedError as error:
            if error.can_ever_fit:
                break
            raise
        running[request] = waiting.pop(0)

    # What this step computes: a chunk of each prefill, one token of each decode.
    starts = np.array([pool.valid_len(request) for request in running])
    ends = np.minimum([len(tokens) for tokens in running.values()], starts + CHUNK_LEN)
    indptr = np.cumsum([0, *(ends - starts)])

    # Made once, for all layers: where to write, what to read.
    step = pool.activate_step([*running])
    slots = step.window_slot_indices(starts, ends - starts)
    attention = PagedAttention(pool, step.page_table(ends), qo_indptr=indptr)
    for layer in range(NUM_LAYERS):  # your model goes here
        q, k, v = (xp.asarray(rng.normal(size=(indptr[-1], *h)), xp.float16) for h in (Q, KV, KV))
        step.put(layer, starts, k, v, qo_indptr=indptr, slots=slots)
        out = attention.run(layer, q)

    # A row that is through its prompt gets a token.
    for (request, tokens), end in zip([*running.items()], ends, strict=True):
        if end == len(tokens):
            tokens.append(int(rng.integers(32)))
        if tokens[-1] == EOS:
            print(f"#{request}: {len(tokens)} tokens, {pool.matched_prefix_len(request)} reused")
            pool.finish_request(request, running.pop(request))
