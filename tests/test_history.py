"""The history of evictions by itself: what it keeps, what that takes, and what it lets go."""

import itertools

import numpy as np
import pytest

from kvpool import RadixCache

PAGES = itertools.count()


def grow(tree, tokens, **options):
    """Insert a sequence with page ids of its own; they come in order."""
    tokens = np.asarray(tokens, np.int32)
    pages = list(itertools.islice(PAGES, len(tokens) // tree.page_size))
    tree.insert(tokens, pages, **options)
    return pages


def root_of(tree):
    return tree.match_prefix([]).node


def traced(tree, tokens):
    """Pages of a prompt that are remembered behind those that match, as ``[(start, end)]``."""
    tokens = np.asarray(tokens, np.int32)
    num_pages = len(tokens) // tree.page_size
    found = tree.history.trace(tokens, 0, num_pages, {root_of(tree): 0}, None)
    return [(start, end) for start, end, *_ in found]


@pytest.mark.parametrize("num_pages", [0, 64], ids=["malloc", "slab"])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_evict_page_by_page_keeps_every_token(page_size, num_pages):
    """Each cut of a run falls elsewhere, and its header takes the place of up to 7 tokens."""
    rng = np.random.default_rng(page_size)
    tree = RadixCache(page_size, num_pages=num_pages, eviction_history=10**4)
    tokens = rng.integers(-5, 5, 60 * page_size)
    grow(tree, tokens)
    while tree.total_size:
        tree.evict(page_size * int(rng.integers(1, 4)))
        tree.check()
    assert traced(tree, tokens)[-1][1] == 60
    for at in rng.integers(0, len(tokens), 20).tolist():
        other = tokens.copy()
        other[at] += 1
        # up to the page that differs, and no further
        assert sum(end - start for start, end in traced(tree, other)) == at // page_size


def test_history_holds_no_more_than_it_may():
    tree = RadixCache(4, num_pages=1000, eviction_history=103)
    assert tree.history.max_pages == 25  # whole pages of 103 tokens
    for i in range(100):
        grow(tree, np.arange(12) + 1000 * i)
    tree.evict(4 * 300)
    tree.check()
    # runs of 3 pages each: 24 of 25
    assert (tree.history.num_pages, tree.history.num_records) == (24, 8)
    assert tree.history.num_forgotten == 92
    assert traced(tree, np.arange(12) + 99_000) == [(0, 3)]
    assert traced(tree, np.arange(12) + 91_000) == []
    memory = tree.memory()
    assert memory["runs_in_use_bytes"] == 0
    assert 8 * 48 <= memory["history_bytes"] <= 8 * (48 + 32)


def test_history_keeps_the_beginning_of_a_run_that_is_too_long():
    tree = RadixCache(1, num_pages=100, eviction_history=5)
    grow(tree, range(50))
    tree.evict(50)
    tree.check()
    assert traced(tree, range(50)) == [(0, 5)]
    (_, _, _, _, _, since) = tree.history.trace(
        np.arange(50, dtype=np.int32), 0, 50, {root_of(tree): 0}, None
    )[0]
    assert since == 5  # the other 45 went before
    grow(tree, range(100, 150))
    tree.evict(40)
    tree.check()
    assert tree.history.num_pages == 5


def test_history_gives_all_memory_back_after_a_reset():
    tree = RadixCache(2, num_pages=100, eviction_history=100)
    for i in range(20):
        grow(tree, np.arange(8) + 100 * i)
    tree.evict(75)
    assert tree.memory()["history_bytes"] > 0
    tree.reset()
    tree.check()
    memory = tree.memory()
    assert (memory["history_bytes"], memory["runs_in_use_bytes"]) == (0, 0)
    assert (tree.history.num_records, tree.history.num_forgotten) == (0, 0)


def test_records_grow_with_what_there_is_to_record():
    tree = RadixCache(1, num_pages=5000, eviction_history=5000)
    small = tree.memory()["history_record_bytes"]
    for i in range(3000):
        grow(tree, [i])
    tree.evict(3000)
    tree.check()
    assert tree.history.num_records == 3000
    assert tree.memory()["history_record_bytes"] <= 88 * 4096
    assert small <= 88 * 64
    assert traced(tree, [0]) == [(0, 1)]


def test_reset_under_lock_records_nothing_of_what_it_detached():
    tree = RadixCache(1, num_pages=10, eviction_history=10)
    pages = grow(tree, range(5))
    node = tree.match_prefix(range(5)).node
    tree.inc_lock_ref(node)
    tree.reset()
    tree.dec_lock_ref(node)
    assert tree.evict(5).tolist() == pages[::-1]
    assert tree.history.num_records == 0
    assert traced(tree, range(5)) == []


def test_namespaces_that_come_and_go_are_forgotten_in_the_end():
    """More of them than records: no more than twice as many are kept in mind."""
    tree = RadixCache(1, num_pages=10, eviction_history=10)
    for i in range(200):
        grow(tree, [i], extra_key=i)
        tree.evict(1)
    tree.check()
    tokens = np.array([199], np.int32)
    assert len(tree.history.trace(tokens, 0, 1, {}, 199)) == 1
    assert tree.history.trace(tokens, 0, 1, {}, 198) == []
    assert tree.history.trace(np.array([150], np.int32), 0, 1, {}, 150) == []


def test_trace_of_fewer_tokens_than_pages_is_refused():
    tree = RadixCache(4, num_pages=10, eviction_history=40)
    with pytest.raises(ValueError, match="7 tokens fill no 2 pages of 4"):
        tree.history.trace(np.arange(7), 0, 2, {}, None)
    grow(tree, range(8))
    tree.evict(8)
    with pytest.raises(ValueError, match="an end at page 3 is none of the 1 pages asked about"):
        tree.history.trace(np.arange(7), 0, 1, {root_of(tree): 3}, None)


def test_tree_on_its_own_remembers_nothing_unless_told():
    assert RadixCache(4).history is None
    assert RadixCache(4, eviction_history=3).history is None  # less than a page
    assert RadixCache(4, num_pages=100, eviction_history=None).history.max_pages == 100
    # 65,536 tokens are 16,384 pages; beyond sixteen times that a sixteenth
    assert RadixCache(4, num_pages=50_000, eviction_history=None).history.max_pages == 16_384
    assert RadixCache(4, num_pages=400_000, eviction_history=None).history.max_pages == 25_000
