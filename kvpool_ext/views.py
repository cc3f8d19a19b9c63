"""What the tree tells people and callers: plain read-only tuples, and a picture in text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class MatchResult(NamedTuple):
    """Answer of `RadixCache.match_prefix`.

    Attributes
    ----------
    length : int
        Matched tokens, a multiple of the page size.
    pages : ndarray
        int32 ``[length / page_size]``, the page ids of the match.
    node : int
        Handle of the deepest node of the match (the root where nothing matched); valid until that
        node is evicted, so lock it to keep it.
    """

    length: int
    pages: NDArray[np.int32]
    node: int


class InsertResult(NamedTuple):
    """Answer of `RadixCache.insert`: tokens cached before, and the deepest node's handle."""

    prefix_len: int
    node: int


class NodeView(NamedTuple):
    """One node of the tree, copied out.

    Attributes
    ----------
    node, parent : int
        Handles; the parent of a top-level node is its namespace's root.
    extra_key : str, bytes, int or None
        The namespace.
    start : int
        Tokens before this node on its path.
    tokens : ndarray
        int32 ``[num_pages * page_size]``.
    pages : ndarray
        int32 ``[num_pages]``.
    lock_ref : int
        Holders whose path passes through here.
    priority : int
        Class of the node; lower goes first.
    num_children : int
        Children in the index.
    detached : bool
        Left the index by a reset and lives until its last unlock.
    """

    node: int
    parent: int
    extra_key: str | bytes | int | None
    start: int
    tokens: NDArray[np.int32]
    pages: NDArray[np.int32]
    lock_ref: int
    priority: int
    num_children: int
    detached: bool


def _short(tokens: NDArray[np.int32], limit: int = 6) -> str:
    shown = " ".join(str(token) for token in tokens[:limit])
    return shown if tokens.size <= limit else f"{shown} … ({tokens.size} tokens)"


def format_tree(views: Iterable[NodeView], page_size: int) -> str:
    """Draw the nodes as an indented tree, a namespace a block, children by their first token."""
    children: dict[int, list[NodeView]] = {}
    roots: dict[int, NodeView] = {}
    for view in views:
        children.setdefault(view.parent, []).append(view)
        if view.start == 0:
            roots.setdefault(view.parent, view)
    lines = []
    for root, first in sorted(roots.items()):
        name = "(no extra key)" if first.extra_key is None else repr(first.extra_key)
        lines.append(f"namespace {name}{', detached by a reset' if first.detached else ''}")
        # A stack, not recursion: a tree may be thousands of nodes deep.
        stack = [(1, view) for view in _by_token(children.get(root, []))]
        while stack:
            depth, view = stack.pop()
            lock = f", locked x{view.lock_ref}" if view.lock_ref else ""
            priority = f", priority {view.priority}" if view.priority else ""
            end = view.start + view.tokens.size
            lines.append(
                f"{'  ' * depth}[{view.start}, {end}) {view.pages.size} pages{lock}{priority}: "
                f"{_short(view.tokens)}"
            )
            stack.extend((depth + 1, child) for child in _by_token(children.get(view.node, [])))
    return "\n".join(lines) if lines else f"(empty tree, page size {page_size})"


def _by_token(views: list[NodeView]) -> list[NodeView]:
    # Reversed, because the caller pops from the end.
    return sorted(views, key=lambda view: tuple(view.tokens[:8]), reverse=True)
