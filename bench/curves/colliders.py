"""Finds pages that collide in a hash without a secret, the worst that an index can be given.

`hash_pages` is a multiply-xor hash of two lanes, as the index of kvpool's tree had it before its
hash drew keys (`NodeArena.hash_page` in kvpool_ext/arena.pyx). Its first lane is
``a = (a ^ word) * K``: whatever the first word was, a second one brings the lane back to where it
should be. So pages that agree in the whole hash are written down, not searched for, if any int32
is a token. Those of a vocabulary are searched for, one bucket at a time. Against the keyed hash
they are pages like any others: the subject `collisions` measures that.
"""

import numba
import numpy as np

A_START, A_TIMES = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xFF51AFD7ED558CCD)
B_START, B_TIMES = np.uint64(0xD6E8FEB86659FD93), np.uint64(0xC4CEB9FE1A85EC53)
A_SHIFT, B_SHIFT = np.uint64(32), np.uint64(29)
VOCABULARY = 128_000


def hash_pages(pages, parent=0):
    """That hash of each page (``[n, page_size]`` int32, page_size a multiple of 4)."""
    num_pages, page_size = pages.shape
    words = np.ascontiguousarray(pages).view(np.uint64)
    with np.errstate(over="ignore"):
        a = np.full(num_pages, (np.uint64(parent) + np.uint64(1)) * A_START)
        b = np.full(num_pages, B_START)
        for i in range(0, page_size // 2, 2):
            a = (a ^ words[:, i]) * A_TIMES
            a ^= a >> A_SHIFT
            b = (b ^ words[:, i + 1]) * B_TIMES
            b ^= b >> B_SHIFT
        return (((a ^ b) * A_START) >> A_SHIFT).astype(np.uint32)


def written_pages(count, page_size, parent=0):
    """Distinct pages of one hash, all 32 bits; page_size a multiple of 4 and at least 8."""
    assert page_size >= 8
    assert page_size % 4 == 0
    words = np.zeros((count, page_size // 2), np.uint64)
    words[:, 0] = np.arange(count)  # the first word of lane a; words 1, 3, ... are lane b's
    with np.errstate(over="ignore"):
        a = ((np.uint64(parent) + np.uint64(1)) * A_START ^ words[:, 0]) * A_TIMES
    words[:, 2] = a ^ (a >> A_SHIFT)  # which makes the lane zero
    return words.view(np.int32)


@numba.njit(cache=False)
def _search(count, page_size, mask, bucket, vocabulary, seed, parent, most):
    """Pages of a vocabulary whose hash falls into one bucket, by trying up to `most`."""
    found = np.zeros((count, page_size), np.int32)
    page = np.zeros(page_size, np.int32)
    start = (np.uint64(parent) + np.uint64(1)) * A_START
    state, num_found = np.uint64(seed), 0
    for _ in range(most):
        for i in range(4):  # the first four tokens vary, of both lanes
            state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
            page[i] = (state >> np.uint64(33)) % np.uint64(vocabulary)
        a, b = start, B_START
        for i in range(0, page_size, 4):
            low = np.uint64(np.uint32(page[i])) | (np.uint64(np.uint32(page[i + 1])) << A_SHIFT)
            a = (a ^ low) * A_TIMES
            a ^= a >> A_SHIFT
            low = np.uint64(np.uint32(page[i + 2])) | (
                np.uint64(np.uint32(page[i + 3])) << A_SHIFT
            )
            b = (b ^ low) * B_TIMES
            b ^= b >> B_SHIFT
        key = ((a ^ b) * A_START) >> A_SHIFT
        if key & mask == bucket:
            found[num_found] = page
            num_found += 1
            if num_found == count:
                break
    return found[:num_found]


def searched_pages(count, page_size, num_buckets, parent=0, seed=1):
    """Distinct pages of the vocabulary that share one of so many buckets (a power of two)."""
    most = 4 * count * num_buckets
    found = _search(
        count,
        page_size,
        np.uint64(num_buckets - 1),
        np.uint64(0),
        VOCABULARY,
        seed,
        parent,
        most,
    )
    assert len(found) == count, f"{len(found)} of {count} pages in {most:,} tries"
    assert len(np.unique(found, axis=0)) == count
    return found
