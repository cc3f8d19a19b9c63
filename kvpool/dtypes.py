"""Dtypes of the cache: how K and V are stored, and in which dtype models see them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

FLOAT_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
# The smallest normal float32.
SMALLEST_SCALE = float(np.finfo(np.float32).smallest_normal)
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")


def dtype_name(dtype: Any) -> str:
    """The torch-style name behind a string, a NumPy, torch or ml_dtypes dtype, or a scalar type.

    >>> dtype_name("bfloat16"), dtype_name(np.float16), dtype_name(np.dtype("float32"))
    ('bfloat16', 'float16', 'float32')
    """
    if isinstance(dtype, str):
        name = dtype
    elif isinstance(dtype, type) and issubclass(dtype, np.generic):
        name = np.dtype(dtype).name
    else:
        name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return name.removeprefix("torch.")


@dataclass(frozen=True)
class KVDType:
    """How one pool stores K and V.

    Attributes
    ----------
    name : str
        Storage dtype by its torch name.
    storage : numpy.dtype
        Dtype of the buffers (bfloat16 is ml_dtypes'; FP8 is uint8, which every library can index).
    compute : str
        Name of the dtype in which `get` returns K and V.
    """

    name: str
    storage: np.dtype[Any]
    compute: str

    @classmethod
    def of(cls, dtype: Any, compute_dtype: Any = None) -> KVDType:
        """Resolve the constructor arguments `dtype` and `compute_dtype` of a pool.

        Raises
        ------
        ValueError
            Unknown names.
        """
        name = dtype_name(dtype)
        is_fp8 = name in FP8_DTYPES
        if not is_fp8 and name not in FLOAT_DTYPES:
            raise ValueError(
                f"dtype must be one of {_names()}, {', '.join(FP8_DTYPES)}, got {name!r}"
            )
        default = "bfloat16" if is_fp8 else name
        compute = default if compute_dtype is None else dtype_name(compute_dtype)
        if compute not in FLOAT_DTYPES:
            raise ValueError(f"compute_dtype must be one of {_names()}, got {compute!r}")
        return cls(name, np.dtype(np.uint8) if is_fp8 else FLOAT_DTYPES[name], compute)

    @property
    def fp8_format(self) -> str | None:
        """The FP8 format of the stored bytes, by its dtype's name; None where nothing is FP8."""
        return self.name if self.name in FP8_DTYPES else None

    @property
    def compute_type(self) -> np.dtype[Any]:
        """NumPy dtype of what models see."""
        return FLOAT_DTYPES[self.compute]

    @property
    def itemsize(self) -> int:
        """Bytes of one stored element."""
        return self.storage.itemsize

    @property
    def is_compute(self) -> bool:
        """Whether kernels can read the buffers as they are."""
        return self.name == self.compute


def itemsize_of(dtype: Any) -> int:
    """Bytes of one stored element of any cache dtype, FP8 included.

    >>> itemsize_of("bfloat16"), itemsize_of("float8_e4m3fn")
    (2, 1)
    """
    name = dtype_name(dtype)
    if name in FP8_DTYPES:
        return 1
    if name not in FLOAT_DTYPES:
        raise ValueError(f"dtype must be one of {_names()}, {', '.join(FP8_DTYPES)}, got {name!r}")
    return FLOAT_DTYPES[name].itemsize


def check_scale(
    scale: float | Sequence[float], name: str, num_layers: int, dtype: KVDType
) -> float | NDArray[np.float32]:
    """A quantisation scale as a float, or float32 ``[num_layers]`` if one per layer was given.

    Raises
    ------
    ValueError
        Not finite, not positive, another number of layers, or other than 1.0 without FP8.
    """
    values = np.asarray(scale, dtype=np.float64)
    if values.ndim > 1 or (values.ndim == 1 and values.size != num_layers):
        raise ValueError(
            f"{name} must be one number or one per layer [{num_layers}], got {values.shape}"
        )
    for value in values.ravel():
        # Kernels divide and multiply in float32, subnormals excluded.
        with np.errstate(over="ignore"):
            rounded = float(np.float32(value))
        if not math.isfinite(rounded) or rounded < SMALLEST_SCALE:
            raise ValueError(
                f"{name} must be finite and > 0 (at least {SMALLEST_SCALE:.3g}), got {value}"
            )
    if dtype.name not in FP8_DTYPES and (values != 1.0).any():
        raise ValueError(
            f"{name} must be 1.0 for dtype {dtype.name}: only FP8 is scaled, got {scale}"
        )
    return float(values) if values.ndim == 0 else values.astype(np.float32)


def _names() -> str:
    return ", ".join(FLOAT_DTYPES)
