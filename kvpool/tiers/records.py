"""PageRecords: one page as bytes, with all that tells whether it is the one that was asked for.

A record is ``magic, length, key, checksum, tokens, padding, K and V``; K and V begin at a multiple
of 64 bytes. The checksum covers key, tokens, K and V. A record that was torn, altered, mixed up or
written for another prefix does not verify, and whoever asked takes it for a miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.page_keys import KEY_BYTES
from kvpool.snapshot.fingerprint import Fingerprint

_MAGIC = np.frombuffer(b"kvpage\x00\x01", np.uint8)
_ALIGNMENT = 64
_LENGTH = slice(8, 16)
_KEY = slice(16, 16 + KEY_BYTES)
_CHECKSUM = slice(48, 48 + 32)
_TOKENS = 80


class PageRecords:
    """The layout of the records of one pool, and their making and checking.

    Parameters
    ----------
    fingerprint : Fingerprint
        Shape and dtype of the pool.

    Attributes
    ----------
    record_bytes : int
        Length of one record.
    """

    def __init__(self, fingerprint: Fingerprint) -> None:
        self._page_shape = fingerprint.page_shape
        self._dtype = fingerprint.kv_dtype.storage
        self._tokens = slice(_TOKENS, _TOKENS + 4 * fingerprint.page_size)
        begin = -(-self._tokens.stop // _ALIGNMENT) * _ALIGNMENT
        self._kv = slice(begin, begin + fingerprint.page_bytes)
        self.record_bytes = -(-self._kv.stop // _ALIGNMENT) * _ALIGNMENT
        self._length = np.frombuffer(self.record_bytes.to_bytes(8, "little"), np.uint8)

    def empty(self, num_records: int) -> NDArray[np.uint8]:
        """Zeroed rows, uint8 ``[num_records, record_bytes]``."""
        return np.zeros((num_records, self.record_bytes), np.uint8)

    def kv(self, rows: NDArray[np.uint8]) -> NDArray[Any]:
        """K and V of `rows` ``[n, record_bytes]``, a view.

        ``[n, 2, num_layers, page_size, num_kv_heads, head_dim]`` in the storage dtype.
        """
        return rows[:, self._kv].view(self._dtype).reshape(len(rows), *self._page_shape)

    def seal(
        self, rows: NDArray[np.uint8], keys: Sequence[bytes], tokens: NDArray[np.int32]
    ) -> None:
        """Complete rows whose K and V are filled in.

        Parameters
        ----------
        rows : ndarray
            uint8 ``[n, record_bytes]``.
        keys : sequence of bytes
            ``[n]``.
        tokens : ndarray
            int32 ``[n, page_size]``.
        """
        rows[:, : _MAGIC.size] = _MAGIC
        rows[:, _LENGTH] = self._length
        rows[:, self._tokens] = np.ascontiguousarray(tokens, "<i4").view(np.uint8)
        for row, key in zip(rows, keys, strict=True):
            row[_KEY] = np.frombuffer(key, np.uint8)
            row[_CHECKSUM] = np.frombuffer(self._checksum(row), np.uint8)

    def verify(
        self, rows: NDArray[np.uint8], keys: Sequence[bytes], tokens: NDArray[np.int32]
    ) -> list[bool]:
        """Whether each row is whole, and the record of this key and these tokens."""
        expected = np.ascontiguousarray(tokens, "<i4").view(np.uint8)
        found = (rows[:, : _MAGIC.size] == _MAGIC).all(1) & (rows[:, _LENGTH] == self._length).all(
            1
        )
        found &= (rows[:, self._tokens] == expected).all(1)
        return [
            bool(may)
            and row[_KEY].tobytes() == key
            and row[_CHECKSUM].tobytes() == self._checksum(row)
            for may, row, key in zip(found, rows, keys, strict=True)
        ]

    def _checksum(self, row: NDArray[np.uint8]) -> bytes:
        digest = sha256(row[_KEY].data)
        digest.update(row[self._tokens].data)
        digest.update(row[self._kv].data)
        return digest.digest()
