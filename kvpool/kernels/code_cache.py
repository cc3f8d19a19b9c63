"""Machine code of CUDA kernels on disk, so that only the first process compiles.

One file a kernel and compute capability. Its name is a hash of all that the code depends on: the
sources of this package, the kernel's name, the capability, the versions of the compilers. So
nothing in the folder is ever out of date, and deleting any of it is safe. A file that is cut short
or altered is compiled again: it starts with the hash of its contents.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_COMPILERS = ("numba", "numba-cuda", "cuda-core", "cuda-bindings")


@dataclass(frozen=True)
class Code:
    """A compiled kernel.

    Attributes
    ----------
    kind : str
        ``"cubin"``, or ``"ptx"``, which the driver translates when it is loaded.
    entry : str
        Name of the kernel inside.
    data : bytes
        The code.
    """

    kind: str
    entry: str
    data: bytes


def folder() -> Path:
    """Where code is kept: ``KVPOOL_CACHE_DIR``, else ``kvpool`` in the user's cache folder."""
    chosen = os.environ.get("KVPOOL_CACHE_DIR")
    if chosen:
        return Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path("~/.cache").expanduser()) / "kvpool"


def find(name: str, num_params: int, capability: tuple[int, int]) -> Code | None:
    """The code of a kernel, None if it is not there, or not whole."""
    try:
        stored = _path(name, num_params, capability).read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None
    digest, _, body = stored.partition(b"\n")
    if digest != _digest(body):
        return None
    kind, entry, data = body.split(b"\n", 2)
    return Code(kind.decode(), entry.decode(), data)


def keep(name: str, num_params: int, capability: tuple[int, int], code: Code) -> None:
    """Store the code of a kernel; a folder that cannot be written is left alone."""
    body = b"\n".join((code.kind.encode(), code.entry.encode(), code.data))
    try:
        path = _path(name, num_params, capability)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Several processes may store the same kernel at once: each file appears whole.
        handle, part = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(_digest(body) + b"\n" + body)
        os.replace(part, path)
    except (OSError, RuntimeError):
        return


def _path(name: str, num_params: int, capability: tuple[int, int]) -> Path:
    major, minor = capability
    key = hashlib.sha256(repr((_sources(), name, num_params, capability)).encode()).hexdigest()
    return folder() / f"{name}-sm{major}{minor}-{key[:32]}"


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


@functools.cache
def _sources() -> str:
    """One hash for the compilers and every source that a kernel may be made of."""
    digest = hashlib.sha256()
    for name in _COMPILERS:
        try:
            digest.update(f"{name} {version(name)}\n".encode())
        except PackageNotFoundError:
            digest.update(f"{name} none\n".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()
