"""Page keys: what a cached page is called outside of its pool.

A key names one page of one prefix of one model, whoever computes it: SHA-256 over the format, the
fingerprint of model and pool, the part of the model that this rank holds, the namespace, and then,
page by page down the prefix, the key above and the page's tokens. Two pools that agree in all of
this may exchange pages; what differs in any of it is never found.

The chain is that of vLLM's block hashes and of SGLang's storage tiers; what goes into its root is
kvpool's own, so that keys are never equal across engines.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from kvpool.numbers import whole_number
from kvpool.snapshot.fingerprint import Fingerprint
from kvpool.snapshot.namespaces import ExtraKey, encode_namespace

KEY_BYTES = 32
_FORMAT = 1
# hashlib keeps the GIL for what is as short as a page's tokens. So that a scheduler that waits for
# it waits for microseconds, and not for Python's switch interval, a long chain is put down often.
_PAGES_AT_ONCE = 64
_PAUSE_S = 2e-5


@dataclass(frozen=True)
class Partition:
    """Which part of a model's K and V a pool holds; how much of it, its layout says.

    Attributes
    ----------
    first_layer : int
        Layer of the model that is the pool's layer 0: not 0 under pipeline parallelism.
    first_kv_head : int
        K/V head of the model that is the pool's head 0: ``rank * num_kv_heads`` under tensor
        parallelism.
    """

    first_layer: int = 0
    first_kv_head: int = 0

    def __post_init__(self) -> None:
        whole_number(self.first_layer, "first_layer")
        whole_number(self.first_kv_head, "first_kv_head")


class PageKeys:
    """Makes the keys of one pool's pages; any thread may.

    Parameters
    ----------
    fingerprint : Fingerprint
        Model, shape, dtypes and scales of the pool.
    partition : Partition
        What part of the model that is.

    Raises
    ------
    TypeError
        A partition that is none.
    """

    def __init__(self, fingerprint: Fingerprint, partition: Partition | None = None) -> None:
        if partition is not None and not isinstance(partition, Partition):
            raise TypeError(f"partition must be a Partition, got {type(partition).__name__}")
        self.fingerprint = fingerprint
        self.partition = Partition() if partition is None else partition
        self.page_size = fingerprint.page_size

    def root(self, extra_key: ExtraKey) -> bytes:
        """What the first page of a namespace hangs below; the key of no page."""
        part = [self.partition.first_layer, self.partition.first_kv_head]
        described = [_FORMAT, self.fingerprint.to_metadata(), part, encode_namespace(extra_key)]
        return sha256(json.dumps(described, sort_keys=True).encode()).digest()

    def below(
        self, above: bytes, tokens: NDArray[np.int32], *, pause: bool = False
    ) -> list[bytes]:
        """Keys of the pages that follow `above`, each below the one before.

        Parameters
        ----------
        above : bytes
            Key of the page before, or `root`.
        tokens : ndarray
            int32 ``[n, page_size]``.
        pause : bool
            Let other threads have the interpreter every few pages: for threads in the background.
        """
        keys: list[bytes] = []
        rows = np.ascontiguousarray(tokens, "<i4")
        row_bytes = 4 * self.page_size
        for begin in range(0, len(rows), _PAGES_AT_ONCE):
            if pause and begin:
                time.sleep(_PAUSE_S)
            # Bytes are joined before they are hashed: three calls a page take half as long again.
            data = rows[begin : begin + _PAGES_AT_ONCE].tobytes()
            for start in range(0, len(data), row_bytes):
                above = sha256(above + data[start : start + row_bytes]).digest()
                keys.append(above)
        return keys

    def of_tokens(
        self, tokens: NDArray[np.int32], extra_key: ExtraKey, *, pause: bool = False
    ) -> list[bytes]:
        """Keys of the whole pages of `tokens` ``[n]``, from the first on; a tail has none."""
        num_pages = len(tokens) // self.page_size
        paged = tokens[: num_pages * self.page_size].reshape(num_pages, self.page_size)
        return self.below(self.root(extra_key), paged, pause=pause)
