"""The survey of a tree beside `nodes()`, which copies each node out on its own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import EVICTION_POLICIES, RadixCache
from kvpool_ext.survey import node_tokens
from tests.helpers.driven import driven

PER_NODE = (
    "handles",
    "parents",
    "namespace_ids",
    "depths",
    "subtree_ends",
    "starts",
    "num_pages",
    "lock_refs",
    "priorities",
    "detached",
    "turns",
)


def pages_of(survey, i):
    first = int(survey.num_pages[:i].sum())
    return survey.pages[first : first + survey.num_pages[i]].tolist()


def assert_survey_is_nodes(radix):
    survey = radix.survey()
    views = {view.node: view for view in radix.nodes()}
    assert sorted(survey.handles.tolist()) == sorted(views)
    assert {getattr(survey, name).shape for name in PER_NODE} == {(len(views),)}
    for i, handle in enumerate(survey.handles.tolist()):
        view, parent = views[handle], int(survey.parents[i])
        above = survey.namespaces[survey.namespace_ids[i]]
        assert (survey.handles[parent] if parent >= 0 else above.root) == view.parent
        assert (above.extra_key, type(above.extra_key)) == (view.extra_key, type(view.extra_key))
        assert survey.starts[i] == view.start
        assert pages_of(survey, i) == view.pages.tolist()
        assert (survey.lock_refs[i], survey.priorities[i]) == (view.lock_ref, view.priority)
        assert survey.detached[i] == view.detached
        assert survey.depths[i] == (survey.depths[parent] + 1 if parent >= 0 else 0)
        # A subtree is the stretch behind its root of nodes that are deeper than it.
        deeper = survey.depths[i + 1 :] > survey.depths[i]
        assert survey.subtree_ends[i] == i + 1 + (
            int(np.argmin(deeper)) if not deeper.all() else deeper.size
        )
        assert (survey.turns[i] < 0) == (view.lock_ref > 0)
        tokens = node_tokens(radix, handle, 0, view.tokens.size)
        assert tokens.tolist() == view.tokens.tolist()
    turns = np.sort(survey.turns[survey.turns >= 0])
    assert turns.tolist() == list(range(turns.size))
    return survey


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_calls=st.integers(1, 80),
    eviction=st.sampled_from(EVICTION_POLICIES),
)
def test_survey_of_a_driven_pool_says_what_nodes_says(seed, num_calls, eviction):
    twin = driven(seed, num_calls, eviction=eviction)
    survey = assert_survey_is_nodes(twin.pool.radix)
    in_order = np.argsort(survey.turns)[(survey.turns < 0).sum() :]
    expected = [page for i in in_order for page in pages_of(survey, i)[::-1]]
    assert twin.pool.radix.evict(twin.pool.num_slots).tolist() == expected
    twin.pool.close()


def test_subtree_sums_are_those_of_a_walk():
    tree = RadixCache(1)
    for page, tokens in enumerate(([1], [1, 2], [1, 2, 3], [1, 5], [7])):
        tree.insert(tokens, list(range(10 * page, 10 * page + len(tokens))))
    survey = tree.survey()
    sums = dict(zip(survey.handles.tolist(), survey.subtree_sums(survey.num_pages), strict=True))
    children = {}
    for view in tree.nodes():
        children.setdefault(view.parent, []).append(view)

    def walk(view):
        return view.pages.size + sum(walk(child) for child in children.get(view.node, []))

    assert sums == {view.node: walk(view) for view in tree.nodes()}


def test_survey_of_an_empty_tree_has_its_namespace_and_no_node():
    survey = RadixCache(4).survey()
    assert (survey.num_nodes, survey.pages.size, survey.page_size) == (0, 0, 4)
    assert [(each.extra_key, each.dropped) for each in survey.namespaces] == [(None, False)]
    assert survey.subtree_sums(survey.num_pages).tolist() == []


def test_survey_after_a_reset_keeps_what_is_locked_in_a_dropped_namespace():
    tree = RadixCache(1)
    node = tree.insert([1, 2], [0, 1], "a").node
    tree.inc_lock_ref(node)
    tree.reset()
    survey = assert_survey_is_nodes(tree)
    assert survey.detached.tolist() == [True]
    assert survey.namespaces[survey.namespace_ids[0]].dropped


def test_node_tokens_are_cut_to_those_of_the_node():
    tree = RadixCache(2)
    node = tree.insert([1, 2, 3, 4], [0, 1]).node
    found = [
        node_tokens(tree, node, *cut).tolist()
        for cut in ((-3, 2), (1, 3), (3, 9), (3, 1), (9, 12))
    ]
    assert found == [[1, 2], [2, 3], [4], [], []]
    tree.evict(4)
    with pytest.raises(ValueError, match="stale"):
        node_tokens(tree, node, 0, 1)
