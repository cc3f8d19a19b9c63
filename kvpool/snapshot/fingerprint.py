"""Fingerprint: which model and which shape of pool the bytes of a snapshot belong to."""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.dtypes import KVDType, check_scale, dtype_name
from kvpool.errors import SnapshotError
from kvpool.layout import KVCacheLayout

# Far above any model, far below where a product of them would need care.
LIMITS = {
    "num_layers": 1 << 16,
    "num_kv_heads": 1 << 16,
    "head_dim": 1 << 16,
    "page_size": 1 << 20,
}
MOST_PAGE_BYTES = 1 << 40
MOST_MODEL_CHARACTERS = 4096
Scale = float | tuple[float, ...]

# An error message shows a hash or a name in full, and of a long text both ends.
_shown = reprlib.Repr()
_shown.maxstring = 160
_shown.maxother = 2000
_shown.maxtuple = _shown.maxlist = 128


@dataclass(frozen=True)
class Fingerprint:
    """What must agree before cached K and V mean anything.

    Attributes
    ----------
    model : str
        What the caller calls the weights: a hash of them, or a name with a revision.
    num_layers, num_kv_heads, head_dim : int
        Shape of one token.
    page_size : int
        Tokens per page.
    dtype, compute_dtype : str
        Storage dtype, and the one that `get` returns.
    k_scale, v_scale : float or tuple of float
        FP8 scales, one number or one per layer.

    Raises
    ------
    SnapshotError
        A number out of range, an unknown dtype, a bad scale.
    """

    model: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    compute_dtype: str
    k_scale: Scale
    v_scale: Scale

    def __post_init__(self) -> None:
        try:
            self.model.encode()
        except UnicodeEncodeError:
            raise SnapshotError(
                f"model must be text that UTF-8 can hold, got {_shown.repr(self.model)}"
            ) from None
        if len(self.model) > MOST_MODEL_CHARACTERS:
            raise SnapshotError(
                f"model must have at most {MOST_MODEL_CHARACTERS} characters, got "
                f"{len(self.model)}: give a hash of it"
            )
        for name, most in LIMITS.items():
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise SnapshotError(f"{name} must be in 1 .. {most}, got {value}")
        try:
            dtype = KVDType.of(self.dtype, self.compute_dtype)
            for name in ("k_scale", "v_scale"):
                check_scale(getattr(self, name), name, self.num_layers, dtype)
        except ValueError as error:
            raise SnapshotError(str(error)) from None
        if self.page_bytes > MOST_PAGE_BYTES:
            raise SnapshotError(
                f"a page must have at most {MOST_PAGE_BYTES} bytes of K and V, got "
                f"{self.page_bytes}"
            )

    @property
    def kv_dtype(self) -> KVDType:
        """Both dtypes as a pool has them."""
        return KVDType.of(self.dtype, self.compute_dtype)

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of K and V of one page, ``[2, num_layers, page_size, num_kv_heads, head_dim]``."""
        return (2, self.num_layers, self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of K and V of one page over all layers."""
        size = self.kv_dtype.itemsize
        for axis in self.page_shape:
            size *= axis
        return size

    @classmethod
    def of(
        cls,
        model: str,
        layout: KVCacheLayout,
        page_size: int,
        dtype: KVDType,
        k_scale: float | NDArray[np.float32],
        v_scale: float | NDArray[np.float32],
    ) -> Fingerprint:
        """That of a pool, from its parts; TypeError for a `model` that is no str."""
        check_model(model)
        k, v = (
            float(scale) if np.ndim(scale) == 0 else tuple(np.asarray(scale).tolist())
            for scale in (k_scale, v_scale)
        )
        return cls(
            model,
            layout.num_layers,
            layout.num_kv_heads,
            layout.head_dim,
            page_size,
            dtype.name,
            dtype.compute,
            k,
            v,
        )

    # ---- as text

    def to_metadata(self) -> dict[str, str]:
        """Every field as text, floats bit for bit."""
        return {field.name: _to_text(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> Fingerprint:
        """Read back what `to_metadata` gave; SnapshotError for anything else."""
        numbers = {name: whole(metadata, name, 1, most) for name, most in LIMITS.items()}
        scales = {name: _scale(text_of(metadata, name), name) for name in ("k_scale", "v_scale")}
        # Cut, so that an error message does not hold a whole header.
        words = {name: text_of(metadata, name)[:64] for name in ("dtype", "compute_dtype")}
        words["model"] = text_of(metadata, "model")
        return cls(**words, **numbers, **scales)  # type: ignore[arg-type]

    def digest(self) -> bytes:
        """32 bytes that differ where any field does."""
        return hashlib.sha256(json.dumps(self.to_metadata(), sort_keys=True).encode()).digest()

    # ---- compared

    def require(self, expected: Mapping[str, Any]) -> None:
        """Compare with what the caller expects, by the names of a pool's arguments.

        Raises
        ------
        SnapshotError
            Lists each difference.
        """
        found = []
        for name, value in expected.items():
            saved = getattr(self, name)
            if name in ("k_scale", "v_scale"):
                equal = np.array_equal(self._bits(value), self._bits(saved))
            else:
                value = dtype_name(value) if name in ("dtype", "compute_dtype") else value
                equal = value == saved
            if not equal:
                found.append(f"{name}: expected {_shown.repr(value)}, got {_shown.repr(saved)}")
        if found:
            raise SnapshotError(
                "the snapshot is of another model or pool, so its K and V mean nothing here: "
                + "; ".join(found)
            )

    def _bits(self, scale: Any) -> NDArray[np.uint32]:
        # Kernels know float32 only: two scales that are equal in it are one.
        with np.errstate(over="ignore"):
            rounded = np.asarray(scale, np.float64).astype(np.float32)
        if rounded.ndim == 0:
            rounded = np.full(self.num_layers, rounded)
        return rounded.view(np.uint32)


def check_model(model: Any) -> None:
    """TypeError for a name of a model that is no str."""
    if not isinstance(model, str):
        raise TypeError(f"model must be a str, got {type(model).__name__}")


def text_of(metadata: Mapping[str, str], name: str) -> str:
    """The entry `name`; SnapshotError where it is missing or no text."""
    value = metadata.get(name)
    if not isinstance(value, str):
        raise SnapshotError(f"the header has no text {name!r}")
    return value


def whole(metadata: Mapping[str, str], name: str, least: int, most: int) -> int:
    """The entry `name` as an int in ``least .. most``; SnapshotError for anything else."""
    text = text_of(metadata, name)
    # Length first: no huge number is ever made.
    if not re.fullmatch("[0-9]{1,19}", text) or not least <= int(text) <= most:
        raise SnapshotError(f"{name} must be in {least} .. {most}, got {text[:40]!r}")
    return int(text)


def _to_text(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_to_text, value))
    return value.hex() if isinstance(value, float) else str(value)


def _scale(text: str, name: str) -> Scale:
    try:
        values = tuple(map(float.fromhex, text.split(" ")))
    except (ValueError, OverflowError):
        raise SnapshotError(f"{name} must be hexadecimal floats, got {text[:40]!r}") from None
    # One layer: [x] and x come to the same.
    return values[0] if len(values) == 1 else values
