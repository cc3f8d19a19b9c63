"""A trace: a pool's shape and the operations on it, as plain data, one a line of JSON.

Operations name requests by handles that the trace made up, lengths relative to where a request
stands, and texts by seeds. So any part of a trace can be played: what refers to a request that is
not there is skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from kvpool.dtypes import itemsize_of
from kvpool.pool import KVCachePool
from kvpool_ext.eviction import EVICTION_POLICIES

Operation = list[Any]
"""A verb and its arguments: integers and lists of integers."""

FORMAT = 1
MAX_POOL_BYTES = 1 << 30
MAX_NUMBER = 1 << 32
MAX_OPERATIONS = 10_000_000
# Of the pool's options: what is not said is this.
_DEFAULTS = {
    "page_size": 16,
    "dtype": "float32",
    "k_scale": 1.0,
    "v_scale": 1.0,
    "eviction": "lru",
    "max_batch_size": 1,
    "zero_rejected_kv": True,
}


class TraceError(ValueError):
    """A trace that cannot be played; says where and why."""


@dataclass(frozen=True)
class PoolShape:
    """What a pool of the soak is made with.

    Attributes
    ----------
    num_layers, num_pages, page_size, num_kv_heads, head_dim : int
        Sizes.
    dtype : str
        Storage dtype.
    eviction : str
        Policy.
    scale : int
        FP8 scale of K and V; 1 for other dtypes.
    max_batch_size : int
        Rows of the largest graph bucket.
    zero_rejected_kv : bool
        Whether `truncate_to` zeroes.
    vocabulary : int
        Different tokens of the traffic: few of them make prompts share by chance.
    """

    num_layers: int = 1
    num_pages: int = 8
    page_size: int = 4
    num_kv_heads: int = 1
    head_dim: int = 4
    dtype: str = "float32"
    eviction: str = "lru"
    scale: int = 1
    max_batch_size: int = 1
    zero_rejected_kv: bool = True
    vocabulary: int = 1 << 32

    def __post_init__(self) -> None:
        for named in fields(self):
            value = getattr(self, named.name)
            if str(type(value).__name__) != named.type:
                raise TraceError(f"{named.name} must be {named.type}, got {value!r}")
            if type(value) is int and not 1 <= value <= MAX_NUMBER:
                raise TraceError(f"{named.name} must be in 1 .. {MAX_NUMBER}, got {value}")
        if self.eviction not in EVICTION_POLICIES:
            raise TraceError(f"eviction must be one of {EVICTION_POLICIES}, got {self.eviction!r}")
        try:
            itemsize = itemsize_of(self.dtype)
        except ValueError as error:
            raise TraceError(str(error)) from None
        rows = self.num_layers * (self.num_pages + 1) * self.page_size
        size = 2 * rows * self.num_kv_heads * self.head_dim * itemsize
        if size > MAX_POOL_BYTES:
            raise TraceError(f"the pool takes {size} bytes, at most {MAX_POOL_BYTES} are played")

    @property
    def num_slots(self) -> int:
        """Tokens that the pool holds."""
        return self.num_pages * self.page_size

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the pool beyond its four sizes."""
        given = {
            "page_size": self.page_size,
            "dtype": self.dtype,
            "k_scale": float(self.scale),
            "v_scale": float(self.scale),
            "eviction": self.eviction,
            "max_batch_size": self.max_batch_size,
            "zero_rejected_kv": self.zero_rejected_kv,
        }
        return {name: value for name, value in given.items() if value != _DEFAULTS.get(name)}

    def make(self, device: str) -> KVCachePool:
        """A pool of this shape."""
        sizes = (self.num_layers, self.num_slots, self.num_kv_heads, self.head_dim)
        return KVCachePool(*sizes, device=device, **self.options())

    def source(self, device: str) -> str:
        """The call that makes it."""
        sizes = (self.num_layers, self.num_slots, self.num_kv_heads, self.head_dim)
        options = self.options() | ({} if device == "cpu" else {"device": device})
        words = [*map(str, sizes), *(f"{name}={value!r}" for name, value in options.items())]
        return f"KVCachePool({', '.join(words)})"


@dataclass
class Trace:
    """A shape, and operations in order; `is_cut` if its file ends in the middle of a line."""

    shape: PoolShape
    operations: list[Operation]
    is_cut: bool = field(default=False, compare=False)

    def lines(self) -> Iterable[str]:
        """The lines of its file."""
        yield header(self.shape)
        for operation in self.operations:
            yield json.dumps(operation, separators=(",", ":"))

    def write(self, path: str | Path) -> None:
        """Write it to a file."""
        Path(path).write_text("".join(line + "\n" for line in self.lines()), encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Read a file; a last line that a crash cut short is left out.

        Raises
        ------
        TraceError
            Not a trace, or numbers that nobody should size an allocation by.
        """
        lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
        if not lines:
            raise TraceError(f"{path} is empty")
        is_cut = not lines[-1].endswith("\n")
        if is_cut:
            lines.pop()
        if not lines:
            raise TraceError(f"{path} ends in the middle of its first line")
        if len(lines) > MAX_OPERATIONS:
            raise TraceError(f"{path} has {len(lines)} lines, at most {MAX_OPERATIONS} are played")
        return cls(
            _shape_of(lines[0], path),
            [_operation_of(line, f"{path}:{i}") for i, line in enumerate(lines[1:], 2)],
            is_cut,
        )


def header(shape: PoolShape) -> str:
    """The first line of a trace."""
    return json.dumps({"kvpool_soak": FORMAT, "pool": asdict(shape)})


class TraceFile:
    """Writes each operation ahead of its call, so that a crash leaves it on disk."""

    def __init__(self, path: str | Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def start(self, shape: PoolShape) -> None:
        """Begin anew."""
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        self._write(header(shape))

    def add(self, operation: Operation) -> None:
        """One more operation is about to be played."""
        self._write(json.dumps(operation))

    def touch(self) -> None:
        """Tell whoever watches the file that work goes on."""
        os.utime(self._file)

    def close(self) -> None:
        """No more comes."""
        os.close(self._file)

    def _write(self, line: str) -> None:
        os.write(self._file, (line + "\n").encode())


def _shape_of(line: str, path: str | Path) -> PoolShape:
    try:
        found = json.loads(line)
        version = found["kvpool_soak"]
        given = found["pool"]
        if version == FORMAT:
            return PoolShape(**given)
    except TraceError as error:
        raise TraceError(f"{path}:1: {error}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TraceError(f"{path}:1 is not the header of a soak's trace: {error}") from None
    raise TraceError(f"{path} is of format {version!r}, this kvpool plays {FORMAT}")


def _operation_of(line: str, where: str) -> Operation:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: {error}") from None
    if not (isinstance(found, list) and found and isinstance(found[0], str)):
        raise TraceError(f"{where}: expected a verb and its arguments, got {line.strip()[:80]}")
    _check_numbers(found[1:], where)
    return found


def _check_numbers(values: list[Any], where: str, depth: int = 0) -> None:
    for value in values:
        if isinstance(value, list) and depth < 2:
            _check_numbers(value, where, depth + 1)
        elif type(value) is not int or not -MAX_NUMBER <= value <= MAX_NUMBER:
            raise TraceError(
                f"{where}: expected integers within {MAX_NUMBER}, got {str(value)[:80]}"
            )
