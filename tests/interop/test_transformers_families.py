"""`generate` over a pool beside transformers' own cache, on small random models of each kind."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from kvpool.interop.transformers import generate
from tests.helpers.hf_models import (
    FAMILIES,
    computed_tokens,
    one_thread,
    pool_for,
    random_ids,
    random_model,
)

pytestmark = pytest.mark.peers

PAGE = 4


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    with one_thread():
        yield random_model(request.param)


@pytest.fixture
def pool(make_pool, model):
    return pool_for(make_pool, model, page_size=PAGE)


def ones(ids):
    return torch.ones_like(ids)


def both(model, pool, ids, mask=None, seed=3, **options):
    """What transformers gives, after a check that the pool gives the same."""
    mask = ones(ids) if mask is None else mask
    torch.manual_seed(seed)
    expected = model.generate(ids, attention_mask=mask, **options)
    torch.manual_seed(seed)
    found = generate(model, pool, ids, mask, **options)
    assert found.tolist() == expected.tolist()
    pool.check()
    assert pool.bound_request_count == 0
    return expected


def whole_pages(length):
    return length // PAGE * PAGE


def test_chat_of_three_turns_equals_and_computes_new_tokens_only(model, pool):
    ids = random_ids(1, 13)
    for turn in range(3):
        both(model, pool, ids, max_new_tokens=1)  # so that the pool has the prompt
        with computed_tokens(model) as computed:
            ids = generate(model, pool, ids, ones(ids), max_new_tokens=10)
        prompt_len = ids.shape[1] - 10
        # A bind leaves at least one token of a prompt to compute.
        matched = whole_pages(prompt_len - 1)
        assert computed == [prompt_len - matched] + [1] * 9
        ids = torch.cat([ids, random_ids(1, 5, seed=turn)], dim=1)
    assert ids.shape[1] == 13 + 3 * 15


def test_next_turn_finds_prompt_and_answer(model, pool):
    ids = random_ids(1, 13)
    out = both(model, pool, ids, max_new_tokens=12)
    before = pool.stats()["prefix_match_tokens"]
    # 24 tokens have K and V: of the last one nothing was computed.
    both(model, pool, torch.cat([out, random_ids(1, 4)], dim=1), max_new_tokens=6)
    assert pool.stats()["prefix_match_tokens"] - before == whole_pages(24)


def padded_batch(seed):
    """Rows of 17, 12 and 5 tokens."""
    ids = random_ids(3, 17, seed)
    mask = ones(ids)
    for row, pad in enumerate((0, 5, 12)):
        ids[row, :pad], mask[row, :pad] = 0, 0
    return ids, mask


def test_padded_batch_equals_cold_and_warm(model, pool):
    ids, mask = padded_batch(4)
    both(model, pool, ids, mask, max_new_tokens=9)
    with computed_tokens(model) as computed:
        generate(model, pool, ids, mask, max_new_tokens=9)
    # Columns that need no computing: 0 + 16, 5 + 8 and 12 + 4 of 17.
    assert computed == [3 * (17 - 13)] + [3] * 8
    both(model, pool, ids, mask, max_new_tokens=9)


def test_padded_batch_goes_on_from_the_row_with_the_shortest_match(model, pool):
    ids, mask = padded_batch(5)
    both(model, pool, ids[:1], max_new_tokens=1)
    # Row 1 has nothing: columns before its first one need no computing.
    with computed_tokens(model) as computed:
        both(model, pool, ids[:2], mask[:2], max_new_tokens=9)
    assert computed.tokens == 2 * (17 + 8) + 2 * (17 - 5 + 8)


def test_padding_is_not_stored(model, pool):
    ids, mask = padded_batch(6)
    generate(model, pool, ids, mask, max_new_tokens=1)
    assert pool.stats()["prefix_insert_tokens"] == 16 + 12 + 4


def test_sampling_equals(model, pool):
    ids, mask = padded_batch(7)
    for seed in range(2):
        both(model, pool, ids, mask, seed=seed, do_sample=True, max_new_tokens=9, top_k=20)


def test_several_sequences_of_a_prompt_equal(model, pool):
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 7}
    both(model, pool, random_ids(2, 10), **options)
    both(model, pool, random_ids(2, 10), **options)


def test_beam_search_equals_cold_and_warm(model, pool):
    ids, mask = padded_batch(8)
    for _ in range(2):
        both(model, pool, ids, mask, num_beams=3, num_return_sequences=2, max_new_tokens=11)


def test_beam_search_with_sampling_equals(model, pool):
    both(model, pool, random_ids(1, 9), num_beams=4, do_sample=True, max_new_tokens=11)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_equals(make_pool, model, dtype):
    model = model.to(getattr(torch, dtype))
    try:
        pool = pool_for(make_pool, model)
        assert pool.dtype == dtype
        ids, mask = padded_batch(9)
        both(model, pool, ids, mask, max_new_tokens=9)
    finally:
        model.to(torch.float32)


def test_chunked_prefill_equals(model, pool):
    ids, mask = padded_batch(10)
    both(model, pool, ids[:1], max_new_tokens=5, prefill_chunk_size=6)
    both(model, pool, ids, mask, max_new_tokens=5, prefill_chunk_size=6)


def test_eager_attention_equals(model, pool):
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        ids, mask = padded_batch(12)
        for _ in range(2):
            both(model, pool, ids, mask, max_new_tokens=7)
    finally:
        model.set_attn_implementation(before)
