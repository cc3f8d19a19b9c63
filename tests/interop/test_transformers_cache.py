"""What transformers calls of a `PoolCache`, beside its own cache as the slow twin."""

import copy
import pickle
import random
from contextlib import suppress

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import DynamicCache

from kvpool import KVCacheStateError
from kvpool.interop.transformers import PoolCache, generate
from tests.helpers.hf_models import (
    PAGE,
    VOCABULARY,
    forward,
    generated,
    pool_for,
    random_ids,
)

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("no_gradients")]


def assert_same_content(found, expected):
    for mine, theirs in zip(found.layers, expected.layers, strict=True):
        assert mine.get_seq_length() == theirs.get_seq_length()
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)


# ---- beside transformers' own cache


@pytest.mark.parametrize("seed", range(12))
def test_episode_of_forwards_and_reorderings_has_the_same_content(make_pool, model, seed):
    """Nothing is matched, so K and V are equal to the last bit."""
    page_size = random.Random(seed).choice([1, 3, 4])
    pool = pool_for(make_pool, model, num_slots=1200, page_size=page_size)
    rng = random.Random(seed)
    ids = random_ids(2, 7, seed)
    mask = torch.ones_like(ids)
    pad = rng.choice([0, 3])
    ids[1, :pad], mask[1, :pad] = 0, 0
    with PoolCache(model, pool, ids, mask) as cache:
        twin = DynamicCache(config=model.config)

        def step(new):
            found, expected = (forward(model, new, each, mask) for each in (cache, twin))
            assert torch.allclose(found, expected, atol=1e-4)

        step(ids)
        for layer in twin.layers:  # K and V of padding are not kept
            layer.keys[1, :, :pad], layer.values[1, :, :pad] = 0, 0
        for _ in range(25):
            rows = len(mask)
            verb = rng.choice(["step", "step", "reorder", "crop", "repeat", "select"])
            if verb == "step":
                count = rng.choice([1, 1, 3])
                mask = torch.cat([mask, mask.new_ones(rows, count)], dim=1)
                step(torch.randint(1, VOCABULARY, (rows, count)))
            elif verb == "crop":
                count = min(rng.choice([0, 1, 2]), cache.get_seq_length() - 7)
                # Reordered rows share whole pages, which are read-only.
                shared = max(pool.request(i).shared_len for i in cache.request_ids)
                if shared > cache.get_seq_length() - count - pad:
                    continue
                cache.crop(-count)
                twin.crop(-count)
                mask = mask[:, : mask.shape[1] - count]
            else:
                if verb == "repeat":
                    if rows > 3:
                        continue
                    cache.batch_repeat_interleave(2)
                    twin.batch_repeat_interleave(2)
                    order = torch.arange(rows).repeat_interleave(2)
                elif verb == "select":
                    order = torch.tensor(sorted(rng.sample(range(rows), max(rows - 1, 1))))
                    cache.batch_select_indices(order)
                    twin.batch_select_indices(order)
                else:
                    order = torch.tensor([rng.randrange(rows) for _ in range(rows)])
                    cache.reorder_cache(order)
                    twin.reorder_cache(order)
                mask = mask[order]
            assert_same_content(cache, twin)
            pool.check()
    assert pool.bound_request_count == 0


def test_select_takes_a_mask_of_rows(model, pool):
    ids = random_ids(3, 6)
    with PoolCache(model, pool, ids) as cache:
        forward(model, ids, cache)
        kept = cache.request_ids[::2]
        cache.batch_select_indices(torch.tensor([True, False, True]))
        assert cache.request_ids == kept
        with pytest.raises(ValueError, match=r"rows must be in 0 \.\. 1, got"):
            cache.batch_select_indices(torch.tensor([2]))


def test_flags_and_lengths(model, pool):
    ids = random_ids(2, 9)
    with PoolCache(model, pool, ids) as cache:
        assert (cache.is_compileable, cache.is_initialized, cache.is_croppable) == (
            False,
            False,
            True,
        )
        assert len(cache) == 2
        assert cache.is_sliding == cache.is_linear == [False, False]
        forward(model, ids, cache)
        assert cache.is_initialized
        assert cache.get_seq_length() == cache.get_seq_length(1) == 9
        assert cache.get_mask_sizes(3, 0) == (12, 0)
        assert cache.get_max_length() == -1
        assert cache.batch_size == 2
        assert repr(cache) == "PoolCache(rows=2, columns=9)"
    assert repr(cache) == "PoolCache(closed, columns=9)"


