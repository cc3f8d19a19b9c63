"""The tree of cached prefixes as a person looks at it, with rich."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.inspect.hits import PrefixHits
from kvpool.inspect.sources import Source, tree_of
from kvpool_ext.outline import (
    Branch,
    check_limit,
    counted,
    describe,
    heading,
    namespace_name,
    outline,
    preview,
)
from kvpool_ext.radix import RadixCache
from kvpool_ext.views import TreeSurvey

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text
    from rich.tree import Tree

# From what goes next to what goes last: readable on dark and on light, and without colour.
HEAT = tuple(
    zip(
        "▁▂▃▄▅▆▇█",
        ("#4a7bd0", "#3f9fcf", "#2fae9d", "#6fae3f", "#b9a22c", "#dd8b2b", "#e0632e", "#d93b3b"),
        strict=True,
    )
)
LOCKED = ("●", "bold magenta")
NEEDS_RICH = "the tree in colour needs rich: pip install 'kvpool[cli]' (format_tree needs nothing)"


class _Sight(NamedTuple):
    """What one look at a tree needs in all its parts."""

    cache: RadixCache
    survey: TreeSurvey
    heat: NDArray[np.int64]
    hits: NDArray[np.int64] | None
    tokens: int | None


def tree(
    pool: Source | RadixCache,
    *,
    max_nodes: int | None = 100,
    max_depth: int | None = 16,
    tokens: int | None = 6,
    hits: PrefixHits | None = None,
) -> RenderableType:
    """The tree of cached prefixes, to be printed by rich.

    Namespaces are roots, larger subtrees stand before smaller ones. The bar before a node, and its
    colour, say how many of the evictable pages go before it does; a dot says that it is locked.
    For the scheduler thread, as every call of a pool.

    Parameters
    ----------
    pool : KVCachePool, RequestTable or RadixCache
        What to look at.
    max_nodes, max_depth : int or None
        Nodes to show in all, and levels under a namespace; None for no limit. What they cut is
        summed up in a line of its own.
    tokens : int or None
        Tokens to show of a node: half of them its first, half its last. None for all.
    hits : PrefixHits, optional
        Counted hits, to be shown at each node.

    Raises
    ------
    ImportError
        rich is not installed.
    ValueError, TypeError
        A limit that is no number, or below 0 (`max_depth`: below 1).
    """
    try:
        from rich.console import Group
        from rich.text import Text
        from rich.tree import Tree
    except ImportError as error:
        raise ImportError(NEEDS_RICH) from error
    check_limit(tokens, "tokens", 0)
    cache = tree_of(pool)
    survey = cache.survey()
    whole = outline(survey, max_nodes, max_depth)
    if whole.total.num_nodes == 0:
        return Text(f"(empty tree, page size {survey.page_size})")
    counts = None if hits is None else hits.per_node(survey)
    sight = _Sight(cache, survey, _heat(survey), counts, tokens)
    parts: list[RenderableType] = [Text(heading(survey, whole), style="bold"), _key()]
    for namespace in whole.children:
        name = namespace_name(survey.namespaces[namespace.index])
        root = Tree(Text.assemble((f"namespace {name}", "bold"), f" {namespace.total}"))
        _hang(root, namespace, sight)
        parts.append(root)
    if whole.left_out.num_nodes:
        parts.append(Text(f"… other namespaces: {whole.left_out}", style="dim"))
    return Group(*parts)


def top_prefixes(hits: PrefixHits, n: int = 10, *, tokens: int = 6) -> Table:
    """The prefixes that saved most tokens, as a table to be printed by rich.

    Parameters
    ----------
    hits : PrefixHits
        What was counted.
    n, tokens : int
        Rows, and tokens to show of each.
    """
    try:
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise ImportError(NEEDS_RICH) from error
    gone = hits.saved_by_evicted
    table = Table(
        title=f"{hits.saved_tokens:,} of {hits.prompt_tokens:,} prompt tokens saved by "
        f"{counted(hits.num_hits, 'hit')} of {counted(hits.num_binds, 'bind')}",
        caption=f"{gone:,} of them by prefixes that were evicted since",
        title_justify="left",
        caption_justify="left",
    )
    for column in ("saved", "share", "hits", "locks"):
        table.add_column(column, justify="right")
    for column in ("namespace", "prefix", "tokens"):
        table.add_column(column)
    for saving in hits.top(n, tokens=tokens):
        table.add_row(
            f"{saving.saved_tokens:,}",
            f"{saving.saved_tokens / hits.saved_tokens:.1%}",
            f"{saving.hits:,}",
            str(saving.lock_ref or ""),
            Text("" if saving.extra_key is None else repr(saving.extra_key)),
            Text(f"[{saving.start}, {saving.end})"),
            saving.tokens,
        )
    return table


def _hang(root: Tree, namespace: Branch, sight: _Sight) -> None:
    # A stack, not recursion: a tree may be thousands of nodes deep.
    stack = [(root, namespace)]
    while stack:
        place, branch = stack.pop()
        for child in branch.children:
            stack.append((place.add(_label(child, sight)), child))
        if branch.left_out.num_nodes:
            place.add(f"… {branch.left_out}", style="dim")


def _label(branch: Branch, sight: _Sight) -> Text:
    from rich.text import Text

    i = branch.index
    step = int(sight.heat[i])
    label = Text.assemble(
        LOCKED if step < 0 else HEAT[step],
        " ",
        describe(sight.survey, i),
        no_wrap=True,
        overflow="ellipsis",
    )
    if sight.hits is not None and sight.hits[i]:
        saved = int(sight.hits[i] * sight.survey.num_pages[i]) * sight.survey.page_size
        label.append(f", {counted(int(sight.hits[i]), 'hit')} saved {saved:,}", style="green")
    if branch.total.num_nodes > 1:
        label.append(f" (below: {branch.below})", style="dim")
    shown = preview(sight.cache, sight.survey, i, sight.tokens)
    label.append(f": {shown}" if shown else "", style="dim")
    return label


def _heat(survey: TreeSurvey) -> NDArray[np.int64]:
    """A step of `HEAT` for each node, -1 for a locked one."""
    heat = np.full(survey.num_nodes, -1, np.int64)
    linked = np.flatnonzero(survey.turns >= 0)
    order = linked[np.argsort(survey.turns[linked])]
    pages = survey.num_pages[order].astype(np.int64)
    before = np.cumsum(pages) - pages
    # By the middle of a node: a large one is neither as early as its first page nor as late.
    heat[order] = len(HEAT) * (2 * before + pages) // max(1, 2 * int(pages.sum()))
    return heat


def _key() -> Text:
    from rich.text import Text

    return Text.assemble(
        HEAT[0], " evicted next  ", *HEAT[1:-1], " ", HEAT[-1], " last  ", LOCKED, " locked"
    )
