"""Contents: the tensors of one snapshot, and the numbers that give their shapes.

All of them follow from a few numbers of the metadata. So a header is not interpreted: it is
compared with the one that these numbers make, and whatever differs is no snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpool.errors import SnapshotError
from kvpool.snapshot.checksums import DIGEST_BYTES
from kvpool.snapshot.container import Tensor
from kvpool.snapshot.fingerprint import Fingerprint, text_of, whole
from kvpool_ext.eviction import EVICTION_POLICIES

FORMAT = "kvpool-snapshot"
VERSION = 1
_INT32_MAX = (1 << 31) - 1
_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_ITEM_BYTES = {"U8": 1, "I32": 4}
_MOST_NAMESPACE_BYTES = 1 << 30


@dataclass(frozen=True)
class Contents:
    """What a snapshot holds, in numbers.

    Attributes
    ----------
    fingerprint : Fingerprint
        Model and shape.
    eviction : str
        Policy of the pool that was saved.
    num_slots : int
        Slots of that pool.
    num_pages : int
        Cached pages in the file.
    namespace_bytes : int
        Length of the encoded namespaces.

    Raises
    ------
    SnapshotError
        Namespaces longer than would be read back.
    """

    fingerprint: Fingerprint
    eviction: str
    num_slots: int
    num_pages: int
    namespace_bytes: int

    def __post_init__(self) -> None:
        if self.namespace_bytes > _MOST_NAMESPACE_BYTES:
            raise SnapshotError(
                f"the namespaces would have {self.namespace_bytes} bytes, at most "
                f"{_MOST_NAMESPACE_BYTES} are read back"
            )

    def metadata(self) -> dict[str, str]:
        """All of it as text."""
        return {
            "format": FORMAT,
            "version": str(VERSION),
            **self.fingerprint.to_metadata(),
            "eviction": self.eviction,
            "num_slots": str(self.num_slots),
            "num_pages": str(self.num_pages),
            "namespace_bytes": str(self.namespace_bytes),
        }

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name, in the order of the file: seal first, K and V last."""
        n, fingerprint = self.num_pages, self.fingerprint
        shapes: list[tuple[str, str, tuple[int, ...], int]] = [
            (name, dtype, shape, _ITEM_BYTES[dtype])
            for name, dtype, shape in (
                ("seal", "U8", (DIGEST_BYTES,)),
                ("page_checksums", "U8", (n, DIGEST_BYTES)),
                ("tokens", "I32", (n, fingerprint.page_size)),
                ("parents", "I32", (n,)),
                ("priorities", "I32", (n,)),
                ("namespace_ids", "I32", (n,)),
                ("namespaces", "U8", (self.namespace_bytes,)),
            )
        ]
        dtype = fingerprint.kv_dtype
        shapes.append(("kv", _DTYPES[dtype.name], (n, *fingerprint.page_shape), dtype.itemsize))
        tensors, begin = {}, 0
        for name, label, shape, item_bytes in shapes:
            end = begin + item_bytes * math.prod(shape)
            tensors[name] = Tensor(name, label, shape, begin, end)
            begin = end
        return tensors


def read_contents(metadata: Mapping[str, str], entries: Mapping[str, Any]) -> Contents:
    """Check a header and say what the file holds.

    Raises
    ------
    SnapshotError
        Another format, a newer version, a number out of range, a tensor that is not as expected.
    """
    if metadata.get("format") != FORMAT:
        raise SnapshotError(
            f"not a snapshot: expected format {FORMAT!r}, got {metadata.get('format')!r}"
        )
    version = whole(metadata, "version", 1, _INT32_MAX)
    if version != VERSION:
        raise SnapshotError(
            f"snapshot format {version} is newer than {VERSION}, which this kvpool reads: update "
            "kvpool, or start with an empty pool"
        )
    fingerprint = Fingerprint.from_metadata(metadata)
    eviction = text_of(metadata, "eviction")
    if eviction not in EVICTION_POLICIES:
        raise SnapshotError(f"unknown eviction policy {eviction[:40]!r}")
    page_size = fingerprint.page_size
    num_slots = whole(metadata, "num_slots", page_size, page_size * _INT32_MAX)
    if num_slots % page_size:
        raise SnapshotError(f"num_slots must be a multiple of {page_size}, got {num_slots}")
    contents = Contents(
        fingerprint,
        eviction,
        num_slots,
        whole(metadata, "num_pages", 0, num_slots // page_size),
        whole(metadata, "namespace_bytes", 0, _MOST_NAMESPACE_BYTES),
    )
    expected = {name: tensor.entry() for name, tensor in contents.tensors().items()}
    for name in expected.keys() | entries.keys():
        if entries.get(name) != expected.get(name):
            raise SnapshotError(
                f"tensor {name[:40]!r}: expected {expected.get(name)}, got "
                f"{str(entries.get(name))[:200]}"
            )
    return contents