def test_reset_binds_the_prompts_again(model, pool):
    ids = random_ids(1, 9)
    with PoolCache(model, pool, ids) as cache:
        expected = forward(model, ids, cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(forward(model, ids, cache), expected)
    with pytest.raises(KVCacheStateError, match="the cache is closed"):
        cache.reset()


def test_what_a_pool_cannot_do_is_refused(model, pool):
    ids = random_ids(1, 9)
    with PoolCache(model, pool, ids) as cache:
        forward(model, ids, cache)
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="a PoolCache is not copied"):
                copied(cache)
        for moved in (cache.offload, cache.prefetch):
            with pytest.raises(NotImplementedError, match="pages stay on the device"):
                moved(0)
        with pytest.raises(ValueError, match="minus the number of tokens to take back, got 3"):
            cache.crop(3)
        with pytest.raises(ValueError, match="takes back 1 of 9 columns, of which 9"):
            cache.crop(-1)
        with pytest.raises(ValueError, match="repeats must be at least 1"):
            cache.batch_repeat_interleave(0)


# ---- the end of a cache


def test_block_that_fails_inserts_nothing(model, pool):
    ids = random_ids(1, 9)
    with suppress(ZeroDivisionError), PoolCache(model, pool, ids) as cache:
        forward(model, ids, cache)
        1 / 0  # noqa: B018
    assert pool.bound_request_count == 0
    assert pool.stats()["pages_tree"] == 0
    with pytest.raises(KVCacheStateError, match="the cache is closed"):
        forward(model, ids, cache)
    assert cache.finish() == 0
    cache.close()


def test_finish_leaves_no_hook_and_tells_what_is_new(model, pool):
    ids = random_ids(1, 9)
    decoder = model.get_decoder()
    cache = PoolCache(model, pool, ids)
    generated(model, cache, ids)
    assert len(decoder._forward_pre_hooks) == 1
    assert cache.finish() == 16  # 9 + 8 - 1 tokens have K and V
    assert len(decoder._forward_pre_hooks) == 0
    assert cache.request_ids == []
    for name in ("keys", "values"):
        with pytest.raises(KVCacheStateError, match="the cache is closed"):
            getattr(cache.layers[0], name)


def test_rows_are_inserted_up_to_their_end_of_text(model, pool):
    ids = random_ids(2, 9)
    answers = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12)[:, 9:]
    first = answers[0].tolist()
    others = {*first[:3], *answers[1].tolist()}
    end = next(i for i, token in enumerate(first) if token not in {*first[:i], *others})
    model.generation_config.eos_token_id = first[end]
    try:
        generate(model, pool, ids, torch.ones_like(ids), max_new_tokens=12)
    finally:
        model.generation_config.eos_token_id = None
    rows = [9 + end + 1, 9 + 12 - 1]
    assert pool.stats()["prefix_insert_tokens"] == sum(length // PAGE * PAGE for length in rows)


def test_cache_of_two_turns_equals_and_inserts_both(model, pool):
    ids = random_ids(1, 9)
    twin = DynamicCache(config=model.config)
    answer = generated(model, twin, ids)
    end = answer[0, 9 + 3].item()
    model.generation_config.eos_token_id = end  # the first turn ends in it
    try:
        twin = DynamicCache(config=model.config)
        with PoolCache(model, pool, ids) as cache:
            answers = [generated(model, each, ids) for each in (cache, twin)]
            question = torch.cat([answers[1], random_ids(1, 5, seed=1)], dim=1)
            answers += [generated(model, each, question) for each in (cache, twin)]
            length = cache.get_seq_length()
    finally:
        model.generation_config.eos_token_id = None
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[2], answers[3])
    assert answers[0][0, -1] == end
    assert pool.stats()["prefix_insert_tokens"] == length // PAGE * PAGE > 16


def test_namespaces_share_nothing(model, pool):
    ids = random_ids(1, 9)
    generate(model, pool, ids, extra_key="a", max_new_tokens=2)
    matched = []
    for key in ("a", "b", None):
        with PoolCache(model, pool, ids, extra_key=key) as cache:
            matched += cache.matched_lens
    assert matched == [8, 0, 0]
