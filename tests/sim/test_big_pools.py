"""Offsets past 2^31 and 2^32, in pools of which only the touched pages are real memory.

Whatever a kernel computes in too few bits lands in another place of the pool, or outside.
"""

import mmap

import numpy as np
import pytest

from tests.sim import launching
from tests.sim.arrays import F16, F32, assert_same_bits, random_bits

pytestmark = [
    pytest.mark.sim,
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

HEADS, DIM = 2, 16
# Slots of 64 bytes; 140 million of them are 9e9 bytes and 4.5e9 elements.
FAR_SLOTS = np.array([140_000_002, 70_000_001, -1, 3, 140_000_010])
TOTAL_SLOTS = 140_000_010
THERE, ROWS = [140_000_002, 70_000_001, 3], [0, 1, 3]


def sparse(shape, dtype):
    """A zeroed array of which nothing is memory until it is written."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=flags)
    except OSError as error:
        pytest.skip(f"no address space for {num_bytes} bytes: {error}")
    return np.frombuffer(memory, dtype).reshape(shape)


@pytest.fixture
def rng():
    return np.random.default_rng(33)


@pytest.mark.parametrize("unit", [None, 1], ids=["vectors", "scalars"])
def test_scatter_and_gather_far_slots(unit, rng):
    k_cache, v_cache = (sparse((TOTAL_SLOTS, HEADS, DIM), F16) for _ in "kv")
    k_rows, v_rows = (random_bits(rng, (5, HEADS, DIM), F16) for _ in "kv")
    launching.scatter(k_cache, v_cache, k_rows, v_rows, FAR_SLOTS, unit=unit)
    assert_same_bits(k_cache[THERE], k_rows[ROWS])
    assert_same_bits(v_cache[THERE], v_rows[ROWS])
    k_out, v_out = (random_bits(rng, (5, HEADS, DIM), F16) for _ in "kv")
    launching.gather(k_cache, v_cache, FAR_SLOTS, k_out, v_out, unit)
    assert_same_bits(k_out[ROWS], k_rows[ROWS])
    assert_same_bits(v_out[ROWS], v_rows[ROWS])
    assert not k_out.view(np.uint16)[[2, 4]].any()


@pytest.mark.parametrize("slot_dtype", [np.int32, np.int64])
def test_scatter_fp8_far_slots(slot_dtype, rng):
    # 64-byte slots of codes; int32 holds the slot, not the offset.
    k_cache, v_cache = (sparse((TOTAL_SLOTS, HEADS, 2 * DIM), np.uint8) for _ in "kv")
    k_rows, v_rows = (np.ones((5, HEADS, 2 * DIM), F32) for _ in "kv")
    slots = FAR_SLOTS.astype(slot_dtype)
    launching.scatter_fp8(
        k_cache, v_cache, k_rows, v_rows, slots, "float8_e4m3fn", 1.0, 0.5, unit=1
    )
    assert (k_cache[THERE] == 0x38).all()  # 1 is exponent 7, mantissa 0
    assert (v_cache[THERE] == 0x40).all()
    k_out, v_out = (np.empty((5, HEADS, 2 * DIM), F32) for _ in "kv")
    launching.gather_fp8(k_cache, v_cache, slots, "float8_e4m3fn", 1.0, 0.5, k_out, v_out)
    assert (k_out[ROWS] == 1).all()
    assert (v_out[ROWS] == 1).all()


def test_rows_and_heads_far_apart(rng):
    # Both strides pass 2^32.
    k_far, v_far = (sparse((3, 2, 1 << 29, 4), F16)[:, :, :1] for _ in "kv")
    k_rows, v_rows = (far.reshape(3, 2, 4) for far in (k_far, v_far))
    for rows in (k_rows, v_rows):
        assert min(rows.strides[:2]) >= 2**32
        rows[...] = random_bits(rng, rows.shape, F16)
    k_cache, v_cache = (np.zeros((4, 2, 4), F16) for _ in "kv")
    launching.scatter(k_cache, v_cache, k_rows, v_rows, np.array([1, 0, 3]))
    assert_same_bits(k_cache[[1, 0, 3]], k_rows)
    assert_same_bits(v_cache[[1, 0, 3]], v_rows)


def test_zero_and_copy_on_far_layers(rng):
    # Three layers of 70 million slots of 32 bytes: the last one begins at 4.5e9.
    k_caches, v_caches = (sparse((3, 70_000_000, 1, DIM), F16) for _ in "kv")
    source, target, cleared = 69_999_999, 2, 35_000_000
    for caches in (k_caches, v_caches):
        caches[:, source] = random_bits(rng, (3, 1, DIM), F16)
        caches[:, cleared - 1 : cleared + 2] = 1
    launching.copy_slots(k_caches, v_caches, np.array([source]), np.array([target]))
    launching.zero(k_caches, v_caches, np.array([cleared, 70_000_000]))
    for caches in (k_caches, v_caches):
        assert_same_bits(caches[:, target], caches[:, source])
        assert (caches[:, [cleared - 1, cleared + 1]] == 1).all()
        assert not caches[:, cleared].any()
