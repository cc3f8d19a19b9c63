"""Scenarios drawn from public bug reports: FP8, offsets past 2^31, page tables gone stale."""

import numpy as np
import pytest

from kvpool import KVCacheError
from kvpool.attention import paged_attention
from tests.helpers.pools import R, case_pool, pages, slots, st, write


def fp8_pool(make_pool):
    """The scenario's pool, and one row of K and V a position, exact once they are scaled."""
    pool = case_pool(
        make_pool,
        4,
        8,
        dtype="float8_e4m3fn",
        k_scale=0.5,
        v_scale=0.25,
        compute_dtype="float32",
    )
    k = np.empty((1, 8, 2, 8), np.float32)
    k[...] = 0.5 * np.arange(1, 9, dtype=np.float32)[None, :, None, None]
    return pool, k, k * -0.5


def test_a18_fp8_reads_are_the_same_before_and_after_reuse(make_pool):
    """NVIDIA/TensorRT-LLM#2699, vllm-project/vllm#3880: reuse of an FP8 prefix changed output."""
    pool, k, v = fp8_pool(make_pool)
    assert (pool.kv_is_compute_dtype, pool.compute_dtype) == (False, "float32")
    a = pool.bind_request(R(1, 8), 12)
    step = pool.activate_step(a)
    for layer in range(2):
        step.put(layer, 0, k, v)
    first = [step.get(layer, 8) for layer in range(2)]
    own = slots(pool, a, 8)
    stored = pool.key_cache[:, own].copy(), pool.value_cache[:, own].copy()
    # 1 .. 8 as E4M3FN: exponent bias 7, three bits of mantissa.
    codes = [0x38, 0x40, 0x44, 0x48, 0x4A, 0x4C, 0x4E, 0x50]
    assert stored[0][0, :, 0, 0].tolist() == codes
    assert stored[1][0, :, 0, 0].tolist() == [0x80 | code for code in codes]

    assert pool.finish_request(a, R(1, 8)) == 8
    b = pool.bind_request([*R(1, 8), 9], 12)
    assert pool.matched_prefix_len(b) == 8
    step = pool.activate_step(b)
    for layer, (first_k, first_v) in enumerate(first):
        second_k, second_v = step.get(layer, 8)
        assert first_k.tobytes() == second_k.tobytes() == k.tobytes()
        assert first_v.tobytes() == second_v.tobytes() == v.tobytes()
    assert first[0][0][0, :, 0, 0].tolist() == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
    assert first[0][1][0, :, 0, 0].tolist() == [
        -0.25, -0.5, -0.75, -1.0, -1.25, -1.5, -1.75, -2.0,
    ]  # fmt: skip
    # b's own page changes no byte of the shared ones.
    for layer in range(2):
        step.put(layer, 8, k[:, :1], v[:, :1])
    assert slots(pool, b, 8) == own
    np.testing.assert_array_equal(pool.key_cache[:, own], stored[0])
    np.testing.assert_array_equal(pool.value_cache[:, own], stored[1])


FAR_SLOT, NEAR_SLOT, FAR_PAGE = 1_048_579, 3, 65_536


def far_pool(make_pool, device, dtype):
    """65,537 pages of 16 slots of 2,048 elements; a holds all pages but the last, b that one."""
    try:
        pool = make_pool(
            1,
            1_048_592,
            16,
            128,
            page_size=16,
            device=device,
            dtype=dtype,
            compute_dtype="float32" if dtype.startswith("float8") else dtype,
            eviction_history=0,
        )
    except MemoryError as error:
        pytest.skip(f"no memory for buffers past 2^31 elements: {error}")
    a = pool.bind_request([1], 16 * FAR_PAGE)
    b = pool.bind_request([2], 16)
    assert st(pool) == (0, 0, 0, 0)
    assert pool.request(b).page_ids.tolist() == [FAR_PAGE]
    return pool, a, b


