"""The launcher on a driver that runs nothing: what arrives there, and what is compiled when.

Real are numba's compiler, ``cuda.core`` and all of kvpool; faked are the driver
(`tests/fakes/libcuda.c`) and CuPy's arrays. Each case has a process of its own, since a driver is
loaded once.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import driver

ROOT = Path(__file__).resolve().parent.parent
REASON = driver.missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"the fake driver: {REASON}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return driver.build(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """Run a case of `tests.fakes.launches`; what it returned. Code is cached for this module."""
    shared = tmp_path_factory.mktemp("code")

    def run(case, cache=shared):
        environment = {k: v for k, v in os.environ.items() if k != "NUMBA_ENABLE_CUDASIM"} | {
            "LD_LIBRARY_PATH": str(folder),
            "KVPOOL_CACHE_DIR": str(cache),
            "NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS": "0",
        }
        command = [sys.executable, "-m", "tests.fakes.launches", case]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_parameters_are_eight_bytes_in_order_and_the_stream_is_passed(run):
    first, second = run("parameters")
    assert first["grid"] == [3, 2, 1]
    assert first["block"] == [32, 4, 2]
    assert first["params"] == [11, 2**63 - 1, 2**64 - 5]
    assert (first["stream"], first["shared_bytes"]) == (0x1234, 0)
    assert (second["stream"], second["params"]) == (0, [1, 2, 3])
    assert (first["count"], second["count"]) == (1, 2)


def test_largest_grid_reaches_the_driver(run):
    launch = run("big_grid")
    assert launch["grid"] == [2**31 - 1, 65_535, 65_535]
    assert launch["block"] == [256, 4, 1]


def test_code_is_compiled_once_a_process_and_kept_on_disk(run, tmp_path):
    found = run("compiled_once", tmp_path)
    # Compiled and loaded once; a new process loads from disk; a file that is cut short does not
    # count.
    assert found["counts"] == [1, 1, 1, 2, 2]
    assert found["capabilities"] == [[9, 0], [9, 0]]
    (name,) = found["files"]
    assert name.startswith("three-sm90-")


def test_a_cache_folder_that_cannot_be_written_does_no_harm(run, tmp_path):
    (tmp_path / "file").write_text("no folder")
    assert run("parameters", tmp_path / "file" / "cache")[0]["params"][0] == 11


def test_ptx_goes_to_the_driver_where_the_linker_is_too_old(run, tmp_path):
    found = run("old_linker", tmp_path)
    assert (found["kind"], found["launches"]) == ("ptx", 1)
    assert ".target sm_90" in found["text"]


def test_put_hands_over_addresses_strides_and_counts(run):
    found = run("pool_put")
    assert found["launch"]["params"] == found["expected"]
    # 7 rows of 64 bytes are 4 units of 16: 64 rows fit a block of 256 threads.
    assert found["launch"]["grid"] == [1, 1, 1]
    assert found["launch"]["block"] == [4, 64, 1]
    assert found["launch"]["stream"] == 0x77
    assert found["device_afterwards"] == 0


def test_capture_needs_warm_up_and_says_so(run):
    said = run("capture")
    for name in ("cold", "warm_up", "get"):
        assert "capture" in said[name], name
    assert "pool.warm_up()" in said["cold"]
    assert (said["warm"], said["other alignment"]) == ("done", "done")
    assert "allocated" in said["get"]
    for name in ("new page", "slots made inside", "table", "fork"):
        assert "uploaded while the stream is in graph capture" in said[name], name
    assert said["forbidden"] == []
    assert said["launches of the next put"] == 2


@pytest.mark.parametrize(
    ("grid", "block"),
    [
        ((1, 65_536, 1), (1, 1, 1)),
        ((1, 1, 65_536), (1, 1, 1)),
        ((2**31, 1, 1), (1, 1, 1)),
        ((0, 1, 1), (1, 1, 1)),
        ((1, 1, 1), (32, 33, 1)),
        ((1, 1, 1), (0, 1, 1)),
    ],
)
def test_shape_that_no_device_takes_raises(grid, block):
    from kvpool.kernels.launch import check_shape

    with pytest.raises(ValueError, match="is outside of 1"):
        check_shape(grid, block)
