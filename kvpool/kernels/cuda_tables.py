"""The CUDA kernels that write a step's page table and slots from what is on the device already.

A pool keeps the pages of every request in a device-resident *page map* ``[rows, max_pages]``,
which changes at bind and extend only; `make_map_pages` brings it up to date then. A step uploads
the rows and lengths of its batch, and one launch of `make_page_table` makes all that attention and
put need. Its grid is fixed and the batch size is read from device memory, so a captured launch
serves smaller batches too::

    blockIdx.x    request of the batch, up to the bucket that was captured
    threadIdx.x   page of the request

A block finds where its pages start by summing the page counts of the requests before it: O(batch)
loads per block from L2, in place of a grid-wide scan or a second launch. That is cheap up to about
a thousand requests.
"""

from typing import Any

import numpy as np
from numba import cuda, types

from kvpool.kernels import cuda_access

THREADS = 128  # a power of two, for the halving sum
# Page ids that a thread has in flight: a long request is a row of L2 round trips otherwise.
UNROLL = 4
RUN_INTS = 4  # of a record of `make_map_pages`


def make_map_pages() -> Any:
    """Return the kernel that copies runs of page ids into the page map.

    Launch it with a block of `THREADS` threads for each run. Parameters of the kernel, with arrays
    in device memory:

    ``runs`` : int32 ``[num_runs, RUN_INTS]``
        Row of the map, column of the first page, number of pages, and where in `ints` they are.
    ``ints`` : int32
        What the page ids of all runs are in.
    ``page_map, map_stride`` : int32 ``[rows, max_pages]``
        Page ids, and the bytes from one row to the next.
    """
    load, store = cuda_access.load_integer(4), cuda_access.store(4)
    four = np.uint64(4)

    def map_pages(runs: Any, ints: Any, page_map: Any, map_stride: Any) -> None:
        run = runs + np.uint64(np.uint32(cuda.blockIdx.x)) * np.uint64(RUN_INTS * 4)
        row, first_page = np.uint64(load(run)), np.uint64(load(run + four))
        count = np.uint32(load(run + np.uint64(8)))
        source = ints + np.uint64(load(run + np.uint64(12))) * four
        target = page_map + row * map_stride + first_page * four
        page = np.uint32(cuda.threadIdx.x)
        while page < count:
            at = np.uint64(page) * four
            store(target + at, (np.uint32(load(source + at)),))
            page = np.uint32(page + np.uint32(THREADS))

    return map_pages


