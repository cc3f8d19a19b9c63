"""The pages: text that is written by hand, with tables between markers that are not.

``<!-- results:NAME -->`` begins what `sections` fills, ``<!-- /results -->`` ends it.
"""

import re

from bench.report.sections import SECTIONS
from bench.report.sources import ROOT

PAGES = "docs/performance.md", "README.md"
BLOCK = re.compile(r"<!-- results:(.*?) -->\n(.*?)<!-- (/?results.*?) -->", re.DOTALL)
BEGIN = re.compile(r"<!-- results:")


class PageError(ValueError):
    """Markers that do not fit."""


def filled(text, results):
    """A page with every block anew; the same page, if its blocks say what the results say."""

    def block(match):
        name, _, end = match.groups()
        if end != "/results":
            raise PageError(f"the block {name!r} has no end before {end!r}")
        if name not in SECTIONS:
            raise PageError(f"no section {name!r}; there are {', '.join(SECTIONS)}")
        return f"<!-- results:{name} -->\n\n{SECTIONS[name](results)}\n\n<!-- /results -->"

    page, count = BLOCK.subn(block, text)
    if count != len(BEGIN.findall(text)):
        raise PageError("a block has no end")
    return page


def write_all(results, root, say=print):
    """Fill the pages below `root`, from those of the clone where it has none."""
    for name in PAGES:
        path = root / name
        frame = path if path.exists() else ROOT / name
        before = frame.read_text(encoding="utf-8")
        page = filled(before, results)
        if path.exists() and page == before:
            say(f"{name} says so already")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
        say(f"{name} is written")
