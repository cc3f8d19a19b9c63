"""Make a call fail at each point where it can, and see that nothing else shows of it.

`sweep` builds a scene anew for each point of a call and compares: after a call that raised,
everything is as before, and the retry does what it does in a pool where nothing failed; a call
that could do without what it was refused does the same at once.
"""

from dataclasses import dataclass, field

from kvpool import KVCachePool
from tests.helpers.fault_prints import (
    DISPENSABLE,
    as_plain,
    checked,
    differences,
    evictions_only,
    fingerprint,
)


@dataclass
class Totals:
    """What a sweep came to: points and runs by kind, and what was not as it must be."""

    points: int = 0
    runs: int = 0
    raised: int = 0
    violations: list[str] = field(default_factory=list)

    def __iadd__(self, other):
        self.points += other.points
        self.runs += other.runs
        self.raised += other.raised
        self.violations += other.violations
        return self

    def __str__(self):
        return (
            f"points {self.points}, runs {self.runs} ({self.raised} raised), "
            f"violations {len(self.violations)}"
        )


def sweep(name, act, build, injector, *, may_evict=False, every=1):
    """Fail a call at each of its points (or each `every`-th), each time in a scene built anew.

    Parameters
    ----------
    name : str
        What to call it in a violation.
    act : callable
        The call; its argument is the scene.
    build : callable
        Makes the scene.
    injector : CMemory, PythonMemory or Transfers
        What fails.
    may_evict : bool
        Whether a failure leaves evictions standing, as the call's documentation says.
    every : int
        Distance of the points that are tried.

    Returns
    -------
    Totals
    """
    totals = Totals()
    for _ in range(2):  # what is made at a first use is made once
        act(build())
    at = build()
    before = fingerprint(at.pool)
    result = as_plain(act(at))
    after = fingerprint(at.pool)
    point = 0
    while True:
        at = build()
        injector.install(at)
        error, got, reached = injector.run(act, at, point)
        if not reached:
            break
        totals.runs += 1
        wrong = []
        if error is not None:
            totals.raised += 1
            found = fingerprint(at.pool)
            wrong += (evictions_only if may_evict else differences)(before, found)
            wrong += checked(at.pool)
            got = act(at)
        if as_plain(got) != result:
            wrong.append(f"result {as_plain(got)}, expected {result}")
        left_out = DISPENSABLE if error is None or may_evict else ()
        wrong += differences(after, fingerprint(at.pool), left_out)
        wrong += checked(at.pool)
        how = "went on" if error is None else f"raised {error}"
        totals.violations += [f"{name}, point {point}, {how}: {text}" for text in wrong]
        point += every
    totals.points = totals.runs
    return totals


def sweep_construction(injector):
    """Each point of making a pool: it raises, and the next attempt succeeds."""
    totals = Totals()

    def make(_):
        KVCachePool(2, 64, 1, 4, page_size=4, eviction="lfu").close()

    while True:
        error, _, reached = injector.run(make, None, totals.points)
        if not reached:
            break
        totals.points += 1
        totals.runs += 1
        totals.raised += error is not None
        if error is None:
            totals.violations.append(f"a pool was made without memory at point {totals.points}")
        make(None)
    return totals
