"""Memory of token runs: a tree with a slab answers as one on malloc does, and stays sound."""

import numpy as np
import pytest

from kvpool import KVCachePool, RadixCache


def prompts(rng, page_size, alphabet=2, max_pages=12):
    """Sequences of few words, so that they part and split at every depth."""
    while True:
        words = rng.integers(0, alphabet, rng.integers(1, max_pages + 1))
        yield np.repeat(words, page_size).astype(np.int32)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("slab_pages", [4, 64, 1000])  # far too small, too small, enough
def test_slab_answers_as_malloc_does(page_size, slab_pages):
    rng = np.random.default_rng(slab_pages + page_size)
    slab, twin = RadixCache(page_size, num_pages=slab_pages), RadixCache(page_size)
    next_page = 0
    source = prompts(rng, page_size, alphabet=4)
    for _ in range(600):
        if rng.random() < 0.6:
            tokens = next(source)
            num_pages = len(tokens) // page_size
            pages = np.arange(next_page, next_page + num_pages, dtype=np.int32)
            next_page += num_pages
            found = [tree.insert(tokens, pages).prefix_len for tree in (slab, twin)]
            assert found[0] == found[1]
        elif rng.random() < 0.5:
            tokens = next(source)
            found = [tree.match_prefix(tokens).pages.tolist() for tree in (slab, twin)]
            assert found[0] == found[1]
        else:
            count = int(rng.integers(1, 20)) * page_size
            found = [tree.evict(count).tolist() for tree in (slab, twin)]
            assert found[0] == found[1]
        slab.check()
    assert slab.format_tree() == twin.format_tree()
    for tree in (slab, twin):
        tree.evict(tree.total_size)
        tree.check()
        assert tree.memory()["runs_in_use_bytes"] == 0


def test_pool_keeps_its_tokens_in_slabs():
    pool = KVCachePool(1, 4096, 1, 1, page_size=16)
    rng = np.random.default_rng(0)
    made = pool.radix.memory()
    assert made["slab_bytes"] >= 4 * 4096
    for _ in range(300):
        prompt = rng.integers(0, 5, rng.integers(1, 900)).astype(np.int32)
        request = pool.bind_request(prompt, len(prompt) + 40)
        pool.mark_written(request, len(prompt) + 40)
        answer = np.concatenate([prompt, rng.integers(0, 5, 40).astype(np.int32)])
        pool.finish_request(request, answer)
        pool.check()
    memory = pool.radix.memory()
    # Long requests and a small slab leave gaps; siblings make up for them, and no more than once.
    assert made["slab_bytes"] <= memory["slab_bytes"] <= 2 * made["slab_bytes"]
    assert memory["outside_bytes"] < 4 * 940
    # A full pool holds its tokens, and their page ids, once.
    tokens = pool.radix.total_size
    assert tokens > 3000
    most = 1.25 * 4 * tokens * (1 + 1 / 16) + 64 * pool.radix.num_nodes
    assert memory["runs_in_use_bytes"] < most
    pool.reset_prefix_cache()
    # The page ids of the last request, which the pool's active step still names: 59 at most.
    assert pool.radix.memory()["runs_in_use_bytes"] <= 4 * 60 + 2 * 16


def test_memory_of_ended_requests_comes_back_while_a_step_still_stands():
    pool = KVCachePool(1, 1024, 1, 1, page_size=16)
    requests = [pool.bind_request(range(i, i + 100), 200) for i in range(4)]
    step = pool.activate_step(*requests)
    in_use = pool.radix.memory()["runs_in_use_bytes"]
    for request in requests:
        pool.unbind_request(request)
    # The page ids stay with the leases that the step holds; the tokens do not.
    assert pool.radix.memory()["runs_in_use_bytes"] < in_use - 4 * 4 * 100
    assert not step.is_alive
    pool.check()


def test_finish_gives_the_tree_what_bind_has_copied():
    """Prompt, answer and a tail that fills no page: all of it is found again."""
    pool = KVCachePool(1, 1024, 1, 1, page_size=16)
    prompt, answer = np.arange(100, dtype=np.int32), np.arange(100, 170, dtype=np.int32)
    request = pool.bind_request(prompt, 200)
    pool.mark_written(request, 170)
    sequence = np.concatenate([prompt, answer])
    assert pool.finish_request(request, sequence) == 160
    sequence[:] = 7  # the caller's memory is the caller's
    again = pool.bind_request(np.arange(171, dtype=np.int32), 200)
    assert pool.matched_prefix_len(again) == 160
    pool.check()