def check_far_slots(make_pool, device, dtype):
    """A19 on one device: K = 3 at the far slot, K = 5 at the near one, neighbours stay 0."""
    assert FAR_SLOT * 2_048 == 2_147_489_792 > 2**31 - 1
    pool, a, b = far_pool(make_pool, device, dtype)
    xp = pool.array_namespace
    k = xp.ones((2, 1, 16, 128), np.float32)
    k[0] *= 3
    k[1] *= 5
    step = pool.activate_step(b, a)
    own = step.window_slot_indices(3, 1)
    assert own.dtype == np.int64
    assert own.tolist() == [FAR_SLOT, NEAR_SLOT]
    step.put(0, 3, k, -k, slots=own)
    found = step.slot_indices(5)
    assert found.dtype == np.int64
    assert found.tolist() == [*range(FAR_SLOT - 3, FAR_SLOT + 2), *range(5)]

    def keys(*, padded=False, length=5):
        got_k, got_v = step.get(0, length, padded=padded)
        assert (got_v == -got_k).all()
        rows = xp.asarray(got_k, np.float32)
        assert (rows == rows[..., :1, :1]).all(), "heads and dims differ"
        return rows[:, :, 0, 0].tolist()

    # Positions 0 .. 2 of the rows were never written, so nothing is valid yet: bytes count.
    assert keys() == [[0, 0, 0, 3, 0], [0, 0, 0, 5, 0]]
    assert keys(padded=True, length=18)[0] == [0, 0, 0, 3, *[0] * 14]  # b's last slot repeats
    stored = np.asarray(pool.device.to_host(pool.key_layer(0)[FAR_SLOT - 1 : FAR_SLOT + 2]))
    assert stored.any(axis=(1, 2)).tolist() == [False, True, False]

    # The page table and attention: each query sees 4 positions, three of them zeros.
    pool.mark_written(a, 4)
    pool.mark_written(b, 4)
    table = step.page_table(4)
    assert table.indices.tolist() == [FAR_PAGE, 0]
    out = paged_attention((k[:, 0] * 0).astype(step.get(0, 1)[0].dtype), pool, 0, table)
    assert out[:, 0, 0].tolist() == [-3 / 4, -5 / 4]

    step.invalidate_range(3, 4)
    assert keys() == [[0] * 5] * 2
    assert not np.asarray(pool.device.to_host(pool.key_layer(0)[FAR_SLOT])).any()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
