"""What the pictures have in common: their look, and how they become small files."""

import io

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from PIL import Image

WIDTH = 7.0  # inches, which a page shows as 700 pixels
DPI = 140
COLOURS = 40  # of a file: lines and letters, and their edges
SMALL, LARGE = 8, 10  # points
GREY, LIGHT = "#777777", "#dddddd"

plt.rcParams.update(
    {
        "font.size": SMALL,
        "axes.titlesize": SMALL + 0.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.7,
        "axes.axisbelow": True,
        "grid.color": LIGHT,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
    }
)


def sheet(height, **options):
    """A figure with its axes."""
    return plt.subplots(figsize=(WIDTH, height), layout="constrained", **options)


def save(figure, path):
    """A PNG of few colours; its bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    plt.close(figure)
    picture = Image.open(buffer).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    return path.stat().st_size
