"""Save and load: what comes back, in which order it would go, and in how much memory."""

import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import EVICTION_POLICIES, KVCachePool
from kvpool.snapshot import filling, saving
from tests.helpers.pools import case_pool, serve
from tests.helpers.stamps import cached, drain, prefixes, priorities, stamp, wrong_pages
from tests.oracles.snapshot import DTYPES, NAMESPACES, Traffic


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pool.safetensors"


@st.composite
def traffics(draw, bound=True):
    """Random traffic over a small pool, with requests still bound or without."""
    traffic = Traffic(
        random.Random(draw(st.integers(0, 1 << 32))),
        num_pages=draw(st.sampled_from((6, 24))),
        page_size=draw(st.sampled_from((1, 2, 3))),
        eviction=draw(st.sampled_from(EVICTION_POLICIES)),
        dtype=draw(st.sampled_from(DTYPES)),
    ).run(draw(st.integers(0, 60)))
    while not bound and traffic.held:
        traffic.let_go()
    stamp(traffic.pool)
    return traffic


def tree_of(pool):
    """Every node, recency included."""
    survey = pool.radix.survey()
    columns = [column.tolist() for column in survey[2:]]
    return survey.namespaces, columns, [node.tokens.tolist() for node in pool.radix.nodes()]


@given(traffics())
def test_load_brings_back_every_page_with_priority_bytes_and_order(tmp_path_factory, traffic):
    pool, path = traffic.pool, tmp_path_factory.mktemp("snapshot") / "pool"
    before = cached(pool)
    tree = tree_of(pool)
    report = pool.save(path, model="m")
    assert cached(pool) == before
    assert tree_of(pool) == tree, "a save changed the tree"
    assert report.pages == len(before)
    assert report.file_bytes == path.stat().st_size
    loaded = KVCachePool.load(path, model="m")
    loaded.check()
    assert cached(loaded) == before
    assert not wrong_pages(loaded)
    assert (loaded.load_report.pages_loaded, loaded.load_report.dropped) == (len(before), [])
    assert (loaded.eviction, loaded.num_slots) == (pool.eviction, pool.num_slots)
    assert loaded.stats()["prefix_insert_tokens"] == loaded.stats()["evicted_pages"] == 0

    # What nobody held goes in the same order; what somebody held, last of its priority.
    goes = drain(pool)
    held = set(cached(pool))
    loaded_goes = drain(loaded)
    assert [prefix for prefix in loaded_goes if prefix not in held] == goes
    assert set(loaded_goes) == set(before)
    # Under fifo no use makes a page recent: it goes right behind the last of those below it.
    fifo = pool.eviction == "fifo"
    turns = [(before[prefix], prefix in held and not fifo) for prefix in loaded_goes]
    assert turns == sorted(turns)
    loaded.check()


@given(traffics(bound=False), st.data())
def test_smaller_pool_keeps_what_eviction_would_take_last(tmp_path_factory, traffic, data):
    pool, path = traffic.pool, tmp_path_factory.mktemp("snapshot") / "pool"
    pool.save(path)
    goes = drain(pool)
    room = data.draw(st.integers(1, pool.num_pages))
    loaded = KVCachePool.load(path, num_slots=room * pool.page_size)
    loaded.check()
    assert not wrong_pages(loaded)
    report = loaded.load_report
    assert report.pages_dropped_room == max(0, len(goes) - room)
    assert report.pages_loaded + report.pages_dropped_room == report.pages_saved == len(goes)
    assert drain(loaded) == goes[-room:]


@given(traffics(bound=False), st.sampled_from(EVICTION_POLICIES))
def test_another_policy_takes_the_same_pages(tmp_path_factory, traffic, eviction):
    pool, path = traffic.pool, tmp_path_factory.mktemp("snapshot") / "pool"
    pool.save(path)
    loaded = KVCachePool.load(path, eviction=eviction)
    loaded.check()
    assert loaded.eviction == eviction
    assert cached(loaded) == cached(pool)
    if eviction != "fifo":
        assert drain(loaded) == drain(pool)


@given(traffics(bound=False))
@settings(max_examples=20)
def test_second_generation_equals_the_first(tmp_path_factory, traffic):
    folder = tmp_path_factory.mktemp("snapshot")
    traffic.pool.save(folder / "first")
    KVCachePool.load(folder / "first").save(folder / "second")
    assert (folder / "first").read_bytes() == (folder / "second").read_bytes()


def test_bind_on_a_loaded_pool_matches(make_pool, path):
    pool = case_pool(make_pool, 4, 16)
    serve(pool, range(20), extra_key="tenant")
    pool.save(path)
    loaded = make_pool.keep(KVCachePool.load(path))
    request = loaded.bind_request(list(range(20)), 20, extra_key="tenant")
    assert loaded.matched_prefix_len(request) == 16
    assert loaded.matched_prefix_len(loaded.bind_request(list(range(20)), 20)) == 0


