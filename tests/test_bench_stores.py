"""The bench of tiers measures what it says, on those that need no server."""

import pytest

from bench.stores import measure, open_tier


@pytest.mark.parametrize("name", ["host", "file"])
def test_bench_measures_and_leaves_nothing(name, tmp_path):
    tier = open_tier(name, tmp_path, None)
    seconds = measure(tier, 4096, rounds=1)
    assert set(seconds) == {"copy", "write", "read", "look up"}
    assert all(value > 0 for value in seconds.values())
    assert tier.stats()["records"] == 0
    tier.close()
