"""Save: the cached pages of a tree, streamed into a file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import KVCacheStateError
from kvpool.snapshot.checksums import PageHasher, page_identities, seal_of
from kvpool.snapshot.columns import PageColumns, columns_of
from kvpool.snapshot.container import encode_header
from kvpool.snapshot.contents import Contents
from kvpool.snapshot.fingerprint import Fingerprint
from kvpool.snapshot.namespaces import encode_namespaces
from kvpool.snapshot.replacement import Replacement
from kvpool.snapshot.reports import SaveReport
from kvpool.storage import KVStorage
from kvpool_ext.radix import RadixCache

CHUNK_BYTES = 32 << 20  # of K and V in memory at once; on its way it stands there twice


def save_snapshot(
    path: str,
    tree: RadixCache,
    storage: KVStorage,
    fingerprint: Fingerprint,
    confirm: Callable[[NDArray[np.int32]], None] | None = None,
) -> SaveReport:
    """Write every cached page of `tree` to `path`; neither tree nor storage changes.

    `confirm` gets the page ids int32 ``[n]`` before anything is written, and raises if one of
    them is damaged: the checksums in the file would vouch for it.

    Raises
    ------
    OSError
        From the file system; what was at `path` is as before.
    SnapshotError
        A pool of a shape that no snapshot holds.
    KVCacheStateError
        A signal handler or a finalizer changed the tree meanwhile; `path` is as before.
    """
    evicted_before = tree.evicted_pages
    columns, page_ids = columns_of(tree)
    if confirm is not None:
        confirm(page_ids)
    namespaces = encode_namespaces(columns.namespaces)
    contents = Contents(
        fingerprint, tree.eviction, storage.num_slots, columns.num_pages, len(namespaces)
    )
    tensors = contents.tensors()
    header = encode_header(contents.metadata(), list(tensors.values()))
    block = np.zeros(tensors["kv"].begin, np.uint8)
    for name in ("tokens", "parents", "priorities", "namespace_ids"):
        column = np.ascontiguousarray(getattr(columns, name), "<i4")
        block[tensors[name].begin : tensors[name].end] = column.ravel().view(np.uint8)
    block[tensors["namespaces"].begin :] = np.frombuffer(namespaces, np.uint8)
    with Replacement(path) as file:
        file.write(header)
        file.write(block)
        checksums = tensors["page_checksums"]
        block[checksums.begin : checksums.end] = _write_pages(
            file, storage, columns, page_ids, fingerprint
        )
        seal = tensors["seal"]
        block[: seal.end] = np.frombuffer(seal_of(header, block[seal.end :].data), np.uint8)
        file.seek(len(header))
        file.write(block[: checksums.end])
        # A page leaves the tree by an eviction or by a reset.
        still_there = np.isin(page_ids, columns_of(tree)[1])
        if tree.evicted_pages != evicted_before or not still_there.all():
            raise KVCacheStateError("the tree changed while it was saved: nothing was saved")
    return SaveReport(
        file.path,
        columns.num_pages,
        columns.tokens.size,
        len(columns.namespaces),
        len(header) + tensors["kv"].end,
    )


def _write_pages(
    file: Replacement,
    storage: KVStorage,
    columns: PageColumns,
    page_ids: NDArray[np.int32],
    fingerprint: Fingerprint,
) -> NDArray[np.uint8]:
    """Append K and V of all pages; their checksums, one after the other."""
    identities = page_identities(
        fingerprint.digest(),
        columns.namespaces,
        columns.namespace_ids,
        columns.parents,
        columns.tokens,
    )
    step = max(1, CHUNK_BYTES // fingerprint.page_bytes)
    staging = np.empty((min(step, page_ids.size), *fingerprint.page_shape), storage.dtype.storage)
    checksums: list[bytes] = []
    with PageHasher() as hasher:
        for begin in range(0, page_ids.size, step):
            chunk = page_ids[begin : begin + step]
            # In the file a page is one piece, in the buffers it is one a layer.
            for part, stored in enumerate(storage.read_pages(chunk)):
                staging[: chunk.size, part] = storage.device.to_host(stored).swapaxes(0, 1)
            rows = staging.view(np.uint8).reshape(len(staging), -1)[: chunk.size]
            checksums += hasher.checksums(identities[begin : begin + step], rows)
            file.write(rows)
    return np.frombuffer(b"".join(checksums), np.uint8)
