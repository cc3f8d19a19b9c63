"""A session of the soak: episode after episode until the time is over or something is found."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpool.soak.drawing import RandomDraw
from kvpool.soak.finding import Finding
from kvpool.soak.player import Player
from kvpool.soak.profiles import PROFILES
from kvpool.soak.script import script_of
from kvpool.soak.shrink import Shrinker
from kvpool.soak.signals import heed
from kvpool.soak.totals import Totals, resident_bytes
from kvpool.soak.trace import Operation, Trace, TraceFile

SAY_EVERY_S = 5.0
LONGEST_EPISODE = 500  # operations
MAX_SAMPLES = 1 << 16


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes
    ----------
    seconds : float
        In all; the profiles share them evenly.
    seed : int
        The same seed, the same traffic.
    profiles : tuple of str
        Names of `PROFILES`.
    device : str
        Of the pools.
    shrink_seconds : float
        How long a failure may be made shorter; 0 leaves it as it is.
    """

    seconds: float = 60.0
    seed: int = 0
    profiles: tuple[str, ...] = tuple(PROFILES)
    device: str = "cpu"
    shrink_seconds: float = 30.0


@dataclass
class Failure:
    """Something was found.

    Attributes
    ----------
    profile : str
        In which traffic; empty for a replay.
    kind, details : str
        Of the `Finding`.
    traceback : str
        Where the pool raised it; empty if it did not.
    whole, shrunk : Trace
        As it was found, and a short one of the same kind.
    script : str
        A program that shows it.
    """

    profile: str
    kind: str
    details: str
    traceback: str
    whole: Trace
    shrunk: Trace
    script: str


@dataclass
class Outcome:
    """What came of a session."""

    totals: dict[str, Totals] = field(default_factory=dict)
    failure: Failure | None = None
    interrupted: bool = False


def run(options: Options, trace_file: TraceFile, totals: dict[str, Totals]) -> Failure | None:
    """Soak; `totals` is filled as it goes, so that an interrupt loses nothing."""
    for profile in options.profiles:
        found = totals[profile] = Totals()
        failure = _run_profile(profile, options, trace_file, found, options.seconds)
        if failure is not None:
            return failure
    return None


def _run_profile(
    profile: str, options: Options, trace_file: TraceFile, totals: Totals, seconds: float
) -> Failure | None:
    start = said = time.monotonic()
    ends_at = start + seconds / len(options.profiles)
    while totals.episodes == 0 or time.monotonic() < ends_at:
        draw = RandomDraw(f"{options.seed}/{profile}/{totals.episodes}")
        kind = PROFILES[profile]
        player = Player(kind.draw_shape(draw), options.device)
        trace_file.start(player.shape)
        operations: list[Operation] = []
        traffic = kind(player, draw)
        try:
            for _ in range(draw.integer(20, LONGEST_EPISODE)):
                heed()
                operations.append(traffic.next())
                trace_file.add(operations[-1])
                player.perform(operations[-1])
                if time.monotonic() > ends_at:
                    break
            player.finish_up()
            finding = None
        except Finding as found:
            finding = found
        totals.add(player)
        totals.seconds = time.monotonic() - start
        if finding is not None:
            trace = Trace(player.shape, operations)
            return _failure(profile, finding, trace, options, trace_file)
        del player, traffic
        if len(totals.resident) < MAX_SAMPLES:
            totals.resident.append(resident_bytes())
        if sys.stderr.isatty() and time.monotonic() - said > SAY_EVERY_S:
            said = time.monotonic()
            _say(profile, totals)
    return None


def replay(trace: Trace, options: Options, trace_file: TraceFile) -> Outcome:
    """Play a trace once; its operations were checked."""
    totals, start = Totals(), time.monotonic()
    player = Player(trace.shape, options.device)
    trace_file.start(trace.shape)
    finding = None
    try:
        for operation in trace.operations:
            heed()
            trace_file.add(operation)
            player.perform(operation)
        player.finish_up()
    except Finding as found:
        finding = found
    totals.add(player)
    totals.seconds = time.monotonic() - start
    outcome = Outcome({"replay": totals})
    if finding is not None:
        outcome.failure = _failure("", finding, trace, options, trace_file)
    return outcome


def kind_of(trace: Trace, device: str = "cpu") -> str | None:
    """What is found when a trace is played; None if nothing is."""
    try:
        Player(trace.shape, device).play(trace.operations)
    except Finding as finding:
        return finding.kind
    return None


def shrink(
    trace: Trace,
    kind: str,
    seconds: float,
    device: str = "cpu",
    tick: Callable[[], object] = int,
) -> Trace:
    """A shorter trace in which the same kind of thing is found.

    Parameters
    ----------
    trace : Trace
        Where it was found.
    kind : str
        What.
    seconds : float
        How long to try.
    device : str
        Of the pools.
    tick : callable
        Called before each trial; what it raises to interrupt ends the shrinking, not the finding.
    """

    def fails(candidate: Trace) -> bool:
        tick()
        return kind_of(candidate, device) == kind

    return Shrinker(trace, fails, seconds).shortest()


def _failure(
    profile: str, finding: Finding, trace: Trace, options: Options, trace_file: TraceFile
) -> Failure:

    def tick() -> None:
        trace_file.touch()
        heed()

    shrunk = shrink(trace, finding.kind, options.shrink_seconds, options.device, tick)
    script, again = script_of(shrunk, options.device)
    shown = again or finding
    # Where the soak saw it says less than where the pool raised it.
    text = "".join(traceback.format_exception(shown.__cause__)) if shown.__cause__ else ""
    return Failure(profile, shown.kind, shown.details, text, trace, shrunk, script)


def _say(profile: str, totals: Totals) -> None:
    print(
        f"{profile}: {totals.seconds:.0f} s, {totals.operations} operations "
        f"({totals.operations_per_s:.0f}/s), {totals.rows_read} rows read, "
        f"{totals.evicted} pages evicted",
        file=sys.stderr,
        flush=True,
    )
