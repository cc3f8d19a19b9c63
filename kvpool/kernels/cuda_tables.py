"""The CUDA kernel that writes a step's page table and slots from what is on the device already.

A pool keeps the pages of every request in a device-resident *page map* ``[rows, max_pages]``,
which changes at bind and extend only. A step uploads the rows and lengths of its batch, and one
launch makes all that attention and put need. The grid is fixed and the batch size is read from
device memory, so a captured launch serves smaller batches too::

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


def make_page_table(slot_bytes: int) -> Any:
    """Return the kernel for write slots of `slot_bytes` bytes. Launch it with `THREADS` threads.

    Parameters of the kernel, with arrays in device memory:

    ``rows, lengths, starts`` : int32 ``[bucket]``
        Row of each request in the page map, its tokens after the step, and the position of the
        first token that the step writes.
    ``batch_size`` : int32 ``[1]``
        Requests of this step; the rest of the bucket is padding.
    ``page_map, map_stride`` : int32 ``[rows, max_pages]``
        Page ids, and the bytes from one row to the next.
    ``page_size, window, scratch_slot``
        Tokens per page, tokens that the step writes per request, and the slot for the writes of
        padding: one of the scratch page, or -1 for none.
    ``indptr, indices, last_page_len`` : int32 ``[bucket + 1], [all pages], [bucket]``
        The table. Padding has no pages and 0 as the last length.
    ``slots`` : ``[bucket, window]``
        Where the step writes.
    """
    load, store = cuda_access.load_integer(4), cuda_access.store(4)
    store_slot = cuda_access.store(slot_bytes)
    is_wide = slot_bytes == 8
    four, slot_size = np.uint64(4), np.uint64(slot_bytes)

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
        length, start, pages = np.uint32(0), np.uint32(0), page_map
        if request < batch:
            length = np.uint32(max(load(lengths + at), np.int64(0)))
            start = np.uint32(load(starts + at))
            pages = page_map + np.uint64(load(rows + at)) * map_stride
        num_pages = np.uint32(np.uint32(length + size - np.uint32(1)) // size)
        page = thread
        while page < num_pages:
            page_id = np.uint32(load(pages + np.uint64(page) * four))
            store(indices + np.uint64(np.uint32(first + page)) * four, (page_id,))
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
            slot = np.uint64(scratch_slot)
            if request < batch:
                position = np.uint32(start + token)
                page = np.uint32(position // size)
                offset = np.uint32(position - np.uint32(page * size))
                slot = np.uint64(load(pages + np.uint64(page) * four))
                slot = slot * np.uint64(size) + np.uint64(offset)
            low = np.uint32(slot & np.uint64(0xFFFFFFFF))
            target = slots + (np.uint64(request) * window + np.uint64(token)) * slot_size
            if is_wide:
                store_slot(target, (low, np.uint32(slot >> np.uint64(32))))
            else:
                store_slot(target, (low,))
            token = np.uint32(token + np.uint32(THREADS))

    return page_table
