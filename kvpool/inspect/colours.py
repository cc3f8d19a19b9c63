"""What the states of pages look like: colours for light and dark mode, and a character.

The tree is blue, as in the picture of the README; requests have the warm and the green colours.
"""

from __future__ import annotations

from typing import NamedTuple

from kvpool.owners import PageState


class Look(NamedTuple):
    """How one kind of page is drawn: its name, two colours, a character, a class of a style sheet.

    Class names begin with kv-, for an SVG inside a web page shares its style sheet with the page.
    """

    name: str
    light: str
    dark: str
    glyph: str
    css: str


FREE = Look("free", "#e3e8eb", "#2d333b", "·", "kv-free")
EVICTABLE = Look("cached, evictable", "#8fc1e3", "#5b93bd", "▒", "kv-tree")
LOCKED = Look("cached, locked", "#2471a3", "#8ecbf5", "█", "kv-lock")
TAKEN = Look("taken by alloc", "#8e7cc3", "#a493d8", "+", "kv-take")

OF_STATE = {
    PageState.FREE: FREE,
    PageState.EVICTABLE: EVICTABLE,
    PageState.LOCKED: LOCKED,
    PageState.TAKEN: TAKEN,
}

# Requests take turns with them, in the order in which they were bound.
PRIVATE = (
    Look("private", "#f1948a", "#e2766b", "a", "kv-own0"),
    Look("private", "#82c99a", "#5faa79", "b", "kv-own1"),
    Look("private", "#f7d774", "#cfae45", "c", "kv-own2"),
    Look("private", "#f0a868", "#cf8745", "d", "kv-own3"),
    Look("private", "#e79fc9", "#c678a6", "e", "kv-own4"),
    Look("private", "#b9cf6a", "#94ab46", "f", "kv-own5"),
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"

PAPER = ("#ffffff", "#0d1117")
INK = ("#1b2631", "#e6edf3")
DIM = ("#566573", "#9aa4af")


def name_of(state: PageState) -> str:
    """What a picture calls a state."""
    return PRIVATE[0].name if state == PageState.PRIVATE else OF_STATE[state].name
