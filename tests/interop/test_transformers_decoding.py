"""Dtypes of a pool, assisted decoding, and loops without `generate`."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import DynamicCache

from kvpool import KVCacheStateError
from kvpool.interop.torch import pool_tensors
from kvpool.interop.transformers import PoolCache, generate
from kvpool.interop.transformers.generation import cache_argument
from tests.helpers.hf_models import (
    PAGE,
    computed_tokens,
    forward,
    pool_for,
    random_ids,
    random_model,
)

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("no_gradients")]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_pool_rounds_and_reuses(make_pool, model, dtype):
    pool = pool_for(make_pool, model, page_size=PAGE, dtype=dtype, k_scale=0.25, v_scale=0.25)
    ids = random_ids(1, 9)
    generate(model, pool, ids, max_new_tokens=8)
    with computed_tokens(model) as computed:
        generate(model, pool, ids, max_new_tokens=8)
    assert computed == [1] * 8
    with PoolCache(model, pool, ids) as cache:
        forward(model, ids[:, 8:], cache)
        twin = DynamicCache(config=model.config)
        forward(model, ids, twin)
        found, expected = cache.layers[0].keys.float(), twin.layers[0].keys
        assert torch.allclose(found, expected, rtol=0.25, atol=0.25 * 2**-6)
        assert not torch.equal(found, expected)


def test_pool_of_another_dtype_converts(make_pool, model):
    pool = pool_for(make_pool, model, dtype="bfloat16")
    ids = random_ids(1, 9)
    with PoolCache(model, pool, ids) as cache:
        assert forward(model, ids, cache).dtype == torch.float32
        assert cache.layers[0].keys.dtype == torch.bfloat16


def test_prompt_lookup_equals_and_reuses(model, pool):
    ids = random_ids(1, 6).repeat(1, 4)
    options = {"max_new_tokens": 20, "prompt_lookup_num_tokens": 4}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    for reused in (0, 20):
        with computed_tokens(model) as computed:
            found = generate(model, pool, ids, torch.ones_like(ids), **options)
        assert torch.equal(found, expected)
        with PoolCache(model, pool, ids) as cache:
            assert cache.matched_lens == [20]
        # Transformers hands over the whole prompt with its first draft; it is cut in the decoder.
        assert 24 - reused <= computed[0] <= 24 - reused + 4


def test_assistant_model_equals(model, pool):
    assistant = random_model(num_hidden_layers=1)
    ids = random_ids(1, 11)
    options = {"max_new_tokens": 12, "assistant_model": assistant}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    for _ in range(2):
        found = generate(model, pool, ids, torch.ones_like(ids), **options)
        assert torch.equal(found, expected)
    assert pool.bound_request_count == 0


def test_cache_of_a_direct_loop_is_the_same_as_in_generate(model, pool):
    ids = random_ids(1, 9)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)
    for _ in range(2):
        with PoolCache(model, pool, ids, max_new_tokens=6) as cache:
            new, found = ids[:, cache.get_seq_length() :], ids
            for _ in range(6):
                new = forward(model, new, cache)[:, -1:].argmax(-1)
                found = torch.cat([found, new], dim=1)
        assert torch.equal(found, expected)


def test_forward_that_failed_is_repeated(model, pool, monkeypatch):
    ids = random_ids(1, 9)
    layer = model.get_decoder().layers[1]
    with PoolCache(model, pool, ids) as cache:
        hook = layer.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forward(model, ids, cache)
        hook.remove()
        with pytest.raises(KVCacheStateError, match="after one that failed"):
            cache.reorder_cache(torch.tensor([0]))
        twin = DynamicCache(config=model.config)
        assert torch.equal(
            model(ids, **{cache_argument(model): cache}).logits, forward(model, ids, twin)
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_scattered", [False, True])
def test_pages_in_a_row_are_read_in_place(make_pool, model, dtype, is_scattered):
    pool = pool_for(make_pool, model, page_size=PAGE, dtype=dtype, poison=False)
    blocks = [pool.alloc(PAGE) for _ in range(20 if is_scattered else 0)]
    for slots in blocks[::2]:
        pool.free(slots)
    ids, twin = random_ids(1, 11), DynamicCache(config=model.config)
    expected = forward(model, ids, twin)
    with PoolCache(model, pool, ids, max_new_tokens=8) as cache:
        pages = pool.request(cache.request_ids[0]).page_ids
        assert (max(pages) - min(pages) == len(pages) - 1) != is_scattered
        found = forward(model, ids, cache)
        tolerance = 0 if dtype == "float32" else 0.1
        assert torch.allclose(found, expected, rtol=tolerance, atol=10 * tolerance + 1e-5)
        keys = cache.layers[1].keys
        shared = keys.data_ptr() == pool_tensors(pool).key_layer(1)[pages[0] * PAGE :].data_ptr()
        assert shared != is_scattered
        assert torch.allclose(keys.float(), twin.layers[1].keys, rtol=tolerance, atol=tolerance)
    for slots in blocks[1::2]:
        pool.free(slots)
