"""What counts as written, and that nobody reads what was not."""

import numpy as np

from tests.helpers.pools import R, case_pool, read, st, values, window, write


def test_get_reads_zeros_where_a_layer_has_not_written(make_pool):
    pool = case_pool(make_pool, 4, 4)
    pool.key_cache[...] = np.nan
    pool.value_cache[...] = np.inf
    a = pool.bind_request(R(1, 6), 16)
    step = pool.activate_step(a)
    step.put(0, 0, *window(pool, 0, 6, 100, 0))
    k, v = step.get(0, 16)
    assert k[0, :, 0, 0].tolist() == [*values(100, 0, 6), *[0.0] * 10]
    assert v[0, :6, 0, 0].tolist() == [-x for x in values(100, 0, 6)]
    assert not v[0, 6:].any()
    for x in step.get(1, 16):
        assert not x.any()  # this layer has written nothing yet
    for x in step.get(1, 16, padded=True):
        assert not x.any()


def test_pages_reused_carry_no_stale_bits(make_pool):
    pool = case_pool(make_pool, 4, 4)
    a = pool.bind_request(R(1, 16), 16)
    write(pool, a, 0, 16, 500)
    pool.key_cache[...] = np.nan
    pool.value_cache[...] = np.inf
    pool.unbind_request(a)
    b = pool.bind_request(R(1, 5), 12)
    step = pool.activate_step(b)
    step.put(0, 0, *window(pool, 0, 5, 100, 0))
    ids = np.asarray(pool.request(b).page_ids)
    for layer in range(2):
        for cache, sign in ((pool.key_layer(layer), 1), (pool.value_layer(layer), -1)):
            page = cache[ids[1] * 4 : ids[1] * 4 + 4, 0, 0]
            if layer == 0:
                assert page.tolist() == [sign * 104.0, 0, 0, 0]
            else:
                assert not page[1:].any()  # entered by the step, though not by this layer
    for layer in range(2):
        for x in step.get(layer, 12):
            assert np.isfinite(x).all()


def test_bind_and_page_tables_touch_no_kv_memory(make_pool):
    pool = case_pool(make_pool, 4, 4)
    pool.key_cache[...] = 7
    a = pool.bind_request(R(1, 6), 16)
    step = pool.activate_step(a)
    step.page_table(6)
    step.slot_indices(6)
    step.get(0, 6)
    assert (pool.key_cache == 7).all()


def test_valid_len_is_the_smallest_over_layers(make_pool):
    pool = case_pool(make_pool, 4, 4)
    a = pool.bind_request(R(1, 6), 8)
    step = pool.activate_step(a)
    step.put(0, 0, *window(pool, 0, 6, 100, 0))
    assert pool.valid_len(a) == 0
    step.put(1, 0, *window(pool, 0, 4, 100, 1))
    assert pool.valid_len(a) == 4
    step.put(1, 4, *window(pool, 4, 6, 100, 1))
    assert pool.valid_len(a) == 6
    step.put(0, 2, *window(pool, 2, 3, 100, 0))  # a re-write inside lowers nothing
    assert pool.valid_len(a) == 6
    assert st(pool) == (2, 0, 0, 0)


def test_valid_len_waits_until_a_gap_is_closed(make_pool):
    pool = case_pool(make_pool, 4, 4)
    a = pool.bind_request(R(1, 12), 12)
    write(pool, a, 0, 2)
    write(pool, a, 5, 8)
    assert pool.valid_len(a) == 2
    step = pool.activate_step(a)
    k, _ = step.get(0, 8)
    assert not k[0, 2:5].any()  # the gap reads as zeros
    assert k[0, 5:, 0, 0].tolist() == values(100, 5, 8)
    write(pool, a, 2, 5)
    assert pool.valid_len(a) >= 5
    write(pool, a, 5, 8)
    assert pool.valid_len(a) == 8
    assert read(pool, a, 8) == values(100, 0, 8)
