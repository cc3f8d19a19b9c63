"""``python -m examples.shared_prefix``."""

import os
import sys

# Two processes answer on this machine, one at a time: see examples/smollm2/__main__.py.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

try:
    from examples.shared_prefix.rounds import app
except ModuleNotFoundError as error:
    if error.name not in {"gguf", "rich", "tokenizers", "typer"}:
        raise
    sys.exit(f"{error}; install it with: pip install gguf rich tokenizers typer")

app(prog_name="python -m examples.shared_prefix")
