"""The code on the pages of docs/ runs, page by page, and the site's navigation names every page.

A block behind ``<!-- not run: why -->`` is not run; nothing else is left out.
"""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from kvpool import KVCachePool

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NOT_RUN = r"(<!-- not run: [^\n]+ -->\n\n)?"
BLOCK = re.compile(NOT_RUN + r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
OTHER_TEST = {"engine.md"}  # tests/test_examples.py
# Blocks of it stand for a model that is not there.
FRAGMENTS = {"gpu.md"}
GUESTS = {
    "howto/events.md": "zmq",
    "howto/torch.md": "torch",
    "howto/transformers.md": "transformers",
}


def name_of(page):
    return page.relative_to(DOCS).as_posix()


def blocks(page):
    """(line, code) of each block that is to run."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start(2)), match.group(2))
        for match in BLOCK.finditer(text)
        if not match.group(1)
    ]


RUN = [page for page in PAGES if name_of(page) not in OTHER_TEST | FRAGMENTS and blocks(page)]


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_blocks_of_the_page_run_in_order(page):
    if name_of(page) in GUESTS:
        pytest.importorskip(GUESTS[name_of(page)])
    names = {}
    with redirect_stdout(io.StringIO()):
        for line, code in blocks(page):
            # So that an error names the line of the page.
            exec(compile("\n" * line + code, str(page), "exec"), names)
    for pool in [made for made in names.values() if isinstance(made, KVCachePool)]:
        pool.check()
        pool.close()


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page():
    text = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE)
    assert sorted(listed) == [name_of(page) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_between_pages_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"
