"""``python -m examples.smollm2``."""

import os
import sys
import time


def idle_cores(seconds: float = 0.3) -> int:
    """Return how many cores nobody uses, by watching them for a moment; all if unknown."""
    cores = os.cpu_count() or 1
    try:

        def idle_ticks() -> int:
            with open("/proc/stat", encoding="ascii") as stat:
                return int(stat.readline().split()[4])

        before = idle_ticks()
        time.sleep(seconds)
        ticks = (idle_ticks() - before) / (seconds * os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return cores
    return max(1, min(cores, round(ticks)))


# Threads of a BLAS wait for each other at every product, 120 times a token. On a busy machine two
# of them, spinning, were ten times slower than one: so as many as there are idle cores, and those
# that wait go to sleep early, for the case that somebody else begins later. OpenBLAS reads both
# when NumPy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", str(idle_cores()))
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

try:
    from examples.smollm2.demo import app
except ModuleNotFoundError as error:
    if error.name not in {"gguf", "rich", "tokenizers", "typer"}:
        raise
    sys.exit(f"{error}; install it with: pip install gguf rich tokenizers typer")

app(prog_name="python -m examples.smollm2")