def test_a19_offsets_past_31_bits_reach_the_right_slots(make_pool, dtype):
    """vllm-project/vllm#1486, lightseekorg/tokenspeed#501: slot times stride in 32 bits wrapped.

    Of the 4 GiB (bfloat16: 8) only the pages that are touched become memory here.
    """
    check_far_slots(make_pool, "cpu", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
def test_a19_offsets_past_31_bits_on_a_device(make_pool, dtype):
    """vllm-project/vllm#1486, lightseekorg/tokenspeed#501: the same through the CUDA kernels."""
    check_far_slots(make_pool, "cuda", dtype)


@pytest.mark.slow
def test_a19_a_pool_past_31_bits_that_is_written_as_a_whole(make_pool):
    """vllm-project/vllm#1486, lightseekorg/tokenspeed#501: no page lands on another one.

    Needs 4 GiB of real memory; every 4,093rd page is written, each with a value of its own.
    """
    if available_bytes() < 6 << 30:
        pytest.skip(f"needs 6 GiB of free memory, there are {available_bytes() >> 20} MiB")
    pool, a, b = far_pool(make_pool, "cpu", "float8_e4m3fn")
    pool.key_cache[...] = 0x30
    pool.value_cache[...] = 0xB0
    assert pool.key_cache.nbytes == 1_048_592 * 2_048
    chosen = [*range(0, FAR_PAGE, 4_093)]
    step = pool.activate_step(a)
    for n, page in enumerate(chosen):
        k = np.full((1, 1, 16, 128), n % 8 + 1, np.float32)
        step.put(0, 16 * page + 7, k, -k)
    step = pool.activate_step(b)
    step.put(0, 7, np.full((1, 1, 16, 128), 8, np.float32), np.zeros((1, 1, 16, 128), np.float32))
    codes = [0x38, 0x40, 0x44, 0x48, 0x4A, 0x4C, 0x4E, 0x50]
    for n, page in enumerate([*chosen, FAR_PAGE]):
        expected = np.zeros((16, 16, 128), np.uint8)  # the first put of a page zeroes it
        expected[7] = 0x50 if page == FAR_PAGE else codes[n % 8]
        np.testing.assert_array_equal(pool.key_layer(0)[16 * page : 16 * page + 16], expected)
    # A put enters its page and all before it, which are zeroed; no other page of a is touched.
    entered = np.arange(FAR_PAGE + 1) <= chosen[-1]
    entered[FAR_PAGE] = True
    firsts = pool.key_layer(0)[::16, 0, 0]
    np.testing.assert_array_equal(firsts, np.where(entered, 0, 0x30))


def available_bytes():
    """Memory that may be taken without swapping, 0 where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = dict(line.split(":") for line in lines)
    except OSError:
        return 0
    return int(found["MemAvailable"].split()[0]) << 10


def table_of(m):
    """indptr, last_page_len and the listed pages of a graph's table, as it stands now."""
    indptr = np.asarray(m.indptr).tolist()
    return indptr, np.asarray(m.last_page_len).tolist(), np.asarray(m.indices)[: indptr[-1]]


def test_a21_graph_buffers_are_wide_enough_and_keep_no_stale_page(make_pool):
    """GeeeekExplorer/nano-vllm#258: a table one column too narrow, and stale columns in it."""
    pool = case_pool(make_pool, 4, 16)
    a = pool.bind_request(R(1, 16), 24)
    write(pool, a, 0, 16)
    pages_a = pages(pool, a, 18)
    assert len(pages_a) == 5
    graph = pool.decode_graph
    pool.activate_step(a)
    graph.prepare(17, 16)
    m = graph.page_table(1)
    addresses = [x.__array_interface__["data"][0] for x in (m.indptr, m.indices, m.last_page_len)]
    indptr, last, listed = table_of(m)
    assert (indptr, last) == ([0, 5], [1])
    assert listed.tolist() == pages(pool, a, 17)

    b = pool.bind_request(R(50, 52), 8)
    pool.activate_step(b)
    graph.prepare(4, 3)
    assert graph.page_table(1) is m
    indptr, last, listed = table_of(m)
    assert (indptr, last) == ([0, 1], [4])
    assert listed.tolist() == pages(pool, b, 4)
    behind = np.asarray(m.indices)[indptr[-1] :]
    assert set(behind.tolist()) == {m.scratch_page}, "a page of a stands behind b's"

    pool.activate_step(a)
    graph.prepare(18, 17)
    indptr, last, listed = table_of(m)
    assert (indptr, last) == ([0, 5], [2])
    assert listed.tolist() == pages_a
    assert addresses == [
        x.__array_interface__["data"][0] for x in (m.indptr, m.indices, m.last_page_len)
    ]


def test_a37_stale_metadata_is_never_read(make_pool):
    """flashinfer-ai/flashinfer#5176: a page table of an earlier plan stayed in use."""
    pool = case_pool(make_pool, 4, 8)
    a = pool.bind_request(R(1, 6), 16)
    step = write(pool, a, 0, 6)
    step.page_table(6)
    expected = [
        (7, True, 2, 3),
        (8, True, 2, 4),
        (9, False, 3, 1),  # crosses into a third page
        (8, False, 2, 4),
        (5, True, 2, 1),
        (5, True, 2, 1),
    ]
    for length, in_place, num_pages, last_page_len in expected:
        assert step.seal_length(length) is in_place, length
        table = step.current_page_table
        assert np.asarray(table.indptr).tolist() == [0, num_pages]
        assert np.asarray(table.last_page_len).tolist() == [last_page_len]
        assert np.asarray(table.indices).tolist() == pages(pool, a, length)
    m = step.page_table(5)
    b = pool.bind_request(R(60, 61), 8)
    step_b = write(pool, b, 0, 2, 900)
    assert np.asarray(m.indices).tolist() == pages(pool, a, 5)  # still a's, never b's
    table = step_b.page_table(2)
    assert np.asarray(table.indptr).tolist() == [0, 1]
    assert np.asarray(table.last_page_len).tolist() == [2]
    assert np.asarray(table.indices).tolist() == pages(pool, b, 2)
    pool.unbind_request(a)
    with pytest.raises(KVCacheError):
        step.page_table(5)
