"""Prefixes that another pool left in a tier are found by a `PoolCache`."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from kvpool.interop.transformers import PoolCache, generate
from tests.helpers.hf_models import computed_tokens, pool_for, random_ids

pytestmark = pytest.mark.peers


@pytest.fixture
def tier(tmp_path):
    from kvpool.tiers.file import FileTier

    made = FileTier(tmp_path, 1 << 24)
    yield made
    made.close()


def pool_over(make_pool, model, tier):
    pool = pool_for(make_pool, model, page_size=4)
    pool.attach_tiers([tier], model="random")
    return pool


def test_prompt_of_another_pool_is_fetched(make_pool, model, tier):
    ids = random_ids(1, 21)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8}
    expected = model.generate(ids, **options)
    first, second, third = (pool_over(make_pool, model, tier) for _ in range(3))
    assert torch.equal(generate(model, first, ids, **options), expected)
    first.tiers.flush(30.0)
    with computed_tokens(model) as computed:
        found = generate(model, second, ids, prefetch_timeout_s=30.0, **options)
    assert torch.equal(found, expected)
    assert computed == [21 - 20] + [1] * 7
    # 0 seconds: nothing is fetched.
    with computed_tokens(model) as computed:
        found = generate(model, third, ids, prefetch_timeout_s=0, **options)
    assert torch.equal(found, expected)
    assert computed == [21] + [1] * 7
    for pool in (first, second, third):
        assert pool.bound_request_count == 0
        pool.check()
        pool.tiers.close()


def test_batch_finds_what_each_row_left(make_pool, model, tier):
    ids = random_ids(2, 21)
    first, second = (pool_over(make_pool, model, tier) for _ in range(2))
    for row in ids:
        generate(model, first, row[None], max_new_tokens=1)
    first.tiers.flush(30.0)
    with PoolCache(model, second, ids, prefetch_timeout_s=30.0) as cache:
        assert cache.matched_lens == [20, 20]
    for pool in (first, second):
        pool.check()
        pool.tiers.close()
