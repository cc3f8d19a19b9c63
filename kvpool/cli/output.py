"""What commands print: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

Cell = str | int | float | None

# As `_shown` writes them, with a unit or without; or no number at all.
_NUMBER = re.compile(r"-|[-+]?\d[\d,.]*( ?[\w%/]+)?")


class CommandError(Exception):
    """Bad input, in words for the person who gave it; ends the command without a traceback.

    Parameters
    ----------
    message : str
        What was expected, what was given, and what to do.
    exit_code : int
        Exit code of the process.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def console() -> Console:
    """A console on the stdout of this moment: plain in a pipe, colourless under NO_COLOR."""
    return Console(highlight=False, emoji=False)


def error_console() -> Console:
    """The same on stderr, for progress and for what went wrong."""
    return Console(stderr=True, highlight=False, emoji=False)


def print_error(message: str) -> None:
    """Print ``error: message`` on stderr, in lines as the message has them."""
    text = Text.assemble(("error:", "bold red"), " ", message)
    error_console().print(text, soft_wrap=True)


def print_json(value: object) -> None:
    """Print one JSON document on stdout, and nothing else there; integers stay exact.

    Raises
    ------
    ValueError
        NaN or an infinity, which JSON does not have: write None instead.
    """
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Table:
    """A table as wide as stdout allows; text breaks at its spaces, numbers never.

    Columns that hold numbers only are aligned right.

    Parameters
    ----------
    title : str
        Heading; may be empty.
    columns : sequence of str
        Their names.
    rows : iterable of sequences
        One cell a column: text, an int (printed with commas), a float (four decimals) or None
        (printed as ``-``). Text that is a number with a unit, ``2.00 GiB``, is one too.
    """
    cells = [[_shown(cell) for cell in row] for row in rows]
    return _table(title, columns, cells, _widths(columns, cells, console().width))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
    """Print a table on stdout; where it is too narrow for one, a line a cell."""
    cells = [[_shown(cell) for cell in row] for row in rows]
    out = console()
    widths = _widths(columns, cells, out.width)
    if widths is not None:
        out.print(_table(title, columns, cells, widths))
        return
    if title:
        out.print(Text(title, style="bold"))
    for row in cells:
        for index, (name, cell) in enumerate(zip(columns, row, strict=True)):
            out.print(Text(f"{'  ' if index else ''}{name}: {cell}"))


def _table(
    title: str, columns: Sequence[str], cells: list[list[str]], widths: list[int] | None
) -> Table:
    result = Table(title=title or None, title_justify="left", title_style="bold")
    for index, name in enumerate(columns):
        result.add_column(
            Text(name),
            justify="right" if _holds_numbers(cells, index) else "left",
            overflow="fold",
            width=None if widths is None else widths[index],
        )
    for row in cells:
        result.add_row(*map(Text, row))
    return result


def _widths(columns: Sequence[str], cells: list[list[str]], room: int) -> list[int] | None:
    """Widths of the columns: first no word broken, then whole cells, small wishes first.

    None where there is not even room for the words. rich's own rule takes from the widest column,
    and breaks words in it.
    """
    least, most = [], []
    for index, name in enumerate(columns):
        column = [row[index] for row in cells]
        whole = _holds_numbers(cells, index)
        pieces = [*name.split(), *(column if whole else " ".join(column).split())]
        least.append(max(map(cell_len, pieces), default=1))
        most.append(max(map(cell_len, [name, *column])))
    spare = room - sum(least) - 3 * len(columns) - 1  # frames, and a blank on each side
    if spare < 0:
        return None
    for index in sorted(range(len(columns)), key=lambda index: most[index] - least[index]):
        more = min(spare, most[index] - least[index])
        least[index] += more
        spare -= more
    return least


def _shown(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:.4f}" if isinstance(cell, float) else cell


def _holds_numbers(cells: list[list[str]], index: int) -> bool:
    return all(_NUMBER.fullmatch(row[index]) for row in cells)