def make_page_table(slot_bytes: int) -> Any:
    """Return the kernel for write slots of `slot_bytes` bytes. Launch it with `THREADS` threads.

    Parameters of the kernel, with arrays in device memory:

    ``rows, lengths, starts`` : int32 ``[bucket]``
        Row of each request in the page map, its tokens after the step, and the position of the
        first token that the step writes; negative if all that it writes is for the scratch page.
    ``batch_size`` : int32 ``[1]``
        Requests of this step; the rest of the bucket is padding.
    ``page_map, map_stride`` : int32 ``[rows, max_pages]``
        Page ids, and the bytes from one row to the next.
    ``page_size, window, scratch_slot``
        Tokens per page, tokens that the step writes per request, and the first slot of the
        scratch page, or -1 for no such page.
    ``indptr, indices, last_page_len`` : int32 ``[bucket + 1], [all pages], [bucket]``
        The table. Padding has no pages and 0 as the last length.
    ``slots`` : ``[bucket, window]``
        Where the step writes. Element i of the whole array, where it belongs to padding or to a
        request with a negative start, is ``scratch_slot + i % page_size``: not all of them in one
        slot, whose cache lines would be written one after the other. Without a scratch page it is
        -1.
    """
    load, store = cuda_access.load_integer(4), cuda_access.store(4)
    store_slot = cuda_access.store(slot_bytes)
    is_wide = slot_bytes == 8
    four, slot_size = np.uint64(4), np.uint64(slot_bytes)
    turn = np.uint64(THREADS * 4)  # bytes from an int32 of a thread to its next one
    negative = np.uint64(2**63)  # and above: where two's complement says so

    def page_table(
        rows: Any,
        lengths: Any,
        starts: Any,
        batch_size: Any,
        page_map: Any,
        map_stride: Any,
        page_size: Any,
        window: Any,
        scratch_slot: Any,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        slots: Any,
    ) -> None:
        request, thread = np.uint32(cuda.blockIdx.x), np.uint32(cuda.threadIdx.x)
        size = np.uint32(page_size)
        batch = np.uint32(load(batch_size))
        pages_before = cuda.shared.array(THREADS, types.uint32)
        total = np.uint32(0)
        other = thread
        while other < min(request, batch):
            length = np.uint32(max(load(lengths + np.uint64(other) * four), np.int64(0)))
            total = np.uint32(total + np.uint32(np.uint32(length + size - np.uint32(1)) // size))
            other = np.uint32(other + np.uint32(THREADS))
        pages_before[thread] = total
        cuda.syncthreads()
        half = np.uint32(THREADS // 2)
        while half > np.uint32(0):
            if thread < half:
                pages_before[thread] = np.uint32(
                    pages_before[thread] + pages_before[np.uint32(thread + half)]
                )
            cuda.syncthreads()
            half = np.uint32(half >> np.uint32(1))
        first = pages_before[0]

        at = np.uint64(request) * four
        length, start, pages = np.uint32(0), np.int64(-1), page_map
        if request < batch:
            length = np.uint32(max(load(lengths + at), np.int64(0)))
            start = load(starts + at)
            pages = page_map + np.uint64(load(rows + at)) * map_stride
        num_pages = np.uint32(np.uint32(length + size - np.uint32(1)) // size)
        source = pages + np.uint64(thread) * four
        target = indices + np.uint64(np.uint32(first + thread)) * four
        page = thread
        while np.uint32(page + np.uint32((UNROLL - 1) * THREADS)) < num_pages:
            id_0 = np.uint32(load(source))
            id_1 = np.uint32(load(source + turn))
            id_2 = np.uint32(load(source + turn + turn))
            id_3 = np.uint32(load(source + turn + turn + turn))
            store(target, (id_0,))
            store(target + turn, (id_1,))
            store(target + turn + turn, (id_2,))
            store(target + turn + turn + turn, (id_3,))
            source += np.uint64(UNROLL) * turn
            target += np.uint64(UNROLL) * turn
            page = np.uint32(page + np.uint32(UNROLL * THREADS))
        while page < num_pages:
            store(target, (np.uint32(load(source)),))
            source += turn
            target += turn
            page = np.uint32(page + np.uint32(THREADS))
        if thread == np.uint32(0):
            if request == np.uint32(0):
                store(indptr, (np.uint32(0),))
            store(indptr + at + four, (np.uint32(first + num_pages),))
            full = np.uint32(np.uint32(num_pages - np.uint32(1)) * size)
            last = np.uint32(length - full) if num_pages > np.uint32(0) else np.uint32(0)
            store(last_page_len + at, (last,))
        token = thread
        while token < window:
            which = np.uint64(request) * window + np.uint64(token)
            slot = np.uint64(scratch_slot)
            if start >= np.int64(0):
                position = np.uint32(np.uint32(start) + token)
                page = np.uint32(position // size)
                offset = np.uint32(position - np.uint32(page * size))
                slot = np.uint64(load(pages + np.uint64(page) * four))
                slot = slot * np.uint64(size) + np.uint64(offset)
            elif slot < negative:
                turns = np.uint32(np.uint32(which) // size)
                slot = slot + np.uint64(np.uint32(np.uint32(which) - np.uint32(turns * size)))
            low = np.uint32(slot & np.uint64(0xFFFFFFFF))
            target = slots + which * slot_size
            if is_wide:
                store_slot(target, (low, np.uint32(slot >> np.uint64(32))))
            else:
                store_slot(target, (low,))
            token = np.uint32(token + np.uint32(THREADS))

    return page_table
