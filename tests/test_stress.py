"""A short run of the seeded driver, and the same calls in another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import stress

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("seed", range(4))
def test_drive_a_seed_keeps_pool_and_model_equal(seed):
    result = stress.run(seed, 400, check_every=50)
    assert result["reads"] > 0


def test_main_of_the_driver_reports_and_exits_with_zero(capsys):
    assert stress.main(["--operations", "120", "--seeds", "2", "--first-seed", "100"]) == 0
    assert "2 of 2 seeds passed" in capsys.readouterr().out


def test_drive_two_processes_with_other_hash_seeds_hands_out_the_same_pages():
    """Tensor-parallel ranks stay in step: no hash, clock or address decides a page."""
    program = "from tests import stress; print(stress.run(7, 300)['digest'])"
    digests = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        out = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        digests.add(out.stdout.strip())
    assert len(digests) == 1
