"""The picture of a pool: what is drawn is what there is."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.inspect import page_map
from kvpool.inspect.colours import OF_STATE, PRIVATE
from kvpool.owners import PageState
from kvpool.requests import RequestTable
from tests.helpers.driven import driven
from tests.helpers.pictures import picture_of, random_picture
from tests.helpers.pools import R, cache_prompt, case_pool

SVG = "{http://www.w3.org/2000/svg}"
ROOT = Path(__file__).resolve().parents[1]


# ---- SVG


def runs_of(svg):
    """Tooltip, and class and width of each stripe, of each run of the grid."""
    grid = [g for g in svg.iter(f"{SVG}g") if "translate" in g.get("transform", "")][-1]
    for run in [g for g in grid.findall(f"{SVG}g") if g.find(f"{SVG}title") is not None]:
        stripes = [
            (path.get("class"), float(re.search(r"h([\d.]+)v", path.get("d"))[1]))
            for path in run.findall(f"{SVG}path")
        ]
        yield run.findtext(f"{SVG}title"), stripes


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), num_calls=st.integers(0, 100))
def test_svg_of_a_driven_pool_draws_each_page_in_its_state(seed, num_calls):
    twin = driven(seed, num_calls + 1, num_pages=40, page_size=1)
    picture, stats = page_map(twin.pool), twin.pool.stats()
    svg = ElementTree.fromstring(picture.svg(columns=8))
    drawn = Counter()
    for tooltip, stripes in runs_of(svg):
        ((css, width),) = stripes
        drawn[css.rstrip("012345")] += width
        assert re.match(r"pages? \d+", tooltip)
    assert drawn == Counter(
        {
            "kv-own": stats["pages_private"],
            "kv-tree": stats["pages_evictable"],
            "kv-lock": stats["pages_tree"] - stats["pages_evictable"],
            "kv-take": stats["pages_taken"],
            "kv-free": stats["pages_free"],
        }
    )
    scratch = [each for each in svg.iter(f"{SVG}title") if "scratch" in each.text]
    assert [each.text for each in scratch] == ["page 40: scratch, never handed out"]
    legend = sum(
        int(match[1].replace(",", ""))
        for text in svg.iter(f"{SVG}text")
        if (match := re.search(r": ([\d,]+) \(.* %\)$", text.text))
    )
    assert legend == stats["pages_total"]
    twin.pool.close()


def test_svg_of_a_large_pool_says_how_many_pages_a_cell_is_and_sums_them_in_tooltips():
    picture = random_picture(3, 100_000)
    svg = ElementTree.fromstring(picture.svg())
    drawn = list(runs_of(svg))
    # 100,000 pages in at most 64 x 48 cells: 33 a cell, and the next round number is 50.
    assert "A cell is 50 pages" in "".join(svg.itertext())
    widths = sum(width for _, stripes in drawn for _, width in stripes)
    assert widths == pytest.approx(2000)
    sums = Counter()
    for tooltip, _ in drawn:
        for part in re.findall(r"[\d,]+ [a-z][a-z, ]*?(?=, \d|$)", tooltip.split(": ")[1]):
            count, name = part.split(" ", 1)
            sums[name] += int(count.replace(",", ""))
    counts = picture.counts()
    assert sums == {
        "private": counts["pages_private"],
        "cached, evictable": counts["pages_evictable"],
        "cached, locked": counts["pages_locked"],
        "taken by alloc": counts["pages_taken"],
        "free": counts["pages_free"],
    }


def test_svg_merges_pages_of_one_look_and_parts_requests(make_pool):
    pool = case_pool(make_pool, 2, 20)
    cache_prompt(pool, R(1, 8))
    first, second = (pool.bind_request(R(50 + n, 53 + n), 4) for n in (0, 10))
    pool.mark_written(first, 4)
    pool.fork_request(first, 6)
    drawn = list(runs_of(ElementTree.fromstring(page_map(pool).svg())))
    assert drawn == [
        ("pages 0 to 3: cached, evictable", [("kv-tree", 4)]),
        (f"pages 4 to 5: request {first}, shared by up to 2 requests", [("kv-own0", 2)]),
        (f"pages 6 to 7: request {second}", [("kv-own1", 2)]),
        ("page 8: request 4", [("kv-own2", 1)]),
        ("pages 9 to 19: free", [("kv-free", 11)]),
    ]


def test_svg_has_its_own_colours_for_dark_mode_and_every_class_it_uses():
    text = random_picture(5, 3000).svg(columns=20, max_rows=30)
    light, dark = re.search(r"<style>(.*)@media[^{]*\{(.*)\}</style>", text, re.S).groups()
    used = {name for names in re.findall(r'class="([^"]+)"', text) for name in names.split()}
    assert used <= set(re.findall(r"\.(kv-[a-z0-9]+)\{", light))
    for look in (*OF_STATE.values(), *PRIVATE):
        assert f".{look.css}{{fill:{look.light}}}" in light
        assert f".{look.css}{{fill:{look.dark}}}" in dark


def test_svg_is_written_and_is_what_a_notebook_shows(tmp_path):
    picture = random_picture(1, 50)
    assert picture.svg(tmp_path / "map.svg") == picture._repr_svg_()
    assert (tmp_path / "map.svg").read_text(encoding="utf-8") == picture.svg()


def test_picture_of_many_requests_says_how_many():
    private = [PageState.PRIVATE] * 7
    picture = picture_of(private, range(1, 8))
    assert picture.pages_by_request == dict.fromkeys(range(1, 8), 1)
    assert "private to 7 requests: 7 (100.0 %)" in picture.svg()
    assert "request 6: 1 (16.7 %)" in picture_of(private[:6], range(1, 7)).svg()


# ---- text


def test_text_of_a_pool_shows_pages_and_legend(make_pool):
    pool = case_pool(make_pool, 2, 12)
    cache_prompt(pool, R(1, 4))
    pool.bind_request([1, 2, 9], 4)
    pool.bind_request([7], 2)
    pool.alloc(4)
    assert page_map(pool).text(columns=5).splitlines() == [
        " 0 █▒ab+",
        " 5 +····",
        "10 ··",
        "a-z private to 2 requests: 2 (16.7 %)",
        "  █ cached, locked: 1 (8.3 %)",
        "  ▒ cached, evictable: 1 (8.3 %)",
        "  + taken by alloc: 2 (16.7 %)",
        "  · free: 6 (50.0 %)",
    ]
    assert str(page_map(pool)) == page_map(pool).text()


def test_text_of_a_large_pool_says_how_many_pages_a_character_is():
    states = np.zeros(10_000, np.uint8)
    states[:3] = PageState.TAKEN
    text = picture_of(states).text(columns=10, max_rows=5)
    assert text.splitlines()[:2] == ["     0 ··········", " 2,000 ··········"]
    assert "one character: 200 pages" in text
    assert "taken by alloc: 3 (<0.1 %)" in text
    assert "free: 9,997 (>99.9 %)" in text


def test_picture_of_a_request_table_has_no_scratch_page():
    table = RequestTable(6, 2, 1)
    table.bind([1, 2, 3], 4, None, 0, True)
    picture = page_map(table)
    assert picture.counts()["pages_private"] == 2
    assert "never handed out" not in picture.svg()


def test_picture_without_pages_is_empty():
    picture = page_map(RequestTable(0, 2, 1))
    assert picture.text() == ""
    assert "0 pages of 2 tokens" in picture.svg()


# ---- PNG


def test_png_is_written(tmp_path):
    reader = pytest.importorskip("matplotlib.image")
    random_picture(2, 5000).png(tmp_path / "map.png", columns=20, max_rows=10, dpi=40)
    image = reader.imread(tmp_path / "map.png")
    assert image.shape[1] == 360  # 9 inches of 40 dots
    assert len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 8


def test_png_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match=r"kvpool\[cli\]"):
        random_picture(2, 20).png(tmp_path / "map.png")
    assert not (tmp_path / "map.png").exists()


# ---- bad input


@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        ({"columns": 0}, ValueError, "columns must be at least 1, got 0"),
        ({"max_rows": -1}, ValueError, "max_rows must be at least 1, got -1"),
        ({"columns": 2.0}, TypeError, "columns must be an int, got float"),
        ({"max_rows": True}, TypeError, "max_rows must be an int, got bool"),
    ],
)
def test_draw_with_a_grid_without_cells_names_the_size(tmp_path, size, error, message):
    picture = random_picture(2, 20)
    with pytest.raises(error, match=message):
        picture.text(**size)
    with pytest.raises(error, match=message):
        picture.svg(tmp_path / "map.svg", **size)
    with pytest.raises(error, match=message):
        picture.png(tmp_path / "map.png", **size)
    assert not list(tmp_path.iterdir())


def test_page_map_of_something_else_says_what_it_wants():
    with pytest.raises(TypeError, match="expected a KVCachePool, got list"):
        page_map([])


def test_import_of_inspect_loads_neither_rich_nor_matplotlib():
    code = "import sys, kvpool.inspect; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"rich", "matplotlib"} & set(run.stdout.split())
