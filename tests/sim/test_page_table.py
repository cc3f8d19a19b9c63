"""The kernels of page tables and the page map in the simulator, against lists."""

from itertools import chain

import numpy as np
import pytest

from kvpool.kernels import cuda_kernels, cuda_tables
from tests.sim import launching

pytestmark = [
    pytest.mark.sim,
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

UNTOUCHED = -77
MAX_PAGES = 40


@pytest.fixture
def few_threads(monkeypatch):
    """Fewer threads than requests, pages and tokens, so that each loop takes several turns."""
    monkeypatch.setattr(cuda_tables, "THREADS", 4)
    return 4


def launch(page_map, requests, batch, page_size, window, scratch_slot, *, slot_dtype, threads):
    """Run the kernel over the bucket of all requests; returns the table and the slots."""
    rows, lengths, starts = requests
    bucket = len(rows)
    rows, lengths, starts, size = (
        np.array(values, np.int32) for values in (rows, lengths, starts, [batch])
    )
    indptr, last_page_len = (np.full(n, UNTOUCHED, np.int32) for n in (bucket + 1, bucket))
    indices = np.full(bucket * MAX_PAGES, UNTOUCHED, np.int32)
    slots = np.full((bucket, window), UNTOUCHED, slot_dtype)
    arrays = {
        "rows": rows,
        "lengths": lengths,
        "starts": starts,
        "batch_size": size,
        "page_map": page_map,
        "indptr": indptr,
        "indices": indices,
        "last_page_len": last_page_len,
        "slots": slots,
    }
    values = {name: launching.address(array) for name, array in arrays.items()}
    values |= {
        "map_stride": page_map.strides[0],
        "page_size": page_size,
        "window": window,
        "scratch_slot": scratch_slot,
    }
    spec = cuda_kernels.KernelSpec(
        "page_table",
        cuda_tables.make_page_table(np.dtype(slot_dtype).itemsize),
        cuda_kernels.PARAMETERS["page_table"],
    )
    launching.run(spec, values, grid=(bucket, 1, 1), block=(threads, 1, 1))
    return indptr, indices, last_page_len, slots


def expected(page_map, requests, batch, page_size, window, scratch_slot):
    rows, lengths, starts = requests
    pages = [
        page_map[row, : -(-length // page_size)].tolist() if b < batch else []
        for b, (row, length) in enumerate(zip(rows, lengths, strict=True))
    ]
    indptr = np.cumsum([0, *map(len, pages)]).tolist()
    last = [
        (length - 1) % page_size + 1 if b < batch and length else 0
        for b, length in enumerate(lengths)
    ]
    slots = [
        [
            page_map[row, p // page_size] * page_size + p % page_size
            for p in range(start, start + window)
        ]
        if b < batch and start >= 0
        else [scratch_slot + i % page_size for i in range(b * window, (b + 1) * window)]
        for b, (row, start) in enumerate(zip(rows, starts, strict=True))
    ]
    return indptr, list(chain(*pages)), last, slots


@pytest.mark.parametrize("slot_dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("lengths", "batch", "page_size", "window"),
    [
        ([1, 9, 16, 30, 5, 8, 4], 7, 4, 1),  # the bucket is full
        ([1, 9, 16, 30, 5, 8, 4], 4, 4, 1),  # three rows of padding
        ([33, 8, 7], 3, 8, 3),  # a verify window
        ([9, 0, 20, 6, 6], 5, 3, 6),  # an empty request; the window is longer than a block
        ([12, 40], 1, 5, 2),
        ([3, 2, 1], 0, 1, 1),  # nothing but padding
        ([12, 5, 7, 1, 1], 5, 1, 1),
        ([112, 3, 110, 96, 120, 49], 6, 3, 7),  # more pages than a thread has in flight
        ([33, 8, -9, -3, 7], 4, 8, 3),  # negative: the request writes to scratch slots
        ([-5] * 9, 8, 6, 5),
    ],
)
def test_page_table_and_slots_match_lists(
    lengths, batch, page_size, window, slot_dtype, few_threads
):
    rng = np.random.default_rng(34)
    page_map = rng.permutation(10 * MAX_PAGES).reshape(10, MAX_PAGES).astype(np.int32)
    rows = rng.permutation(10)[: len(lengths)].tolist()
    starts = [max(length - window, 0) if length >= 0 else length for length in lengths]
    lengths = [abs(length) for length in lengths]
    arguments = (page_map, (rows, lengths, starts), batch, page_size, window, 9001)
    want_indptr, want_indices, want_last, want_slots = expected(*arguments)
    indptr, indices, last_page_len, slots = launch(
        *arguments, slot_dtype=slot_dtype, threads=few_threads
    )
    assert indptr.tolist() == want_indptr
    assert indices[: len(want_indices)].tolist() == want_indices
    assert (indices[len(want_indices) :] == UNTOUCHED).all()
    assert last_page_len.tolist() == want_last
    assert slots.tolist() == want_slots


@pytest.mark.parametrize("slot_dtype", [np.int32, np.int64])
def test_writes_to_scratch_may_be_skipped(slot_dtype, few_threads):
    page_map = np.arange(24, dtype=np.int32).reshape(2, 12)
    *_, slots = launch(
        *(page_map, ([1, 0, 0], [5, 5, 5], [4, -1, 4]), 2, 4, 1, -1),
        slot_dtype=slot_dtype,
        threads=few_threads,
    )
    assert slots.tolist() == [[13 * 4], [-1], [-1]]


def test_more_requests_than_one_turn_of_the_sum_takes(few_threads):
    rng = np.random.default_rng(7)
    page_map = rng.integers(0, 2**31, (100, MAX_PAGES), np.int32)
    lengths, rows = rng.integers(0, 60, 100).tolist(), rng.permutation(100).tolist()
    arguments = (page_map, (rows, lengths, [-1] * 100), 97, 3, 1, 77)
    want_indptr, want_indices, want_last, want_slots = expected(*arguments)
    indptr, indices, last_page_len, slots = launch(
        *arguments, slot_dtype=np.int64, threads=few_threads
    )
    assert indptr.tolist() == want_indptr
    assert indices[: len(want_indices)].tolist() == want_indices
    assert (last_page_len.tolist(), slots.tolist()) == (want_last, want_slots)


def test_runs_are_copied_into_the_map(few_threads):
    """One run per block: a row from its start, the tail of one, none of a third."""
    runs = np.array([(2, 0, 9, 5), (0, 5, 1, 3), (4, 3, 0, 0), (4, 7, 4, 14)], np.int32)
    ints = np.random.default_rng(8).integers(0, 99, 18, np.int32)
    page_map = np.full((5, 12), UNTOUCHED, np.int32)
    want = page_map.copy()
    for row, first, count, at in runs.tolist():
        want[row, first : first + count] = ints[at : at + count]
    spec = cuda_kernels.KernelSpec(
        "map_pages", cuda_tables.make_map_pages(), cuda_kernels.PARAMETERS["map_pages"]
    )
    arrays = {"runs": runs, "ints": ints, "page_map": page_map}
    values = {name: launching.address(array) for name, array in arrays.items()}
    values["map_stride"] = page_map.strides[0]
    launching.run(spec, values, grid=(len(runs), 1, 1), block=(few_threads, 1, 1))
    assert page_map.tolist() == want.tolist()


def test_slots_past_int32(few_threads):
    page_map = np.array([[2**31 - 1]], np.int32)
    *_, slots = launch(
        *(page_map, ([0], [16], [15]), 1, 16, 1, -1), slot_dtype=np.int64, threads=few_threads
    )
    assert slots.tolist() == [[(2**31 - 1) * 16 + 15]]


def test_all_threads_of_a_block():
    page_map = np.arange(24, dtype=np.int32).reshape(2, 12)
    indptr, indices, last_page_len, slots = launch(
        *(page_map, ([1, 0], [9, 5], [8, 4]), 2, 4, 1, -1),
        slot_dtype=np.int64,
        threads=cuda_tables.THREADS,
    )
    assert (indptr.tolist(), last_page_len.tolist()) == ([0, 3, 5], [1, 1])
    assert indices[:5].tolist() == [12, 13, 14, 0, 1]
    assert slots.tolist() == [[14 * 4], [4]]
