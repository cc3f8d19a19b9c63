"""One cell: a trace at one capacity, page size and window, all contenders in turns on one core."""

import multiprocessing
import statistics
from dataclasses import dataclass

import numpy as np

from bench.replay.oracle import replay_hits
from bench.replay.trace import BIND, order_of_events
from bench.replay.worker import PHASES, serve

TURN = 500  # events that a contender does before it is the next one's turn
FIGURES = ("p50", "p99", "mean")


@dataclass(frozen=True)
class Cell:
    """What is replayed, but for the trace itself."""

    trace: str
    capacity: int
    page_size: int
    window: int

    def __str__(self):
        millions = f"{self.capacity / 1e6:g}M"
        return f"{self.trace}:{millions}:p{self.page_size}:w{self.window}"


class Truth:
    """The oracle's hits of one cell, by the moment at which requests publish."""

    def __init__(self, trace, events, cell):
        self.trace, self.events, self.cell = trace, events, cell
        order = events[events[:, 0] == BIND, 1]
        pages = np.cumsum(-(-trace.lengths[order] // cell.page_size))
        # No cache can have evicted while all requests so far fit side by side.
        self.before_eviction = order[pages <= cell.capacity // cell.page_size]
        self._found = {}

    def hits(self, publishes, capacity):
        """Hits of the exact LRU rule, or of a cache that never evicts (`capacity` None)."""
        key = publishes, capacity
        if key not in self._found:
            self._found[key] = replay_hits(
                self.trace,
                self.events,
                self.cell.page_size,
                capacity=capacity,
                publishes=publishes,
            )
        return self._found[key]

    def faults(self, hits, publishes, exact_lru):
        """Requests whose hits are wrong, by fault; only some promise the exact LRU rule."""
        unlimited, early = self.hits(publishes, None), self.before_eviction
        found = {
            "wrong before any eviction": int((hits[early] != unlimited[early]).sum()),
            "more than was ever cached": int((hits > unlimited).sum()),
        }
        if exact_lru:
            exact = self.hits(publishes, self.cell.capacity)
            found["not exact LRU"] = int((hits != exact).sum())
        return found


def run_cell(trace, cell, names, *, runs=3, core=None, say=print):
    """Replay one cell `runs` times with every contender of `names`; the result as plain values."""
    capacity = cell.capacity // cell.page_size * cell.page_size
    cell = Cell(cell.trace, capacity, cell.page_size, cell.window)
    events = order_of_events(
        trace.lengths, window=cell.window, capacity=capacity, page_size=cell.page_size
    )
    truth = Truth(trace, events, cell)
    floor_hits = truth.hits("finish", capacity)
    samples = {name: [] for name in names}
    for run in range(runs):
        order = names[run % len(names) :] + names[: run % len(names)]
        for name, sample in replay(trace, events, floor_hits, cell, order, core).items():
            samples[name].append(sample)
        say(f"  {cell}: run {run + 1} of {runs}")
    served = events[events[:, 0] == BIND, 1]
    rows = [summary(name, samples[name], trace, served, truth) for name in names]
    return {
        "trace": trace.name,
        "capacity": capacity,
        "page_size": cell.page_size,
        "window": cell.window,
        "requests": len(served),
        "left_out": len(trace) - len(served),
        "checked_before_eviction": len(truth.before_eviction),
        "prompt_tokens": int(trace.prompt_lens[served].sum()),
        "output_tokens": int(trace.output_lens[served].sum()),
        "runs": runs,
        "exact_lru_hit_rate": rate(floor_hits, trace, served),
        "unlimited_hit_rate": rate(truth.hits("finish", None), trace, served),
        "rows": rows,
    }


def replay(trace, events, hits, cell, names, core):
    """One run: `{name: sample}`. Each contender is forked off, and they take turns."""
    fork = multiprocessing.get_context("fork")
    workers = {}
    try:
        for name in names:
            ours, theirs = fork.Pipe()
            arguments = (theirs, name, trace, events, hits, cell.capacity, cell.page_size, core)
            process = fork.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            workers[name] = process, ours
            made = answer(name, ours)["made_s"]
            workers[name] += (made,)
        for start in range(0, len(events), TURN):
            for name, (_, connection, _) in workers.items():
                connection.send((start, start + TURN))
                answer(name, connection)
        samples = {}
        for name, (process, connection, made) in workers.items():
            connection.send(None)
            samples[name] = answer(name, connection) | {"made_s": made}
            process.join()
        return samples
    finally:
        for process, *_ in workers.values():
            process.kill()
            process.join()


def answer(name, connection):
    """What a worker says, or its error."""
    try:
        message = connection.recv()
    except EOFError:
        raise RuntimeError(f"the process of {name} has died") from None
    if message and "error" in message:
        raise RuntimeError(f"{name} failed:\n{message['error']}")
    return message


def summary(name, samples, trace, served, truth):
    """Medians over the runs of one contender, in microseconds, and whether its hits are right."""
    seconds = [sample["seconds"][served] for sample in samples]
    hits = samples[0]["hits"]
    assert all((sample["hits"] == hits).all() for sample in samples), f"{name}: hits differ by run"
    timed = {phase: [run[:, i] for run in seconds] for i, phase in enumerate(PHASES)}
    timed["total"] = [run.sum(axis=1) for run in seconds]
    return {
        "name": name,
        "us": {phase: figures(runs) for phase, runs in timed.items()},
        "mean_by_run": [float(run.mean()) * 1e6 for run in timed["total"]],
        "requests_per_s": 1 / statistics.median(run.mean() for run in timed["total"]),
        "hit_rate": rate(hits, trace, served),
        "faults": truth.faults(hits, samples[0]["publishes"], samples[0]["exact_lru"]),
        "bytes_per_cached_token": statistics.median(
            sample["grown_bytes"] / max(1, sample["cached_tokens"]) for sample in samples
        ),
        "cached_tokens": samples[0]["cached_tokens"],
        "preempted": statistics.median(sample["preempted"] for sample in samples),
        "made_s": statistics.median(sample["made_s"] for sample in samples),
        "versions": samples[0]["versions"],
        "notes": samples[0]["notes"],
    }


def figures(runs):
    """Median over the runs of each run's p50, p99 and mean, in microseconds."""
    by_run = [(np.median(run), np.percentile(run, 99), run.mean()) for run in runs]
    return dict(zip(FIGURES, (np.median(by_run, axis=0) * 1e6).tolist(), strict=True))


def rate(hits, trace, served):
    """Hit tokens of all prompt tokens."""
    return float(hits[served].sum() / trace.prompt_lens[served].sum())
