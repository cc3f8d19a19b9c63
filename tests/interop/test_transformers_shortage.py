"""What a `PoolCache` does where the pool has no pages for it."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from kvpool import KVCacheExhaustedError
from kvpool.interop.transformers import PoolCache, generate
from tests.helpers.hf_models import (
    PAGE,
    computed_tokens,
    forward,
    generated,
    pool_for,
    random_ids,
)

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("no_gradients")]


def test_shortage_shows_before_anything_is_computed(make_pool, model):
    pool = pool_for(make_pool, model, num_slots=8 * PAGE, page_size=PAGE)
    ids = random_ids(1, 9)
    generate(model, pool, ids, max_new_tokens=3)
    before = pool.stats()
    with (
        computed_tokens(model) as computed,
        pytest.raises(KVCacheExhaustedError, match="28 pages in all are more"),
    ):
        generate(model, pool, ids, max_new_tokens=100)
    after = pool.stats()
    assert computed == []
    assert [after[name] for name in ("pages_free", "pages_tree", "requests_bound")] == [
        before[name] for name in ("pages_free", "pages_tree", "requests_bound")
    ]


@pytest.mark.parametrize("options", [{"num_beams": 9}, {"batch_size": 9}])
def test_shortage_of_later_rows_leaves_nothing_bound(make_pool, model, options):
    pool = pool_for(make_pool, model, num_slots=16 * PAGE, page_size=PAGE)
    ids = random_ids(options.pop("batch_size", 1), 9)
    with pytest.raises(KVCacheExhaustedError):
        generate(model, pool, ids, max_new_tokens=3, **options)
    assert pool.bound_request_count == 0
    pool.check()


def test_rows_that_come_unannounced_and_find_no_pages_change_nothing(make_pool, model):
    pool = pool_for(make_pool, model, num_slots=16 * PAGE, page_size=PAGE)
    ids = random_ids(1, 9)
    with PoolCache(model, pool, ids, max_new_tokens=3) as cache:
        before = cache.request_ids
        with pytest.raises(KVCacheExhaustedError):
            forward(model, ids.repeat(9, 1), cache)
        assert cache.request_ids == before
        pool.check()
        forward(model, ids.repeat(2, 1), cache)
    assert pool.bound_request_count == 0


def test_answer_that_outgrows_its_pages_raises_and_gives_them_back(make_pool, model):
    pool = pool_for(make_pool, model, num_slots=5 * PAGE, page_size=PAGE)
    ids = random_ids(1, 9)
    with pytest.raises(KVCacheExhaustedError), PoolCache(model, pool, ids) as cache:
        generated(model, cache, ids, max_new_tokens=30)
    assert pool.bound_request_count == 0


def test_beams_need_only_the_pages_that_were_reserved(make_pool, model):
    # 2 beams of 9 + 8 tokens take 5 pages each, and there are no more.
    pool = pool_for(make_pool, model, num_slots=10 * PAGE, page_size=PAGE)
    ids = random_ids(1, 9)
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=2, max_new_tokens=8
    )
    found = generate(model, pool, ids, torch.ones_like(ids), num_beams=2, max_new_tokens=8)
    assert torch.equal(found, expected)
