"""The tree as text, and which nodes of a large one are shown."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import RadixCache
from kvpool_ext.outline import outline
from tests.helpers.driven import driven


@pytest.fixture
def tree():
    """Two prompts that part after two pages, one of another namespace; a lock, a priority."""
    tree = RadixCache(2)
    node = tree.insert([1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3]).node
    tree.insert([1, 2, 3, 4, 9, 9], [0, 1, 4], priority=3)
    tree.insert(list(range(100, 140)), range(10, 30), "tenant")
    tree.inc_lock_ref(node)
    return tree


def test_format_tree_shows_ranges_pages_locks_turns_and_namespaces(tree):
    assert tree.format_tree().splitlines() == [
        "4 nodes, 25 pages of 2 tokens: 21 evictable (#1 goes first), 4 locked",
        "",
        "namespace 'tenant': 1 node, 20 pages",
        "└─ [0, 40) 20 pages, #1: 100 101 102 … 137 138 139",
        "",
        "namespace (no extra key): 3 nodes, 5 pages, 4 locked",
        "└─ [0, 4) 2 pages, locked x1, priority 3: 1 2 3 4",
        "   ├─ [4, 8) 2 pages, locked x1: 5 6 7 8",
        "   └─ [4, 6) 1 page, #2, priority 3: 9 9",
    ]


def test_format_tree_of_an_empty_tree_says_so():
    assert RadixCache(4).format_tree() == "(empty tree, page size 4)"


def test_format_tree_says_what_the_limits_left_out(tree):
    text = tree.format_tree(max_nodes=2, tokens=3)
    assert text.splitlines()[2:] == [
        "namespace 'tenant': 1 node, 20 pages",
        "└─ [0, 40) 20 pages, #1: 100 101 … 139",
        "",
        "namespace (no extra key): 3 nodes, 5 pages, 4 locked",
        "└─ [0, 4) 2 pages, locked x1, priority 3: 1 2 … 4",
        "   └─ … 2 nodes, 3 pages, 2 locked",
    ]
    text = tree.format_tree(max_nodes=1, tokens=0)
    assert text.splitlines()[2:] == [
        "namespace 'tenant': 1 node, 20 pages",
        "└─ [0, 40) 20 pages, #1",
        "",
        "… other namespaces: 3 nodes, 5 pages, 4 locked",
    ]
    assert "… other namespaces: 4 nodes, 25 pages, 4 locked" in tree.format_tree(max_nodes=0)
    assert "[4, 8)" not in tree.format_tree(max_depth=1)
    assert ": " + " ".join(map(str, range(100, 140))) in tree.format_tree(tokens=None)


def test_format_tree_of_a_large_tree_is_short():
    rng = np.random.default_rng(1)
    tree = RadixCache(1, num_pages=30_000)
    pages = itertools.count()
    for _ in range(3000):
        tokens = rng.integers(0, 3, 12).tolist()
        known = tree.match_prefix(tokens).length // 1
        tree.insert(tokens, [0] * known + [next(pages) for _ in range(12 - known)])
    assert tree.num_nodes > 3000
    lines = tree.format_tree().splitlines()
    # 100 nodes, at most one line a node for what is left out below it, and three of heading.
    assert 100 < len(lines) <= 204
    left_out = sum(
        int(n.replace(",", "")) for n in re.findall(r"… ([\d,]+) node", "\n".join(lines))
    )
    assert left_out == tree.num_nodes - 100
    assert len(tree.format_tree(max_nodes=None, max_depth=None).splitlines()) == tree.num_nodes + 3


def test_format_tree_of_a_deep_tree_neither_recurses_nor_runs_off_to_the_right():
    tree = RadixCache(1)
    tokens = np.arange(3000)
    for n in range(1, 3001):
        tree.insert(tokens[:n], tokens[:n])
    lines = tree.format_tree().splitlines()
    assert max(map(len, lines)) < 120
    assert lines[-1].strip() == "└─ … 2,984 nodes, 2,984 pages"
    assert len(tree.format_tree(max_nodes=None, max_depth=None).splitlines()) == 3003


def test_format_tree_names_what_a_reset_left():
    tree = RadixCache(1)
    for key in (None, "a"):
        tree.inc_lock_ref(tree.insert([1], [0 if key is None else 1], key).node)
    tree.reset()
    tree.insert([5], [2])
    text = tree.format_tree()
    assert "namespace (dropped by a reset): 1 node, 1 page, 1 locked" in text
    assert text.count("left the index by a reset") == 2
    assert "namespace 'a'" not in text


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    max_nodes=st.none() | st.integers(0, 12),
    max_depth=st.none() | st.integers(1, 4),
)
def test_outline_shows_the_largest_subtrees_and_its_sums_are_those_of_the_tree(
    seed, max_nodes, max_depth
):
    twin = driven(seed, 120, num_pages=40, page_size=1)
    radix = twin.pool.radix
    survey = radix.survey()
    whole = outline(survey, max_nodes, max_depth)
    assert whole.total.num_nodes == radix.num_nodes
    assert whole.total.num_pages == radix.total_size
    assert whole.total.locked_pages == radix.protected_size
    branches, stack = [], [(0, each) for each in whole.children]
    while stack:
        depth, branch = stack.pop()
        assert branch.children or depth, "a namespace is shown for a node of it"
        parts = [branch.own, branch.left_out, *(child.total for child in branch.children)]
        assert tuple(map(sum, zip(*parts, strict=True))) == branch.total
        assert min(branch.left_out) >= 0
        branches += [branch] if depth else []
        stack += [(depth + 1, child) for child in branch.children]
        assert max_depth is None or depth <= max_depth
    sizes = survey.subtree_sums(survey.num_pages)
    if max_depth is not None:
        sizes = sizes[survey.depths < max_depth]
    wanted = np.sort(sizes)[::-1][:max_nodes].tolist()
    assert sorted((branch.total.num_pages for branch in branches), reverse=True) == wanted
    twin.pool.close()


@pytest.mark.parametrize(
    ("limits", "error", "message"),
    [
        (
            {"max_nodes": -1},
            ValueError,
            "max_nodes must be at least 0, or None for no limit, got -1",
        ),
        ({"max_depth": 0}, ValueError, "max_depth must be at least 1"),
        ({"tokens": -2}, ValueError, "tokens must be at least 0"),
        ({"max_nodes": 2.5}, TypeError, "max_nodes must be an int or None, got float"),
        ({"tokens": True}, TypeError, "tokens must be an int or None, got bool"),
    ],
)
def test_format_tree_with_a_bad_limit_names_it(tree, limits, error, message):
    with pytest.raises(error, match=message):
        tree.format_tree(**limits)
