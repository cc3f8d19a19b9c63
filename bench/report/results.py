"""The results that are kept: a JSON file a part, of pieces that were measured one by one.

Each file has the shape that its program writes, and beside it `made`: who, when and with what, for
each piece. So `bench/growth.py --from-json` reads the curves that are kept here.
"""

import json
import os
from functools import cached_property

from bench.replay.command import TRACES
from bench.replay.trace import MADE_UP

DIGITS = 4  # that matter
LINE = 1_000  # characters: what fits is written as one line


class Results:
    """What a folder has; files that are not there, or not from here, are empty."""

    def __init__(self, folder):
        self.folder = folder
        self._parts = {}

    def part(self, name):
        """Everything that a file has."""
        if name not in self._parts:
            path = self.folder / f"{name}.json"
            found = json.loads(path.read_text()) if path.exists() else {}
            self._parts[name] = found if "made" in found else {}
        return self._parts[name]

    def made(self, part):
        """Piece -> how it was made."""
        return self.part(part).get("made", {})

    def rows(self, part):
        """Rows of a part that is one table."""
        return self.part(part).get("rows", [])

    @cached_property
    def curves(self):
        """All curves of the growth."""
        return self.part("growth").get("curves", [])

    @cached_property
    def cells(self):
        """Cells of the replay by name, real traces first; a made-up one only where it is alone."""
        cells = self.part("replay").get("cells", {})
        real = [name for name, cell in cells.items() if cell["trace"] != MADE_UP]
        return {name: cells[name] for name in sorted(real or cells, key=lambda n: order(cells[n]))}

    def is_kept(self, piece, source):
        """Whether a piece was measured by this state of the sources, and this command."""
        made = self.made(piece.part).get(piece.name, {})
        return (made.get("source"), made.get("command")) == (source, piece.text)

    def keep(self, piece, found, made):
        """Add what a program found to its part."""
        self._parts[piece.part] = merged(self.part(piece.part), rounded(found), piece, made)
        vars(self).pop("curves", None)
        vars(self).pop("cells", None)
        write(self.folder / f"{piece.part}.json", self._parts[piece.part])


def order(cell):
    """Where a cell stands among the others."""
    trace = TRACES.index(cell["trace"]) if cell["trace"] in TRACES else len(TRACES)
    return trace, cell["window"], -cell["capacity"], cell["page_size"]


def merged(old, new, piece, made):
    """What a part has with a new piece in the place of the old."""
    result = {**old, **new}
    if "cells" in new:  # one, which is a quick one under another name
        (cell,) = new["cells"].values()
        cell.pop("machine", None)
        result["cells"] = old.get("cells", {}) | {piece.name: cell}
    if "curves" in new:
        others = [curve for curve in old.get("curves", []) if curve["subject"] != piece.name]
        result["curves"] = others + new["curves"]
    result["made"] = old.get("made", {}) | {piece.name: made}
    return result


def rounded(value):
    """The same, floats to the digits that matter."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def write(path, value):
    """A file whose lines are as long as is good to read; whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(f"{text_of(value)}\n")
    os.replace(unfinished, path)


def text_of(value, indent=0):
    """JSON in lines."""
    line = json.dumps(value)
    if len(line) <= LINE or not isinstance(value, (dict, list)):
        return line
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {text_of(item, indent + 1)}" for key, item in value.items()]
        left, right = "{}"
    else:
        items = [text_of(item, indent + 1) for item in value]
        left, right = "[]"
    inner = f",\n{pad}".join(items)
    return f"{left}\n{pad}{inner}\n{' ' * indent}{right}"
