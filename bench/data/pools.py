"""Pools with pages in no order, and FP8 as other libraries do it."""

import ml_dtypes
import numpy as np

from bench.data.race import torch
from kvpool import KVCachePool
from kvpool.kernels.fp8 import FORMATS

PAGE_SIZE = 16
HEAD_DIM = 128
SCALE = 0.015625  # of FP8 codes


def scattered_pool(dtype, num_tokens, heads):
    """A pool of one layer whose free pages come in no order."""
    scales = {"k_scale": SCALE, "v_scale": SCALE} if dtype in FORMATS else {}
    pool = KVCachePool(1, num_tokens, heads, HEAD_DIM, page_size=PAGE_SIZE, dtype=dtype, **scales)
    slots = pool.alloc(pool.num_slots).reshape(-1, PAGE_SIZE)
    for page in np.random.default_rng(0).permutation(len(slots)):
        pool.free(slots[page])
    return pool


def encoded(rows, name):
    """FP8 codes of `rows / SCALE`, saturated, with NumPy."""
    largest = FORMATS[name].largest
    quotient = np.clip(rows.astype(np.float32) / np.float32(SCALE), -largest, largest)
    return quotient.astype(getattr(ml_dtypes, name)).view(np.uint8)


def decoded(codes, name, dtype):
    """What the codes stand for, with NumPy."""
    values = codes.view(getattr(ml_dtypes, name)).astype(np.float32)
    return (values * np.float32(SCALE)).astype(dtype)


def encoded_by_torch(rows, name):
    """`encoded`, with torch."""
    largest = FORMATS[name].largest
    quotient = (rows.float() / SCALE).clamp(-largest, largest)
    return quotient.to(getattr(torch, name)).view(torch.uint8)


def decoded_by_torch(codes, name, dtype):
    """`decoded`, with torch."""
    return (codes.view(getattr(torch, name)).float() * SCALE).to(dtype)
