"""K values that are a print of namespace, token history, position and layer: any mix-up shows.

V is K's negative. All prints are whole numbers that float32 holds exactly, and none is zero.
"""

import zlib

import numpy as np

LAYERS, HEAD_DIM = 2, 4
UNKNOWN = np.float32(np.nan)  # the contract does not say what a read finds here
FACTOR = 6364136223846793005  # odd, so that its powers have inverses modulo 2^64
MAX_TOKENS = 1 << 14


def _powers(base):
    out = np.empty(MAX_TOKENS, np.uint64)
    power = 1
    for i in range(MAX_TOKENS):
        out[i] = power
        power = power * base % 2**64
    return out


POWERS = _powers(FACTOR)
INVERSES = _powers(pow(FACTOR, -1, 2**64))


def k_prints(tokens, key, num_layers):
    """What each position of this history must hold, float32 ``[num_layers, len(tokens)]``."""
    tokens = np.asarray(tokens, np.int64).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    n = len(tokens)
    # sum of token[i] * FACTOR^(p - i) for i <= p: a number a history, built without a loop
    history = np.cumsum(tokens * INVERSES[:n], dtype=np.uint64) * POWERS[:n]
    history ^= np.uint64(zlib.crc32(repr((type(key).__name__, key)).encode()))
    layers = np.arange(1, num_layers + 1, dtype=np.uint64)[:, None] * np.uint64(0xD1B54A32D192ED03)
    mixed = (history[None] ^ layers) * np.uint64(0x9FB21C651E98DF25)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(FACTOR)
    return (1 + (mixed >> np.uint64(44))).astype(np.float32)


def k_rows(prints, head_dim):
    """K ``[..., 1, head_dim]`` of prints ``[...]``; zero stays zero, unknown unknown."""
    offsets = np.arange(head_dim, dtype=np.float32) * np.float32(2**20)
    return (prints[..., None] + offsets * (prints[..., None] != 0))[..., None, :].astype(
        np.float32
    )
