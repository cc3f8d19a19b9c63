"""The one way in which CPU kernels are compiled.

Every kernel releases the GIL and is compiled lazily, on its first call with new argument types.
Machine code is kept on disk between processes where numba finds a writable place for it (beside
the source, or in the user's cache folder) and is compiled once per process where it finds none.
fastmath is off unless a kernel asks for single flags of it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])

_SOURCES = sorted(Path(__file__).parent.glob("*.py"))


def kernel(**options: Any) -> Callable[[F], F]:
    """Return a decorator that compiles a function with `numba.njit`.

    Parameters
    ----------
    **options
        Further options of `numba.njit`, such as ``fastmath={"contract"}``.

    Returns
    -------
    callable
        The decorator. With ``NUMBA_DISABLE_JIT=1`` it hands the Python function back unchanged.
    """
    # Said even when it is off: a function without a word about fastmath inherits the flags of
    # whichever kernel compiles it first, and the disk cache then hands that version to every other
    # caller.
    options.setdefault("fastmath", False)
    # Division by zero is infinity or NaN, as in NumPy, and no branch to an exception.
    options.setdefault("error_model", "numpy")

    def compile_lazily(function: F) -> F:
        try:
            compiled: F = numba.njit(nogil=True, cache=True, **options)(function)
        except RuntimeError as error:
            # numba refuses instead of going without when the package and the home folder are both
            # read-only.
            if "cannot cache function" not in str(error):
                raise
            uncached: F = numba.njit(nogil=True, **options)(function)
            return uncached
        _stamp_with_all_sources(compiled)
        return compiled

    return compile_lazily


def _stamp_with_all_sources(compiled: Any) -> None:
    # numba ties cached code to the file of the kernel alone, so an edit of floats.py would leave
    # the old conversions inside the cached kernels of cpu.py. The stamp is numba's private
    # attribute: where it is missing, only this protection of developers is lost.
    cache_file = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if cache_file is not None and hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = _package_stamp()


def _package_stamp() -> tuple[float, int]:
    stats = [source.stat() for source in _SOURCES if source.exists()]
    return max((stat.st_mtime for stat in stats), default=0.0), sum(stat.st_size for stat in stats)
