"""What a replay shows: a bar while it runs, and tables at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from kvpool.cli.output import Cell, console, error_console, print_table
from kvpool.cli.replay_fleet import fleet_remarks, hit_figures, load_figures
from kvpool.cli.replay_settings import (
    column_names,
    has_fleets,
    settings,
    settings_of,
    short,
    varying,
)
from kvpool.numbers import counted
from kvpool.replay import Progress as News
from kvpool.replay import ReplayReport


@contextmanager
def progress_bar() -> Iterator[Callable[[News], None]]:
    """A bar on stderr over all passes, with the rate and the hit rate; nothing in a pipe."""
    err = error_console()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )
    with bar:
        task = bar.add_task("reading", total=None, rate="")

        def show(news: News) -> None:
            share = min(1.0, news.pass_bytes / news.file_bytes) if news.file_bytes else 0.0
            done = news.passes + (share if news.passes < news.num_passes else 0.0)
            rate = f"{news.num_requests / news.seconds:,.0f} requests/s" if news.seconds else ""
            if news.hit_rate is not None:
                rate += f", hit rate {news.hit_rate:.3f}"
            bar.update(
                task,
                description="reading" if news.cell is None else f"{news.cell}",
                completed=done,
                total=news.num_passes,
                rate=rate,
            )

        yield show


def show_report(report: ReplayReport) -> None:
    """Print what was found."""
    out = console()
    out.print(Text(_about(report)), soft_wrap=True)
    if not report.results:
        return
    if has_fleets(report):
        print_table("", *hit_figures(report))
        print_table("Tiers and instances", *load_figures(report))
        remarks = fleet_remarks(report)
    else:
        print_table("", *_figures(report))
        remarks = _meanings()
    for line in (*remarks, *_remarks(report)):
        out.print(Text(line), soft_wrap=True)
    for result in report.results:
        losses = [loss for loss in result.losses if loss.unbounded_tokens != loss.matched_tokens]
        if losses:
            out.print(Text(f"\nLost most at {result.cell}:", style="bold"), soft_wrap=True)
        elif result.losses:
            out.print(f"\nAt {result.cell} no request lost anything.", soft_wrap=True)
        for loss in losses:
            text = (
                f"line {loss.line}, request {loss.request_id}: found {loss.matched_tokens:,} of "
            )
            text += f"{loss.prompt_tokens:,} tokens"
            if loss.unbounded_tokens is not None:
                text += f", where an unbounded pool finds {loss.unbounded_tokens:,}"
            out.print(Text(f"{text}. {loss.explanation}"), soft_wrap=True)


def _about(report: ReplayReport) -> str:
    options = report.options
    text = f"{report.trace}: {counted(report.num_requests, 'request')}, "
    text += f"{report.prompt_tokens:,} prompt"
    text += (
        " tokens (outputs left out)"
        if options["prompts_only"]
        else f" and {report.output_tokens:,} output tokens"
    )
    if options["window"] > 1:
        text += f"; up to {options['window']:,} in flight"
        text += (
            " an instance"
            if any(result.cell.fleet.instances > 1 for result in report.results)
            else ""
        )
        text += "" if options["checkpoint"] else ", prompts shared at their end only"
    for name, values in settings(report).items():
        if len(values) == 1:
            text += f"; {name} {values.pop()}"
    return text


def _figures(report: ReplayReport) -> tuple[list[str], list[list[Cell]]]:
    """A table that fits 80 columns with all but the policy."""
    names = varying(report)
    rows: list[list[Cell]] = []
    for result in report.results:
        bound = report.bounds.get(result.cell.page_size)
        rows.append(
            [
                *settings_of(result, names),
                result.hit_rate,
                result.mean_hit_rate,
                None if bound is None else bound.hit_rate,
                short(result.evicted_pages),
                short(result.peak_pages),
                _whole(result.bookkeeping_requests_per_s),
            ]
        )
    return [*column_names(names), "hits", "mean", "bound", "evicted", "peak", "calls/s"], rows


def _meanings() -> Iterator[str]:
    yield (
        "hits: found of all prompt tokens; mean: of each prompt, over the requests; bound: hits "
        "if nothing were evicted; evicted, peak: pages; calls/s: requests a second in kvpool alone"
    )


def _remarks(report: ReplayReport) -> Iterator[str]:
    for result in report.results:
        if not result.complete:
            count = counted(result.num_requests + result.too_large, "request")
            yield f"{result.cell}: interrupted after {count}"
        if result.too_large:
            yield (
                f"{result.cell}: {counted(result.too_large, 'request')} larger than the pool "
                f"({counted(result.too_large_tokens, 'prompt token')}) left out"
            )
        if result.waited:
            yield f"{result.cell}: {counted(result.waited, 'request')} waited for room"
    worst = max(report.results, key=lambda result: result.cut_tokens)
    if worst.cut_tokens:
        yield (
            f"{worst.cell}: {counted(worst.cut_requests, 'prompt')} cached to their end had "
            f"{counted(worst.cut_tokens, 'token')} computed again, for the logits of their last "
            "position; "
            f"without, hits {worst.uncut_hit_rate:.5f}"
        )
    seconds = sum(result.seconds for result in report.results)
    total = sum(result.num_requests for result in report.results)
    yield f"{counted(total, 'request')} in {seconds:.1f} s, with reading and making tokens"


def _whole(rate: float | None) -> int | None:
    return None if rate is None else round(rate)
