"""Which nodes of a tree to show, and the tree as text.

A tree may have more nodes than anybody reads. Those with the largest subtrees are shown: a node's
subtree is smaller than its parent's, so the largest ones hang together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvpool_ext.survey import node_tokens, survey_tree
from kvpool_ext.views import Namespace, TreeSurvey

if TYPE_CHECKING:
    from kvpool_ext.radix import RadixCache


class Sums(NamedTuple):
    """Nodes, pages, and those of the pages that are locked."""

    num_nodes: int
    num_pages: int
    locked_pages: int

    def __str__(self) -> str:
        locked = f", {self.locked_pages:,} locked" if self.locked_pages else ""
        return f"{counted(self.num_nodes, 'node')}, {counted(self.num_pages, 'page')}{locked}"


@dataclass
class Branch:
    """A node, a namespace or the whole tree, and what to show below it.

    Attributes
    ----------
    index : int
        Of the node, or of the namespace, in the survey; -1 for the whole tree.
    own : Sums
        Of the node itself, zeros for what is no node.
    total : Sums
        With everything below it.
    children : list of Branch
        What to show, the largest first.
    """

    index: int
    own: Sums
    total: Sums
    children: list[Branch] = field(default_factory=list)

    @property
    def below(self) -> Sums:
        """What is below here."""
        return _minus(self.total, self.own)

    @property
    def left_out(self) -> Sums:
        """What is below here and not shown."""
        return _minus(self.total, self.own, *(child.total for child in self.children))


NOTHING = Sums(0, 0, 0)


def _minus(total: Sums, *parts: Sums) -> Sums:
    return Sums(*(of_all - sum(rest) for of_all, *rest in zip(total, *parts, strict=True)))


def outline(survey: TreeSurvey, max_nodes: int | None, max_depth: int | None) -> Branch:
    """The whole tree as a branch; its children are the namespaces, theirs the top-level nodes.

    Parameters
    ----------
    survey : TreeSurvey
        What there is to show.
    max_nodes, max_depth : int or None
        Nodes to show in all, and levels under a namespace; None for no limit.

    Raises
    ------
    ValueError, TypeError
        A limit that is no number or too small.
    """
    check_limit(max_nodes, "max_nodes", 0)
    check_limit(max_depth, "max_depth", 1)
    below = survey.subtree_ends - np.arange(survey.num_nodes, dtype=np.int64)
    locked = np.where(survey.lock_refs > 0, survey.num_pages, 0)
    pages = survey.subtree_sums(survey.num_pages)
    totals = np.stack([below, pages, survey.subtree_sums(locked)], axis=1)

    shown = np.arange(survey.num_nodes)
    if max_depth is not None:
        shown = np.flatnonzero(survey.depths < max_depth)
    if max_nodes is not None and shown.size > max_nodes:
        largest = np.argsort(-pages[shown], kind="stable")[:max_nodes]
        shown = np.sort(shown[largest])

    of_namespaces = np.zeros((len(survey.namespaces), 3), np.int64)
    tops = np.flatnonzero(survey.parents < 0)
    np.add.at(of_namespaces, survey.namespace_ids[tops], totals[tops])
    whole = Branch(-1, NOTHING, Sums(*of_namespaces.sum(axis=0).tolist()))
    namespaces = [Branch(i, NOTHING, Sums(*row)) for i, row in enumerate(of_namespaces.tolist())]
    nodes: dict[int, Branch] = {}
    for i, total in zip(shown.tolist(), totals[shown].tolist(), strict=True):
        own = Sums(1, int(survey.num_pages[i]), int(locked[i]))
        nodes[i] = Branch(i, own, Sums(*total))
        parent = int(survey.parents[i])
        above = nodes[parent] if parent >= 0 else namespaces[survey.namespace_ids[i]]
        above.children.append(nodes[i])
    whole.children = [namespace for namespace in namespaces if namespace.children]
    for branch in (whole, *whole.children, *nodes.values()):
        branch.children.sort(key=lambda child: -child.total.num_pages)
    return whole


def format_tree(
    tree: RadixCache, max_nodes: int | None, max_depth: int | None, tokens: int | None
) -> str:
    """The tree as text; `RadixCache.format_tree` says how."""
    check_limit(tokens, "tokens", 0)
    survey = survey_tree(tree)
    whole = outline(survey, max_nodes, max_depth)
    if whole.total.num_nodes == 0:
        return f"(empty tree, page size {tree.page_size})"
    lines = [heading(survey, whole)]
    for namespace in whole.children:
        name = namespace_name(survey.namespaces[namespace.index])
        lines += ["", f"namespace {name}: {namespace.total}"]
        lines += _below(tree, survey, namespace, tokens)
    if whole.left_out.num_nodes:
        lines += ["", f"… other namespaces: {whole.left_out}"]
    return "\n".join(lines)


def _below(
    tree: RadixCache, survey: TreeSurvey, namespace: Branch, tokens: int | None
) -> Iterator[str]:
    # A stack, not recursion: a tree may be thousands of nodes deep.
    stack: list[tuple[str, Branch | Sums, bool]] = []

    def push(indent: str, branch: Branch) -> None:
        rows: list[Branch | Sums] = list(branch.children)
        if branch.left_out.num_nodes:
            rows.append(branch.left_out)
        for i in range(len(rows) - 1, -1, -1):
            stack.append((indent, rows[i], i == len(rows) - 1))

    push("", namespace)
    while stack:
        indent, row, is_last = stack.pop()
        stem = indent + ("└─ " if is_last else "├─ ")
        if isinstance(row, Sums):
            yield f"{stem}… {row}"
            continue
        shown = preview(tree, survey, row.index, tokens)
        yield stem + describe(survey, row.index) + (f": {shown}" if shown else "")
        push(indent + ("   " if is_last else "│  "), row)


def heading(survey: TreeSurvey, whole: Branch) -> str:
    """One line about all of the tree."""
    total = whole.total
    evictable = total.num_pages - total.locked_pages
    first = " (#1 goes first)" if evictable else ""
    return (
        f"{counted(total.num_nodes, 'node')}, {counted(total.num_pages, 'page')} of "
        f"{counted(survey.page_size, 'token')}: {evictable:,} evictable{first}, "
        f"{total.locked_pages:,} locked"
    )


def describe(survey: TreeSurvey, i: int) -> str:
    """A node in words: its token range, pages, locks, priority and turn."""
    start = int(survey.starts[i])
    end = start + int(survey.num_pages[i]) * survey.page_size
    locks, priority, turn = (
        int(column[i]) for column in (survey.lock_refs, survey.priorities, survey.turns)
    )
    return (
        f"[{start}, {end}) {counted(int(survey.num_pages[i]), 'page')}"
        + (f", locked x{locks}" if locks else "")
        + (f", #{turn + 1}" if turn >= 0 else "")
        + (f", priority {priority}" if priority else "")
        + (", left the index by a reset" if survey.detached[i] else "")
    )


def preview(tree: RadixCache, survey: TreeSurvey, i: int, limit: int | None) -> str:
    """The first and the last tokens of a node, at most `limit` of them; None for all."""
    num_tokens = int(survey.num_pages[i]) * survey.page_size
    handle = int(survey.handles[i])
    if limit is None or num_tokens <= limit:
        return " ".join(map(str, node_tokens(tree, handle, 0, num_tokens)))
    if limit == 0:
        return ""
    first = node_tokens(tree, handle, 0, (limit + 1) // 2)
    last = node_tokens(tree, handle, num_tokens - limit // 2, num_tokens)
    return " ".join([*map(str, first), "…", *map(str, last)])


def namespace_name(namespace: Namespace) -> str:
    """What a namespace is called."""
    if namespace.dropped:
        return "(dropped by a reset)"
    return "(no extra key)" if namespace.extra_key is None else repr(namespace.extra_key)


def counted(count: int, what: str) -> str:
    """A number with its noun: 1 page, 1,204 pages."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def check_limit(limit: int | None, name: str, at_least: int) -> None:
    """Raise for a limit that is neither None nor an int of at least `at_least`."""
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, (int, np.integer)):
        raise TypeError(f"{name} must be an int or None, got {type(limit).__name__}")
    if limit < at_least:
        raise ValueError(f"{name} must be at least {at_least}, or None for no limit, got {limit}")
