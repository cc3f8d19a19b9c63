"""The picture of a pool as PNG, with matplotlib."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from kvpool.inspect.cells import STEPS, Cells
from kvpool.inspect.colours import DIM, INK

if TYPE_CHECKING:
    from kvpool.inspect.picture import PoolPicture

WIDTH = 9.0  # inches


def draw_png(picture: PoolPicture, cells: Cells, path: str | os.PathLike[str], dpi: int) -> None:
    """Write the picture to `path`; ImportError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import to_rgb
        from matplotlib.figure import Figure
        from matplotlib.legend_handler import HandlerTuple
        from matplotlib.patches import Patch
        from matplotlib.ticker import FuncFormatter
    except ImportError as error:
        raise ImportError(
            "a PNG needs matplotlib: pip install 'kvpool[cli]' (an SVG needs nothing)"
        ) from error

    rows, columns = cells.num_rows, cells.columns
    colours = np.ones((rows, columns * STEPS, 3))
    for run in cells.runs():
        for state, start, end in cells.stripes(run):
            rgb = to_rgb(picture.look(state, run.request_id).light)
            first = run.column * STEPS
            colours[run.row, first + start : first + end] = rgb

    # A canvas of its own: pyplot would look for a display, and keep the figure.
    figure = Figure(figsize=(WIDTH, rows * WIDTH / (columns + 8) + 1.4), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.imshow(
        colours,
        extent=(0, columns, rows, 0),
        interpolation="nearest",
    )
    axes.set_title(picture.title, loc="left", fontsize=11, color=INK[0])
    axes.set_xticks(range(columns + 1), minor=True)
    axes.set_yticks(range(rows + 1), minor=True)
    axes.grid(which="minor", axis="y", color="white", linewidth=0.7)
    thin = 0.25 if cells.pages_per_cell > 1 else 0.7
    axes.grid(which="minor", axis="x", color="white", linewidth=thin)
    axes.set_xticks([])
    axes.set_yticks(np.arange(0, rows, 1 if rows <= 8 else 4) + 0.5)
    per_row = columns * cells.pages_per_cell
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{int(y) * per_row:,}"))
    axes.tick_params(which="both", length=0, labelsize=8, labelcolor=DIM[0])
    axes.spines[:].set_visible(False)

    entries = [
        (tuple(Patch(facecolor=look.light) for look in looks), words)
        for looks, words in picture.legend()
    ]
    figure.legend(
        handles=[patches for patches, _ in entries],
        labels=[words for _, words in entries],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.1)},
        title=cells.note or None,
        loc="outside lower left",
        alignment="left",
        ncols=3,
        frameon=False,
        fontsize=9,
        title_fontsize=8,
        labelcolor=INK[0],
    )
    canvas.print_figure(path, dpi=dpi, format="png", facecolor="white")
