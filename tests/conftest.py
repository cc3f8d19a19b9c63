"""What every test may ask for: hypothesis profiles, reasons to skip, pools that are checked."""

import os
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, Verbosity, settings

from tests.unpoisoned import is_unpoisoned

# Set HYPOTHESIS_PROFILE to choose: dev explores, ci repeats itself, debug shows each example.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=50, **PATIENT)
settings.register_profile("ci", max_examples=100, derandomize=True, print_blob=True, **PATIENT)
settings.register_profile("debug", max_examples=10, verbosity=Verbosity.verbose, **PATIENT)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
)


def pytest_report_header():
    """Say which build of the extension is under test: release, debug or trace."""
    spec = find_spec("kvpool_ext")
    return f"kvpool_ext: {spec.origin if spec else 'not built'}"


def why_not(mark):
    """The reason to skip a test with this mark on this machine, or None."""
    if mark == "long" and os.environ.get("KVPOOL_LONG", "0") == "0":
        return "takes minutes: set KVPOOL_LONG=1"
    if mark == "gpu" and not has_gpu():
        return "no CUDA device"
    if mark == "sim" and os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
        return "runs under the simulator only: set NUMBA_ENABLE_CUDASIM=1"
    if mark == "flashinfer" and find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    if mark == "peers" and find_spec("transformers") is None:
        return "transformers is not installed: use make test-peers"
    return None


def has_gpu():
    """Whether CuPy is installed and sees a device."""
    if find_spec("cupy") is None:
        return False
    import cupy

    try:
        return cupy.cuda.runtime.getDeviceCount() > 0
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


def pytest_collection_modifyitems(items):
    """Skip, before any set-up, what this machine cannot run."""
    marks = {mark.name for item in items for mark in item.iter_markers()}
    reasons = {mark: reason for mark in sorted(marks) if (reason := why_not(mark))}
    for item in items:
        if is_unpoisoned(item.path.stem, item.name.partition("[")[0]):
            item.fixturenames.insert(0, "without_poison")
        for mark in item.iter_markers():
            if mark.name in reasons:
                item.add_marker(pytest.mark.skip(reason=reasons[mark.name]))
                break


@pytest.fixture
def without_poison(monkeypatch):
    """Pools of this test are not in poison mode, whatever the environment says."""
    monkeypatch.setenv("KVPOOL_POISON", "0")


class PoolFactory:
    """Makes pools, and remembers them: whatever a test leaves open must pass its own check."""

    def __init__(self):
        self.pools = []

    def __call__(self, *args, **options):
        """Make a pool as `KVCachePool(...)` does."""
        from kvpool import KVCachePool

        return self.keep(KVCachePool(*args, **options))

    def keep(self, pool):
        """Look after a pool that was made in another way, by a factory of the class say."""
        self.pools.append(pool)
        return pool

    def check_and_close(self):
        """Check every pool that is still open, then close all of them."""
        try:
            for pool in self.pools:
                if not pool.closed:
                    pool.check()
        finally:
            for pool in self.pools:
                pool.close()


@pytest.fixture
def make_pool():
    """A function that makes pools, each of which is checked and closed after the test."""
    factory = PoolFactory()
    yield factory
    factory.check_and_close()


@pytest.fixture
def tier(make_pool):
    """A tier that has all pages of `tests.helpers.tiers.PROMPT`."""
    from tests.helpers.tiers import PROMPT, MemoryTier, fill_tiers

    made = MemoryTier()
    fill_tiers(make_pool, [PROMPT], made)
    assert len(made.records) == 10
    return made


@pytest.fixture
def gated(tier):
    """The same, but each read waits to be let through."""
    from tests.helpers.tiers import Gated, opened

    made = Gated()
    made.records = tier.records
    with opened(made):
        yield made


@pytest.fixture
def folder(tmp_path):
    """Where `make_file_tier` has its directory; nothing is there yet."""
    return tmp_path / "tier"


@pytest.fixture
def make_file_tier(folder):
    """Makes file tiers in one directory, and closes them."""
    from kvpool.tiers import FileTier
    from tests.helpers.page_files import RECORD_BYTES

    made = []

    def open_tier(num_records=4, **options):
        made.append(FileTier(folder, num_records * RECORD_BYTES, **options))
        return made[-1]

    yield open_tier
    for tier in made:
        tier.close()
