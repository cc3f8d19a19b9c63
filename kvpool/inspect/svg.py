"""The picture of a pool as SVG: written by hand, so that it is small and needs nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvpool.inspect.cells import STEPS, Cells, Run
from kvpool.inspect.colours import DIM, INK, OF_STATE, PAPER, PRIVATE, Look, name_of
from kvpool.owners import PageState

if TYPE_CHECKING:
    from kvpool.inspect.picture import PoolPicture

CELL = 12  # side of a cell, in the picture's units
MARGIN = 16
LABELS = 60  # width of the page numbers on the left
BAR = 14  # height of the bar of all pages
LINE = 22  # height of a line of the legend
GLYPH = 6.7  # width of a character of the legend, about


def draw_svg(picture: PoolPicture, cells: Cells) -> str:
    """The picture as the text of an SVG file.

    A run of cells that are alike is one path, with its pages as a tooltip; lines above them show
    the cells.
    """
    width = max(MARGIN + LABELS + cells.columns * CELL + MARGIN, 360)
    legend, top = _legend(picture, cells, width)
    grid_x, grid_y = MARGIN + LABELS, top + 8
    with_scratch = picture.has_scratch and cells.pages_per_cell == 1
    # The scratch page may need a row of its own.
    num_rows = -(-(cells.num_cells + with_scratch) // cells.columns)
    height = grid_y + num_rows * CELL + MARGIN
    labels = [
        f'<text class="kv-dim" x="{grid_x - 8}" y="{grid_y + row * CELL + 10}" font-size="11" '
        f'text-anchor="end">{row * cells.columns * cells.pages_per_cell:,}</text>'
        for row in range(0, cells.num_rows, 1 if num_rows <= 8 else 4)
    ]
    across = "".join(f"M0 {row}H{cells.columns}" for row in range(1, num_rows))
    down = "".join(f"M{column} 0V{num_rows}" for column in range(1, cells.columns))
    # Thin ones do not hide the stripes of cells with several states.
    thin = ' stroke-width=".03"' if cells.pages_per_cell > 1 else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f"<title>{picture.title}</title>",
        _style(),
        f'<rect class="kv-paper" width="{width}" height="{height}"/>',
        *legend,
        *labels,
        f'<g transform="translate({grid_x} {grid_y}) scale({CELL})">',
        *(_run(picture, cells, run) for run in cells.runs()),
        *(_scratch(picture, cells) if with_scratch else ()),
        '<g class="kv-line" pointer-events="none" stroke-width=".09">',
        f'<path d="{across}"/><path{thin} d="{down}"/>',
        "</g>",
        "</g>",
        "</svg>",
    ]
    return _in_light("\n".join(parts) + "\n")


def _fills() -> dict[str, tuple[str, str]]:
    """Colours of each class, in light and dark mode."""
    fills = {look.css: (look.light, look.dark) for look in (*OF_STATE.values(), *PRIVATE)}
    return fills | {"kv-paper": PAPER, "kv-ink": INK, "kv-dim": DIM}


def _in_light(svg: str) -> str:
    """The light mode as attributes too, for what reads no style sheet; a style sheet overrides."""
    attributes = {name: f'fill="{light}"' for name, (light, _) in _fills().items()}
    attributes["kv-line"] = f'fill="none" stroke="{PAPER[0]}"'
    attributes["kv-scratch"] = f'fill="none" stroke="{DIM[0]}" stroke-width=".14"'
    return re.sub(r'class="(kv-[\w-]+)"', lambda match: f"{match[0]} {attributes[match[1]]}", svg)


def _style() -> str:
    fills = _fills()
    light, dark = (
        "".join(f".{name}{{fill:{colours[mode]}}}" for name, colours in fills.items())
        + f".kv-line{{stroke:{PAPER[mode]}}}.kv-scratch{{stroke:{DIM[mode]}}}"
        for mode in (0, 1)
    )
    return (
        f"<style>{light}.kv-line{{fill:none}}"
        ".kv-scratch{fill:none;stroke-width:.14}"
        f"@media (prefers-color-scheme:dark){{{dark}}}</style>"
    )


def _legend(picture: PoolPicture, cells: Cells, width: int) -> tuple[list[str], int]:
    """Title, bar of all pages, looks and words; and where they end."""
    drawn = [
        f'<text class="kv-ink" x="{MARGIN}" y="30" font-size="15" font-weight="bold">'
        f"{picture.title}</text>"
    ]
    y = 42
    drawn += _bar(picture, width - 2 * MARGIN, y)
    y += BAR + LINE
    x = MARGIN
    entries = [([look.css for look in looks], words) for looks, words in picture.legend()]
    if picture.has_scratch and cells.pages_per_cell == 1:
        entries.append((["kv-scratch"], "scratch, never handed out"))
    for names, words in entries:
        needed = len(names) * (CELL + 1) + 4 + int(GLYPH * len(words))
        if x > MARGIN and x + needed > width - MARGIN:
            x = MARGIN
            y += LINE
        # The scratch page is an outline, whose width is in units of a cell.
        drawn += [
            f'<g transform="translate({x + i * (CELL + 1)} {y - 10}) scale({CELL})">'
            f'<rect class="{name}" width="1" height="1"/></g>'
            for i, name in enumerate(names)
        ]
        text_x = x + len(names) * (CELL + 1) + 4
        drawn.append(f'<text class="kv-ink" x="{text_x}" y="{y}">{words}</text>')
        x += needed + 16
    if cells.note:
        y += LINE - 2
        drawn.append(f'<text class="kv-dim" x="{MARGIN}" y="{y}">{cells.note}</text>')
    return drawn, y + 8


def _bar(picture: PoolPicture, width: int, y: int) -> Iterator[str]:
    """All pages as one bar, the private ones in the colours of their requests."""
    parts: list[tuple[Look, int, str]] = []
    for state, count, words in picture.shares():
        if state != PageState.PRIVATE:
            parts.append((OF_STATE[state], count, words))
            continue
        by_look = dict.fromkeys(PRIVATE, 0)
        for request_id, own in picture.pages_by_request.items():
            by_look[picture.look(state, request_id)] += own
        parts += [(look, own, words) for look, own in by_look.items() if own]
    # At least a unit each.
    room = width - len(parts)
    x = float(MARGIN)
    for look, count, words in parts:
        part = 1 + room * count / picture.num_pages
        yield (
            f'<rect class="{look.css}" x="{x:.1f}" y="{y}" width="{part:.1f}" height="{BAR}">'
            f"<title>{words}</title></rect>"
        )
        x += part


def _run(picture: PoolPicture, cells: Cells, run: Run) -> str:
    stripes = []
    for state, start, end in cells.stripes(run):
        # In cells, without zeros that say nothing.
        x, width = (f"{part:g}" for part in (run.column + start / STEPS, (end - start) / STEPS))
        css = picture.look(state, run.request_id).css
        stripes.append(f'<path class="{css}" d="M{x} {run.row}h{width}v1h-{width}z"/>')
    return f"<g><title>{_tooltip(picture, cells, run)}</title>{''.join(stripes)}</g>"


def _tooltip(picture: PoolPicture, cells: Cells, run: Run) -> str:
    first, end = run.first_page, run.end_page
    where = f"page {first:,}" if end == first + 1 else f"pages {first:,} to {end - 1:,}"
    if cells.pages_per_cell > 1:
        parts = [f"{count:,} {name_of(state)}" for state, count in run.counts.items()]
        return f"{where}: {', '.join(parts)}"
    if not run.request_id:
        return f"{where}: {name_of(*run.counts)}"
    most = int(picture.owners.num_holders[first:end].max())
    forks = f", shared by up to {most} requests" if most > 1 else ""
    return f"{where}: request {run.request_id}{forks}"


def _scratch(picture: PoolPicture, cells: Cells) -> Iterator[str]:
    row, column = divmod(picture.num_pages, cells.columns)
    yield (
        f'<rect class="kv-scratch" x="{column}.15" y="{row}.15" width=".7" height=".7">'
        f"<title>page {picture.num_pages:,}: scratch, never handed out</title></rect>"
    )
