"""Run the target under libFuzzer: `python -m tests.fuzz build/fuzz/corpus -max_total_time=900`.

Needs atheris, and the build of `KVPOOL_FUZZ=1 CC=clang`, whose C code counts its edges; the run is
led by these, not by lines of Python. `make fuzz` does all of it. All arguments are libFuzzer's;
what it finds it writes to a file, and `python -m tests.fuzz FILE` runs that again.
"""

import sys

import atheris

import kvpool_ext
from tests.fuzz.target import run


def main():
    if "/build/fuzz/" not in kvpool_ext.__file__:
        raise SystemExit(f"{kvpool_ext.__file__} counts no edges: build with KVPOOL_FUZZ=1")
    # libFuzzer starts itself again to merge and to minimize, by this line.
    again = f"{sys.executable} -m tests.fuzz"
    atheris.Setup([again, *sys.argv[1:]], run, enable_python_coverage=False)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
