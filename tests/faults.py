"""Make every call of a pool fail at every point where it can, and count what that leaves behind.

``python -m tests.faults`` prints the totals, by kind: memory of the C library, kernels, copies and
other requests to the device, interrupts and threads (of calls that have to do with tiers), and
objects of Python (where CPython has its test hook). It exits with 1 on a violation. The first kind
needs the debug build::

    PYTHONSAFEPATH=1 PYTHONPATH=build/debug/lib:. python -m tests.faults
"""

import argparse
import sys
from importlib.util import find_spec

from kvpool_ext import faults
from tests.helpers.fault_calls import CALLS
from tests.helpers.fault_points import CMemory, Interrupts, PythonMemory, Transfers
from tests.helpers.fault_scenes import POLICIES, scene
from tests.helpers.fault_step_calls import STEP_CALLS
from tests.helpers.fault_tier_calls import TAKING, TIER_CALLS
from tests.helpers.fault_tiers import sweep_attach, sweep_tiers, tiered_scene
from tests.helpers.faults import Totals, sweep, sweep_construction

# Python's memory last: numba may compile no more in a process in which it was refused some.
KINDS = ("c-memory", "kernels", "copies", "interrupts", "threads", "python-memory")
SHOWN = 20  # violations
# Where the copy of a page comes after the fork, and its failure leaves standing what was evicted.
MAY_EVICT = {"fork_in_a_lineage", "fork_that_copies_a_page"}
# NumPy 2 itself crashes where an assignment to ``array[indices]`` is refused an object of Python.
# And a Condition of `threading` keeps its lock where the frame that would give it back is refused.
NOT_WITHOUT_PYTHON_MEMORY = {"page_owners", "wait"}


def why_not(kind):
    """Why a kind cannot be injected here, or None."""
    if kind == "c-memory" and not faults.AVAILABLE:
        return "not the debug build of kvpool_ext"
    if kind == "python-memory" and faults.AVAILABLE:
        return "the debug build checks itself after each verb, which needs memory"
    if kind == "python-memory" and find_spec("_testcapi") is None:
        return "this Python has no _testcapi"
    return None


def sweep_kind(kind, *, policies=POLICIES, every=1, calls=None, quick=False):
    """The totals of one kind over all calls, or those named; `quick` leaves settings out."""
    totals = Totals()
    if kind == "c-memory" and calls is None:
        totals += sweep_construction(CMemory())
    for injector, build, names in settings_of(kind, policies, quick):
        for name, act in names.items():
            if calls is None or name in calls:
                totals += sweep(
                    name, act, build, injector, may_evict=name in MAY_EVICT, every=every
                )
    totals += sweep_tier_calls(kind, policies, every, calls, quick)
    return totals


def sweep_tier_calls(kind, policies, every, calls, quick):
    """`sweep_kind`, for calls beside prefetches."""
    totals = Totals()
    able = {name: act for name, act in TIER_CALLS.items() if calls is None or name in calls}
    for policy in policies:
        for injector in tier_injectors(kind, quick):
            for name, act in able.items():
                if kind == "python-memory" and name in NOT_WITHOUT_PYTHON_MEMORY:
                    continue
                build = tiered_scene_of(policy, name, drained=kind == "c-memory")
                takes = name in TAKING
                totals += sweep_tiers(name, act, build, injector, takes=takes, every=every)
        if kind == "threads":
            totals += sweep_attach(policy)
    return totals


def tier_injectors(kind, quick):
    """What fails calls beside prefetches, by kind."""
    if kind == "c-memory":
        return [CMemory(times) for times in ((1,) if quick else (1, None))]
    return {"interrupts": [Interrupts()], "python-memory": [PythonMemory()]}.get(kind, [])


def tiered_scene_of(policy, name, *, drained):
    """A function that makes the scene of a call beside prefetches."""
    return lambda: tiered_scene(policy, arrived=name in TAKING, drained=drained)


def settings_of(kind, policies, quick):
    """``(injector, function that makes the scene, calls)`` of each setting of a kind."""
    both = CALLS | STEP_CALLS
    for policy in policies:
        if kind == "c-memory":
            for times in (1,) if quick else (1, None):
                for drained in (True,) if quick else (False, True):
                    yield CMemory(times), scene_of(policy, drained=drained), both
        elif kind == "python-memory":
            able = {k: act for k, act in both.items() if k not in NOT_WITHOUT_PYTHON_MEMORY}
            for act in able.values():
                act(scene(policy))  # all is compiled before any memory is refused
            yield PythonMemory(), scene_of(policy), able
        elif kind in ("interrupts", "threads"):
            return
        elif kind == "kernels":
            for dtype in ("float32",) if quick else ("float32", "bfloat16", "float8_e4m3fn"):
                yield Transfers(copies=False), scene_of(policy, dtype=dtype), STEP_CALLS
        else:
            # The graphs of a CPU pool rely on a device that shares what it is given.
            apart = {name: act for name, act in STEP_CALLS.items() if "prepare" not in name}
            for shares, names in ((False, apart), (True, STEP_CALLS)):
                injector = Transfers(kernels=False, shares=shares)
                yield injector, scene_of(policy, device=injector.device), names


def scene_of(policy, **options):
    """A function that makes the scene."""
    return lambda: scene(policy, **options)


def main(arguments=None):
    """Sweep, print, and answer the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; all unless told")
    parser.add_argument("--every", type=int, default=1, help="try each N-th point only")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="may be repeated")
    options = parser.parse_args(arguments)
    total = Totals()
    for kind in options.kinds or KINDS:
        if kind not in KINDS:
            parser.error(f"no kind {kind!r}: expected one of {', '.join(KINDS)}")
        reason = why_not(kind)
        if reason:
            print(f"{kind:15}not here: {reason}", flush=True)
            continue
        found = sweep_kind(kind, policies=options.policy or POLICIES, every=options.every)
        total += found
        print(f"{kind:15}{found}", flush=True)
    print(f"{'all':15}{total}")
    for text in total.violations[:SHOWN]:
        print(text, file=sys.stderr)
    return 1 if total.violations else 0


if __name__ == "__main__":
    sys.exit(main())
