"""Which sources a result was measured with: a hash over all that can change a figure."""

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = "kvpool", "kvpool_ext", "bench"
SUFFIXES = ".py", ".pyx", ".pxd"
# What only reads results, or needs a GPU: a new word in a title is no reason to measure anew.
READERS = (
    "bench/report/",
    "bench/gpu",
    "bench/curves/messages.py",
    "bench/curves/pictures.py",
    "bench/curves/targets.py",
    "bench/curves/text.py",
    "bench/replay/tables.py",
)
DIGITS = 12


def files(root=ROOT):
    """Path by name, of all sources that count."""
    found = {"setup.py": root / "setup.py"}  # has the flags of the compiler
    for folder in FOLDERS:
        for path in (root / folder).rglob("*.*"):
            name = path.relative_to(root).as_posix()
            if path.suffix in SUFFIXES and not name.startswith(READERS):
                found[name] = path
    return dict(sorted(found.items()))


def source_hash(root=ROOT):
    """One name for this state of the sources."""
    digest = hashlib.sha256()
    for name, path in files(root).items():
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:DIGITS]
