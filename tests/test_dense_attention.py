"""Attention in plain array code against the CPU kernel, which has its own tests."""

import ml_dtypes
import numpy as np
import pytest

from kvpool.kernels import attention, attention_for_device, dense_attention, fp8
from tests.test_paged_attention import BF16, F16, F32, make_case

TOLERANCE = {F32: 3e-6, F16: 2e-3, BF16: 1.6e-2}

SHAPES = {
    "decode": ([1, 1, 1], [1, 17, 40]),
    "prefill": ([5, 32, 1], [5, 32, 1]),
    "ragged, cached prefixes": ([3, 1, 9], [20, 33, 9]),
    "a row without queries, one without positions": ([0, 2, 1], [4, 2, 0]),
    "queries before the first position": ([4], [2]),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_attend_equals_the_cpu_kernel(shape, dtype, causal):
    case = make_case(*SHAPES[shape], page_size=4, dtype=dtype, seed=3)
    expected = attention.paged_attention(*case, causal=causal)
    found = dense_attention.paged_attention(*case, causal=causal)
    assert found.dtype == dtype
    np.testing.assert_allclose(
        found.astype(np.float32), expected.astype(np.float32), rtol=0, atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (8, 1)])
def test_attend_with_grouped_heads_and_own_scale(heads):
    case = make_case([2, 1], [7, 12], page_size=5, heads=heads, dim=7, seed=1)
    expected = attention.paged_attention(*case, scale=0.3)
    found = dense_attention.paged_attention(*case, scale=0.3)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[F32])


@pytest.mark.parametrize("fp8_format", fp8.FORMATS)
def test_attend_over_fp8_codes(fp8_format):
    case = make_case([2, 3], [9, 30], page_size=4, dtype=F32, seed=2)
    storage = np.dtype(getattr(ml_dtypes, fp8_format))
    codes = [np.nan_to_num(c).astype(storage).view(np.uint8) for c in case[1:3]]
    scales = {"fp8_format": fp8_format, "k_scale": 0.015, "v_scale": 3.0}
    case = case._replace(k_cache=codes[0], v_cache=codes[1])
    expected = attention.paged_attention(*case, **scales)
    found = dense_attention.paged_attention(*case, **scales)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-5)


def test_attend_writes_into_out():
    case = make_case([1, 2], [3, 2], dtype=BF16)
    out = np.zeros(case.q.shape, BF16)
    assert dense_attention.paged_attention(*case, out=out) is out
    assert (out == attention.paged_attention(*case)).mean() > 0.9
    assert out.any()


def test_store_rounds_to_bfloat16_like_ml_dtypes():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, 100_000, dtype=np.uint32)
    words[:6] = [0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x3F808000, 0x3F818000]
    values = words.view(np.float32)
    target = np.zeros(values.shape, BF16)
    dense_attention.store(np, target, values)
    with np.errstate(invalid="ignore"):
        expected = values.astype(BF16)
    is_nan = np.isnan(values)
    np.testing.assert_array_equal(np.isnan(target.astype(np.float32)), is_nan)
    np.testing.assert_array_equal(
        target.view(np.uint16)[~is_nan], expected.view(np.uint16)[~is_nan]
    )


def test_each_kind_of_device_has_an_attention():
    assert attention_for_device("cpu") is attention.paged_attention
    assert attention_for_device("cuda") is dense_attention.paged_attention
    with pytest.raises(ValueError, match="'tpu'"):
        attention_for_device("tpu")
