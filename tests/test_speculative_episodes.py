"""Random speculative episodes against the slow model: some in every run, all where time is."""

import numpy as np
import pytest

from tests import speculative
from tests.oracles import speculation_twin


@pytest.mark.parametrize("seed", range(4))
def test_drive_some_episodes_keeps_pool_and_model_equal(seed):
    assert speculative.run(seed, 40)["operations"] > 400


@pytest.mark.slow
@pytest.mark.parametrize("seed", [100, pytest.param(101, marks=pytest.mark.long)])
def test_drive_500_episodes_keeps_pool_and_model_equal(seed):
    assert speculative.run(seed, 500)["operations"] > 5000


def test_main_of_the_driver_reports_and_exits_with_zero(capsys):
    assert speculative.main(["--episodes", "3", "--seeds", "2", "--first-seed", "7"]) == 0
    assert "2 of 2 seeds passed" in capsys.readouterr().out


def test_main_of_the_driver_names_the_episode_that_differs(capsys, monkeypatch):
    def differ(rng):
        raise AssertionError("a difference")

    monkeypatch.setattr(speculative, "run_episode", differ)
    assert speculative.main(["--episodes", "3", "--seeds", "1", "--first-seed", "7"]) == 1
    told = capsys.readouterr()
    assert "--first-seed 7 --seeds 1 --first-episode 0 --episodes 1" in told.err
    assert "0 of 1 seeds passed" in told.out


def test_episode_reaches_every_kind_of_circumstance(monkeypatch):
    """The episodes are worth their time: each verb, each mode and each page size comes up."""
    seen = set()
    for name in ("fork", "checkpoint", "finish", "extend", "prefetch", "replay", "take_back"):
        original = getattr(speculation_twin.SpeculationTwin, name)

        def spy(self, *arguments, _name=name, _original=original):
            seen.update((_name, self.page_size, f"zeroes: {self.zeroes}"))
            return _original(self, *arguments)

        monkeypatch.setattr(speculation_twin.SpeculationTwin, name, spy)
    for episode in range(30):
        speculation_twin.run_episode(np.random.default_rng([11, episode]))
    assert {"fork", "checkpoint", "finish", "extend", "prefetch", "replay", "take_back"} <= seen
    assert {1, 4, 16, 64, "zeroes: True", "zeroes: False"} <= seen
