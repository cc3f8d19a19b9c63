"""The pictures that the pages show: small PNG files, read at 700 pixels of width."""

from bench.report.pictures import growth, replay


def draw_all(results, folder, say=print):
    """Draw what there is."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in (
        ("replay_headline", replay.draw_headline),
        ("replay_cells", replay.draw_cells),
        ("growth", growth.draw),
    ):
        size = draw(results, folder / f"{name}.png")
        say(f"{name}.png: {size / 1024:.0f} KB" if size else f"{name}.png: nothing to draw yet")
