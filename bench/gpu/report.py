"""What the sections have in common: rows of a table, the clock, and arrays."""

from __future__ import annotations

import json
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Report:
    """Rows of all sections.

    Attributes
    ----------
    seconds : float
        Time that the run may take; sections leave their last cases out when it is spent.
    small : bool
        Small sizes only, for a sanitizer.
    """

    seconds: float = 230.0
    small: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    @property
    def time_is_up(self) -> bool:
        return time.perf_counter() - self.started > self.seconds

    def add(self, section, case, value, unit, *, ok=None, note=""):
        """Add a row; `ok` is None where there is nothing to pass."""
        row = {"section": section, "case": case, "value": value, "unit": unit}
        self.rows.append(row | {"ok": ok, "note": note})
        shown = f"{value:12.3f}" if isinstance(value, float) else f"{value!s:>12}"
        verdict = {None: "", True: "ok", False: "FAILED"}[ok]
        print(f"{section:<10} {case:<52} {shown} {unit:<8} {verdict} {note}".rstrip(), flush=True)

    def skip(self, section, case, why):
        """Add a row for what cannot run here, and says why."""
        self.add(section, case, 0, "", note=f"{why}: skipped")

    @contextmanager
    def attempt(self, section, case):
        """A block for one case: if it raises, that is a failed row, and the next case runs."""
        try:
            yield
        except Exception as error:
            self.add(section, case, 0, "", ok=False, note=repr(error)[:300])

    @property
    def failed(self):
        return [row for row in self.rows if row["ok"] is False]

    def write_json(self, path, about):
        with open(path, "w") as file:
            json.dump({"about": about, "rows": self.rows}, file, indent=1)
            file.write("\n")


def bits(array):
    """The same bytes as unsigned integers."""
    return array.view(f"u{array.dtype.itemsize}")


def upload(cupy, host):
    """A host array of any dtype on the device, by its bytes."""
    return cupy.asarray(bits(host)).view(host.dtype)


def download(array):
    """A device array of any dtype on the host, as unsigned integers."""
    return bits(array).get()


def device_seconds(cupy, launch, *, repeat=20, samples=7):
    """Median seconds of one launch on the device: `repeat` of them, captured in a graph."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        launch()  # whatever has to be loaded
        stream.synchronize()
        stream.begin_capture()
        for _ in range(repeat):
            launch()
        graph = stream.end_capture()
        return event_seconds(cupy, stream, lambda: graph.launch(stream), samples) / repeat


def event_seconds(cupy, stream, call, samples=7):
    """Median seconds between two events around a call, on a stream."""
    found = []
    for _ in range(samples + 1):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        call()
        end.record(stream)
        end.synchronize()
        found.append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
    return statistics.median(found[1:])


def host_seconds(call, wait, *, calls=200, samples=9):
    """Median seconds of the host a call; `wait()` empties the queue between samples."""
    found = []
    for _ in range(samples + 1):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls)
        wait()
    return statistics.median(found[1:])
