"""Replay: a trace through one cell after another, each a pass over the file.

One cell at a time, so that the memory is that of one pool, and what is measured of a pool does not
depend on the pools beside it. Reading a trace again and making its tokens again is half of the
time of a cell; all cells in one pass could save no more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

from kvpool.replay.cell import Cell
from kvpool.replay.driver import CellReplay
from kvpool.replay.lines import TraceRequest
from kvpool.replay.options import Progress, ReplayOptions
from kvpool.replay.reader import TraceError, TraceReader
from kvpool.replay.results import CellResult, ReplayReport
from kvpool.replay.survey import Survey
from kvpool.replay.token_ids import TokenWriter

NEWS_EVERY_S = 0.05
MAX_HISTORY = 2**31 - 1  # tokens that a pool can remember


class Replay:
    """A replay that can be looked at while it runs, and after an interrupt.

    Parameters
    ----------
    trace : str or Path
        A file of JSON lines, also through gzip; `kvpool.replay.lines` has the two formats.
    cells : iterable of Cell
        What to replay it through, in this order; see `kvpool.replay.grid`.
    options : ReplayOptions, optional
        How.

    Raises
    ------
    ValueError
        No cell, or one with tiers or several instances where `explain` is asked for.
    """

    def __init__(
        self, trace: str | Path, cells: Iterable[Cell], options: ReplayOptions | None = None
    ) -> None:
        self.trace = Path(trace)
        self.cells = list(dict.fromkeys(cells))
        self.options = options if options is not None else ReplayOptions()
        if not self.cells:
            raise ValueError("expected at least one cell")
        page_sizes = dict.fromkeys(cell.page_size for cell in self.cells)
        unbounded = [Cell(None, page_size) for page_size in page_sizes]
        if not self.options.bound:
            unbounded = [cell for cell in unbounded if cell in self.cells]
        if self.options.explain and not all(cell.fleet.is_plain for cell in self.cells):
            raise ValueError(
                "explain asks one pool why it lost something: leave out explain, or instances and "
                "tiers"
            )
        # These first, for what the others lost is measured against them.
        self._plan = unbounded + [cell for cell in self.cells if not cell.is_bound]
        self._survey = Survey(
            list(page_sizes),
            self.options.prompts_only,
            find_shared=any(cell.is_unbounded for cell in self._plan),
        )
        self._first = self._reader()
        self._replayed: dict[Cell, CellResult] = {}
        self._running: tuple[CellReplay, float] | None = None
        self._on_progress: Callable[[Progress], None] | None = None
        self._started = False
        self._passes = 0

    def run(self, on_progress: Callable[[Progress], None] | None = None) -> ReplayReport:
        """Replay all cells; once.

        An interrupt comes through, and `report` then has what there is.

        Parameters
        ----------
        on_progress : callable, optional
            Called with a `Progress` about twenty times a second, and at the end of each pass.

        Raises
        ------
        TraceError
            The file is missing, is no trace, changed meanwhile, or (strict) has a malformed line;
            or a pool needs more memory than there is.
        """
        if self._started:
            raise RuntimeError("a Replay runs once: make another one")
        self._started = True
        self._on_progress = on_progress
        for _, request in self._requests(self._first):
            self._survey.add(request)
        # All of them before the first replay, which may take long.
        sizes = [cell.num_pages(self._survey, self.options.window) for cell in self._plan]
        for cell, num_pages in zip(self._plan, sizes, strict=True):
            self._replay(cell, num_pages)
        return self.report()

    def report(self) -> ReplayReport:
        """All that is known by now."""
        replayed = dict(self._replayed)
        if self._running is not None:
            running, start = self._running
            result = running.result()
            result.seconds = perf_counter() - start
            if result.num_requests + result.too_large:
                replayed[result.cell] = result
        bounds = [cell for cell in self._plan if cell.is_bound and cell in replayed]
        return ReplayReport(
            trace=self.trace.name,
            num_requests=self._survey.num_requests,
            prompt_tokens=self._survey.prompt_tokens,
            output_tokens=self._survey.output_tokens,
            longest_request=self._survey.longest,
            num_lines=self._first.num_lines,
            num_malformed=self._first.num_malformed,
            malformed=list(self._first.malformed),
            options=asdict(self.options),
            complete=len(self._replayed) == len(self._plan),
            results=[replayed[cell] for cell in self.cells if cell in replayed],
            bounds={cell.page_size: replayed[cell] for cell in bounds},
        )

    def _replay(self, cell: Cell, num_pages: int) -> None:
        options, asked_for = self.options, cell in self.cells
        start = perf_counter()
        num_losses = options.explain if asked_for else 0
        bound = self._replayed.get(Cell(None, cell.page_size))
        running = CellReplay(
            cell,
            num_pages,
            window=options.window,
            checkpoint=options.checkpoint,
            num_losses=num_losses,
            unbounded_lens=bound.matched_lens if bound is not None else None,
            keep_matches=options.keep_matches or (cell.is_bound and options.explain > 0),
            eviction_history=self._tokens(cell.page_size) if num_losses else None,
            bytes_per_token=options.bytes_per_token,
        )
        self._running = running, start
        writer = TokenWriter(options.block_size)
        reader = self._reader(last_line=self._first.num_lines)
        for index, request in self._requests(reader, running):
            if running.fits(request.num_tokens(options.prompts_only)):
                running.serve(index, request, writer.tokens(index, request, options.prompts_only))
            else:
                running.refuse(request)
        if reader.num_requests != self._survey.num_requests:
            raise TraceError(
                f"{self.trace} changed while it was replayed: {reader.num_requests:,} requests, "
                f"{self._survey.num_requests:,} when it was read first"
            )
        running.drain()
        running.close()
        result = running.result()
        result.seconds = perf_counter() - start
        result.complete = True
        self._replayed[cell] = result
        self._running = None

    def _tokens(self, page_size: int) -> int:
        """All that the trace can make a pool evict: a shorter history explains wrongly."""
        num_pages = self._survey.unbounded_pages(page_size, self.options.window)
        return min(num_pages * page_size, MAX_HISTORY)

    def _reader(self, last_line: int | None = None) -> TraceReader:
        """Of the first pass, or of one that reads what the first one read."""
        options, is_first = self.options, last_line is None
        return TraceReader(
            self.trace,
            block_size=options.block_size,
            limit=options.limit,
            last_line=last_line,
            strict=options.strict and is_first,
        )

    def _requests(
        self, reader: TraceReader, running: CellReplay | None = None
    ) -> Iterator[tuple[int, TraceRequest]]:
        """The requests of one pass with their numbers; tells how far it is."""
        start = told_at = perf_counter()
        for index, request in enumerate(reader):
            yield index, request
            now = perf_counter()
            if now >= told_at + NEWS_EVERY_S:
                told_at = now
                self._tell(reader, running, now - start)
        self._passes += 1
        self._tell(reader, running, perf_counter() - start)

    def _tell(self, reader: TraceReader, running: CellReplay | None, seconds: float) -> None:
        if self._on_progress is None:
            return
        file_bytes = self._first.file_bytes if running is None else self._first.bytes_read
        self._on_progress(
            Progress(
                cell=None if running is None else running.cell,
                passes=self._passes,
                num_passes=1 + len(self._plan),
                pass_bytes=reader.bytes_read,
                file_bytes=file_bytes,
                num_requests=reader.num_requests,
                seconds=seconds,
                hit_rate=None if running is None else running.hit_rate,
            )
        )
