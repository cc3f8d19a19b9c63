"""Timing of small things: interleaved rounds, medians, ratios from the same run."""

import json
import statistics
import time


def interleave(cases, *, rounds=30, repeat=1):
    """Median seconds a call of each case, `{name: (setup, call)}` or `{name: call}`.

    The cases take turns, so that a slow moment of the machine hits all of them. `setup()` runs
    before each timed stretch of `repeat` calls, and its result is handed to every call.
    """
    samples = {name: [] for name in cases}
    for i in range(rounds + 2):
        for name, case in cases.items():
            setup, call = case if isinstance(case, tuple) else (None, case)
            arguments = (setup(),) if setup else ()
            start = time.perf_counter()
            for _ in range(repeat):
                call(*arguments)
            seconds = (time.perf_counter() - start) / repeat
            if i >= 2:  # the first two warm caches and compile kernels
                samples[name].append(seconds)
    return {name: statistics.median(times) for name, times in samples.items()}


class Table:
    """Rows of one benchmark: a number with its unit, and what it is a multiple of."""

    def __init__(self, title):
        self.title = title
        self.rows = []

    def add(self, name, value, unit, *, ratio=None, to=""):
        self.rows.append({"name": name, "value": value, "unit": unit, "ratio": ratio, "to": to})

    def show(self):
        width = max(len(row["name"]) for row in self.rows)
        print(self.title)
        for row in self.rows:
            ratio = f"  {row['ratio']:7.2f} x {row['to']}" if row["ratio"] is not None else ""
            print(f"  {row['name']:<{width}}  {row['value']:12.3f} {row['unit']:<8}{ratio}")

    def write_json(self, path):
        with open(path, "w") as file:
            json.dump({"title": self.title, "rows": self.rows}, file, indent=1)
            file.write("\n")
