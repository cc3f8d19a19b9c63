"""All contenders of one panel: a process each, in turns on one core."""

import functools
import gc
import multiprocessing
import os
import statistics
import time
import traceback

from bench.replay.contender import PLACES, contender_class, missing_packages

BUDGET = 3.0  # seconds after which a size is not sampled again
WARM_UP = 0.02  # seconds that a sample may last to be taken once more in each turn, for nothing
AT_LEAST = 3  # samples, if there are so many rounds


def peer_of(contender):
    """The contender of the replay behind a curve, or None."""
    name = contender.partition(",")[0]
    return name if name in PLACES and not name.startswith("kvpool") and name != "floor" else None


@functools.cache  # once a peer is loaded, the import system can no longer tell
def missing(contender):
    """Packages that a contender needs and that are not installed."""
    name = peer_of(contender)
    return missing_packages(name) if name else []


def load(contenders):
    """Import the peers here, once, so that the processes need not."""
    for contender in contenders:
        if peer_of(contender):
            contender_class(peer_of(contender))


def versions(contenders):
    """Package -> version of what is measured."""
    found = {}
    for contender in contenders:
        name = peer_of(contender) or "kvpool"
        found.update(contender_class(name).versions())
    return found


def measure(subject, panel, contenders, *, rounds, core=None, quick=False):
    """Curves of one panel: ``{contender: {size: figures}}``, in the subject's unit."""
    samples = {contender: {} for contender in contenders}
    if subject.one_size_a_process:
        for contender in contenders:
            for size in subject.sizes_of(contender, quick):
                run_turns(subject, panel, {contender: [size]}, rounds, core, samples)
    else:
        sizes = {contender: subject.sizes_of(contender, quick) for contender in contenders}
        run_turns(subject, panel, sizes, rounds, core, samples)
    return {
        contender: {size: figures(found, subject.scale()) for size, found in by_size.items()}
        for contender, by_size in samples.items()
    }


def figures(samples, scale):
    """What is kept of the samples of one point."""
    return {
        "median": statistics.median(samples) * scale,
        "low": min(samples) * scale,
        "high": max(samples) * scale,
        "samples": len(samples),
    }


def run_turns(subject, panel, sizes, rounds, core, samples):
    """Fork a worker a contender, and let them sample in turns."""
    fork = multiprocessing.get_context("fork")
    workers = {}
    try:
        for contender, own_sizes in sizes.items():
            ours, theirs = fork.Pipe()
            arguments = (theirs, subject, contender, panel, own_sizes, core)
            process = fork.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            workers[contender] = process, ours
            answer(contender, ours)
        for _ in range(rounds):
            for contender, (_, connection) in workers.items():
                connection.send("sample")
                for size, seconds in answer(contender, connection).items():
                    samples[contender].setdefault(size, []).append(seconds)
    finally:
        for process, _ in workers.values():
            process.kill()
            process.join()


def answer(contender, connection):
    """What a worker says, or its error."""
    try:
        message = connection.recv()
    except EOFError:
        raise RuntimeError(f"the process of {contender} has died") from None
    if "error" in message:
        raise RuntimeError(f"{contender} failed:\n{message['error']}")
    return message


def serve(connection, subject, contender, panel, sizes, core):
    """One sample of each size whenever told to."""
    try:
        if core is not None:
            os.sched_setaffinity(0, {core})
        samplers = subject.make(contender, panel, sizes)
        gc.collect()
        gc.freeze()
        connection.send({})
        spent, taken = dict.fromkeys(samplers, 0.0), dict.fromkeys(samplers, 0)
        first = next(iter(samplers))
        while connection.recv():
            if spent[first] < taken[first] * WARM_UP:
                samplers[first]()  # after the turns of the others, caches and branches are theirs
            found = {}
            for size, sample in samplers.items():
                if spent[size] > BUDGET and taken[size] >= AT_LEAST:
                    continue
                start = time.perf_counter()
                found[size] = sample()
                spent[size] += time.perf_counter() - start
                taken[size] += 1
            connection.send(found)
    except EOFError:
        pass
    except BaseException:
        connection.send({"error": traceback.format_exc()})
        raise