def test_every_kind_of_namespace_survives(make_pool, path):
    pool = case_pool(make_pool, 2, 32)
    for key in NAMESPACES:
        serve(pool, [1, 2, 3], extra_key=key)
    pool.save(path)
    loaded = make_pool.keep(KVCachePool.load(path))
    assert cached(loaded) == cached(pool)
    assert len(cached(pool)) == len(NAMESPACES)


def test_empty_pool_saves_and_loads(make_pool, path):
    assert case_pool(make_pool, 4, 4).save(path).pages == 0
    loaded = make_pool.keep(KVCachePool.load(path))
    assert (loaded.load_report.pages_saved, loaded.num_pages) == (0, 4)


def test_private_and_detached_pages_are_not_saved(make_pool, path):
    pool = case_pool(make_pool, 2, 16)
    serve(pool, range(8))
    held = pool.bind_request(list(range(8)), 12)
    pool.reset_prefix_cache()
    serve(pool, [5, 5, 5, 5])
    writing = pool.bind_request(list(range(50, 54)), 4)
    pool.mark_written(writing, 4)
    assert pool.save(path).pages == 2
    loaded = make_pool.keep(KVCachePool.load(path))
    assert list(cached(loaded)) == [(type(None), None, (5, 5)), (type(None), None, (5, 5, 5, 5))]
    pool.unbind_request(held)


def test_fp8_pool_comes_back_with_its_scales(make_pool, path):
    scales = [0.5, 0.1]
    pool = case_pool(make_pool, 2, 8, dtype="float8_e4m3fn", k_scale=scales, v_scale=0.1)
    serve(pool, range(8))
    stamp(pool)
    pool.save(path)
    expected = {"k_scale": scales, "v_scale": np.float32(0.1), "compute_dtype": "bfloat16"}
    loaded = make_pool.keep(KVCachePool.load(path, **expected))
    assert not wrong_pages(loaded)
    assert [loaded.layer_scales(i) for i in (0, 1)] == [pool.layer_scales(i) for i in (0, 1)]
    assert loaded.dtype == "float8_e4m3fn"


def test_locked_pages_count_as_recent(make_pool, path):
    pool = case_pool(make_pool, 2, 16)
    serve(pool, [1, 1, 1, 1])
    held = pool.bind_request([1, 1, 1, 1, 1], 6)
    serve(pool, [2, 2])
    pool.save(path)
    loaded = make_pool.keep(KVCachePool.load(path, num_slots=4))
    assert [prefix[2] for prefix in cached(loaded)] == [(1, 1), (1, 1, 1, 1)]
    pool.unbind_request(held)


def test_deep_chain_keeps_every_node(make_pool, path):
    pool = case_pool(make_pool, 1, 400)
    tokens = list(range(300))
    request = pool.bind_request(tokens, 300)
    for length in range(1, 301):
        pool.mark_written(request, length)
        pool.checkpoint_request(request, tokens[:length])
    pool.finish_request(request, tokens)
    pool.save(path)
    loaded = make_pool.keep(KVCachePool.load(path))
    assert drain(loaded) == drain(pool)


def test_pool_options_reach_the_constructor(make_pool, path):
    case_pool(make_pool, 4, 8).save(path)
    loaded = make_pool.keep(KVCachePool.load(path, zero_rejected_kv=False, max_batch_size=3))
    assert not loaded.zero_rejected_kv
    assert loaded.layout.max_batch_size == 3
    with pytest.raises(TypeError, match=r"^load takes no option no_such_option$"):
        KVCachePool.load(path, no_such_option=1)


def test_save_and_load_hold_a_few_chunks_in_memory(make_pool, path, monkeypatch):
    page_size, num_pages = 64, 256
    pool = make_pool(4, page_size * num_pages, 2, 32, page_size=page_size)  # 128 KiB a page
    serve(pool, range(page_size * num_pages))
    num_bytes = pool.key_cache.nbytes + pool.value_cache.nbytes
    for module in (saving, filling):
        monkeypatch.setattr(module, "CHUNK_BYTES", num_bytes // 32)
    tracemalloc.start()
    try:
        pool.save(path)
        assert tracemalloc.get_traced_memory()[1] < num_bytes / 8
        tracemalloc.reset_peak()
        loaded = make_pool.keep(KVCachePool.load(path))
        # The pool itself, and little more.
        assert tracemalloc.get_traced_memory()[1] < num_bytes * (1 + 1 / 8) + (1 << 22)
    finally:
        tracemalloc.stop()
    assert loaded.load_report.pages_loaded == num_pages


def test_random_traffic_loads_under_the_same_prefixes():
    # The helper's own check: stamps differ between prefixes, and follow them.
    pool = Traffic(random.Random(1)).run(40).pool
    assert not wrong_pages(pool)
    assert len(set(prefixes(pool).values())) == len(priorities(pool))
