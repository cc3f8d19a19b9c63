"""K and V that are the pool's own buffers, as input and as output: refused, nothing changed."""

import numpy as np
import pytest

from tests.helpers.pools import R, case_pool, values, write


@pytest.fixture
def pool(make_pool):
    return case_pool(make_pool, 4, 8)


@pytest.fixture
def step(pool):
    request = pool.bind_request(R(1, 8), 16)
    return write(pool, request, 0, 8, 100)


def test_put_of_a_view_of_the_pool_is_refused_and_changes_nothing(pool, step):
    k, v = pool.key_layer(0)[None, 0:7], pool.value_layer(0)[None, 0:7]
    before = pool.key_cache.copy()
    with pytest.raises(ValueError, match="put reads an array that is a view of the pool"):
        step.put(0, 8, k, v)
    with pytest.raises(ValueError, match="view of the pool"):
        step.put(0, 8, k.copy(), pool.value_cache[1, None, 0:7])
    assert np.array_equal(pool.key_cache, before)
    step.put(0, 8, k.copy(), v.copy())
    assert step.get(0, 15)[0][0, 8:, 0, 0].tolist() == values(100, 0, 7)


def test_get_into_the_pool_a_read_only_array_or_one_twice_is_refused(pool, step):
    shape = (1, 8, 2, 8)
    k, v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match="two arrays"):
        step.get(0, 8, out=(k, k))
    with pytest.raises(ValueError, match="get fills an array that is a view of the pool"):
        step.get(0, 8, out=(k, pool.value_cache[1, None, 16:24]))
    v.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        step.get(0, 8, out=(k, v))
