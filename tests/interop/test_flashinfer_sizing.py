"""How much workspace is asked for, in numbers that can be checked by hand."""

import numpy as np
import pytest

from kvpool.interop.plans import Problem, Shape
from kvpool.interop.sizing import (
    DEFAULT_WORKSPACE_BYTES,
    float_workspace_bytes,
    int_workspace_bytes,
)
from tests.interop.pools import Bucket

LLAMA_8B = Shape(num_kv_heads=8, head_dim=128, page_size=16, kv_dtype="bfloat16")
H200_SMS = 132  # 2 * 132 / 8 KV heads = 33 blocks


@pytest.fixture
def problem(make_pool):
    """A problem of Llama 3 8B's 32 query heads."""
    pool = make_pool(1, 64, 1, 8, page_size=16)

    def make(batch, window, *, is_fixed=True, heads=32):
        table = Bucket(pool, batch).table
        table.is_fixed = is_fixed
        queries = window and np.arange(0, (batch + 1) * window, window, np.int32).tobytes()
        return Problem(table, 0, heads, "bfloat16", queries, True, 1.0)

    return make


@pytest.mark.parametrize(
    ("batch", "window", "blocks", "tile"),
    [
        # 4 heads of a query fit a tile of 16; 512 * 4 / 16 tiles, and one for each other row.
        (512, None, 128 + 511, 16),
        # 64 * 4 queries of 4 heads, 193 of them in one row at the worst: tiles of 128.
        (64, 4, 256 * 4 // 128 + 63, 128),
        # 16 queries of 4 heads in one row are 64, and the device runs more blocks than that.
        (1, 16, 33, 64),
    ],
)
def test_fixed_tables_are_sized_for_the_worst_distribution(problem, batch, window, blocks, tile):
    found = float_workspace_bytes(problem(batch, window), LLAMA_8B, H200_SMS)
    assert found == 32 * blocks * tile * 129 * 4 + 64


def test_default_is_enough_for_eager_steps_and_not_for_large_buckets(problem):
    eager = float_workspace_bytes(problem(512, 7, is_fixed=False), LLAMA_8B, H200_SMS)
    assert eager < DEFAULT_WORKSPACE_BYTES
    for batch, window in ((512, None), (64, 4)):
        fixed = float_workspace_bytes(problem(batch, window), LLAMA_8B, H200_SMS)
        assert fixed > DEFAULT_WORKSPACE_BYTES
    # Many query heads for each KV head are more than it, too: what 70B models have.
    wide = problem(8, 7, is_fixed=False, heads=64)
    assert float_workspace_bytes(wide, LLAMA_8B, H200_SMS) > DEFAULT_WORKSPACE_BYTES


def test_plan_of_a_bucket_takes_a_megabyte_and_more_only_where_it_must(problem):
    assert int_workspace_bytes(problem(512, None)) == 2**20
    # 16,384 queries of 32 heads: 32,768 tiles of 16, and 512 rows.
    assert int_workspace_bytes(problem(512, 32)) == 32 * (32_768 + 512 + 16_384)
