"""Two interpreters in a process, a fork, a Python without the GIL: refused or safe."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

IN_ANOTHER_INTERPRETER = """
import sys
{before}
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters

program = '''
import warnings
warnings.simplefilter("ignore")
import sys
sys.path[:] = {path!r}
try:
    import kvpool
    pool = kvpool.KVCachePool(1, 64, 1, 1, page_size=4)
    pool.bind_request([1, 2, 3], 8)
    pool.check()
    print("works", flush=True)
except ImportError as error:
    print("refused:", error, flush=True)
'''
interpreters.run_string(interpreters.create(), program)
{after}
"""
IN_THE_MAIN_ONE = """
import kvpool
pool = kvpool.KVCachePool(1, 64, 1, 1, page_size=4)
request = pool.bind_request([1, 2, 3], 8)
"""
STILL_THERE = "assert pool.is_bound(request); pool.check(); print('unharmed')"


def run(program):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def program(before, after):
    return IN_ANOTHER_INTERPRETER.format(
        before=before, after=after, path=[str(ROOT), *(path for path in sys.path if path)]
    )


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="no run_string of that kind")
def test_import_in_a_second_interpreter_is_refused_and_the_first_is_unharmed():
    refused, unharmed = run(program(IN_THE_MAIN_ONE, STILL_THERE))
    assert refused.startswith("refused: kvpool serves one interpreter of a process")
    assert unharmed == "unharmed"


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="no run_string of that kind")
def test_import_in_a_second_interpreter_first_is_refused_or_works():
    """Before 3.12 the first interpreter that imports it has it; later only the main one."""
    (said,) = run(program("", ""))
    if sys.version_info >= (3, 12):
        assert said.startswith("refused: kvpool serves one interpreter of a process")
    else:
        assert said == "works" or said.startswith("refused: kvpool")


def test_extension_does_not_ask_to_run_without_the_gil():
    """For a module that does not ask, Python 3.13t takes the GIL back, with a RuntimeWarning."""
    import kvpool

    is_gil_enabled = getattr(sys, "_is_gil_enabled", lambda: True)
    assert kvpool is not None
    assert is_gil_enabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_fork_gives_the_child_a_pool_of_its_own():
    """The bookkeeping is memory like any other: each process goes on with its copy."""
    lines = run(
        """
import os, sys
import numpy as np
import kvpool
pool = kvpool.KVCachePool(1, 64, 1, 2, page_size=4)
request = pool.bind_request(range(6), 8)
rows = np.arange(12, dtype=np.float32).reshape(1, 6, 1, 2)
pool.activate_step(request).put(0, 0, rows, -rows)
child = os.fork()
if child == 0:
    assert pool.finish_request(request, range(6)) == 4
    again = pool.bind_request(range(6), 8)
    assert pool.matched_prefix_len(again) == 4
    assert (pool.activate_step(again).get(0, 4)[0] == rows[:, :4]).all()
    pool.radix.evict(4)
    pool.check()
    print("child", flush=True)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert pool.valid_len(request) == 6
assert (pool.step.get(0, 6)[0] == rows).all()
pool.check()
print("parent")
"""
    )
    assert lines == ["child", "parent"]
