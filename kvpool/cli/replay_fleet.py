"""What a replay shows of tiers and instances."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvpool.cli.numbers import show_bytes
from kvpool.cli.output import Cell
from kvpool.cli.replay_settings import column_names, settings_of, short, varying
from kvpool.replay import CellResult, ReplayReport
from kvpool.replay.fleet_result import PLACES

Figures = tuple[list[str], list[list[Cell]]]


def hit_figures(report: ReplayReport) -> Figures:
    """A row a cell: its hits, by where they were."""
    names, places = varying(report), _places(report)
    columns = [*column_names(names), "hits", *places, "bound"]
    rows: list[list[Cell]] = []
    for result in report.results:
        bound = report.bounds.get(result.cell.page_size)
        hits: list[Cell] = [result.hit_rate, *map(result.hit_rate_of, places)]
        hits.append(None if bound is None else bound.hit_rate)
        rows.append([*settings_of(result, names), *hits])
    return columns, rows


def load_figures(report: ReplayReport) -> Figures:
    """A row a cell: what its tiers had to hold, and how evenly its instances served."""
    names, places = varying(report), _places(report)
    columns = column_names(names)
    for place in places[1:]:
        columns += [f"{place} pages", f"{place} evicted"]
    columns += ["requests", "tokens"]
    rows: list[list[Cell]] = []
    for result in report.results:
        fleet = result.fleet
        row = settings_of(result, names)
        if "host" in places:
            row += [short(fleet.host_peak_pages), short(fleet.host_evicted_pages)]
        if "remote" in places:
            row += [short(fleet.remote_peak_pages), short(fleet.remote_evicted_pages)]
        rows.append([*row, _shares(fleet.request_shares), _shares(fleet.prompt_token_shares)])
    return columns, rows


def fleet_remarks(report: ReplayReport) -> Iterator[str]:
    """What the columns mean, and the bytes behind the pages where a token's are known."""
    yield (
        "hits: found of all prompt tokens, by where they were; bound: hits if nothing were "
        "evicted; pages: at most, of the fullest tier; requests, tokens: least to largest share "
        "that an instance served"
    )
    for result in report.results:
        peaks = ", ".join(_peaks(result))
        if peaks:
            yield f"{result.cell}: at most {peaks} of K and V"


def _places(report: ReplayReport) -> Sequence[str]:
    fleets = [result.cell.fleet for result in report.results]
    used = {
        "local": True,
        "host": any(fleet.host_tier != 0 for fleet in fleets),
        "remote": any(fleet.remote_tier != 0 for fleet in fleets),
    }
    return [place for place in PLACES if used[place]]


def _peaks(result: CellResult) -> Iterator[str]:
    for place, num_bytes in result.peak_bytes.items():
        if num_bytes:
            yield f"{place} {show_bytes(num_bytes)}"


def _shares(shares: tuple[float, float] | None) -> str:
    return "-" if shares is None else f"{shares[0]:.1%}-{shares[1]:.1%}"
