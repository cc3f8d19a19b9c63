"""The tree in colour, and the hits that are counted for it."""

import io
import sys
from collections import Counter

import numpy as np
import pytest

from kvpool import KVCacheExhaustedError, RadixCache
from kvpool.inspect import PrefixHits, top_prefixes, tree
from kvpool.requests import RequestTable
from tests.helpers.pools import R, cache_prompt, case_pool


def printed(renderable, width=100, **options):
    console = pytest.importorskip("rich.console")
    out = io.StringIO()
    console.Console(file=out, width=width, **options).print(renderable)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.fixture
def pool(make_pool):
    """Two prompts that part after two pages, the first of them bound again; a namespace."""
    pool = case_pool(make_pool, 2, 40)
    hits = PrefixHits(pool)
    cache_prompt(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    cache_prompt(pool, [1, 2, 3, 4, 9, 9])
    cache_prompt(pool, R(100, 119), extra_key="tenant")
    pool.bind_request([1, 2, 3, 4, 5, 6, 7, 8], 8)
    yield pool, hits
    hits.close()


def test_tree_shows_what_format_tree_does_and_heat_sums_and_hits(pool):
    pool, hits = pool
    assert printed(tree(pool, hits=hits)) == [
        "5 nodes, 15 pages of 2 tokens: 12 evictable (#1 goes first), 3 locked",
        "▁ evicted next  ▂▃▄▅▆▇ █ last  ● locked",
        "namespace 'tenant' 1 node, 10 pages",
        "└── ▅ [0, 20) 10 pages, #3: 100 101 102 … 117 118 119",
        "namespace (no extra key) 4 nodes, 5 pages, 3 locked",
        "└── ● [0, 4) 2 pages, locked x1, 2 hits saved 8 "
        "(below: 3 nodes, 3 pages, 1 locked): 1 2 3 4",
        "    ├── ● [4, 6) 1 page, locked x1, 1 hit saved 2 (below: 1 node, 1 page): 5 6",
        "    │   └── ▁ [6, 8) 1 page, #1: 7 8",
        "    └── ▂ [4, 6) 1 page, #2: 9 9",
    ]
    assert "hit" not in "".join(printed(tree(pool)))


def test_tree_says_what_the_limits_left_out(pool):
    pool, _ = pool
    lines = printed(tree(pool, max_nodes=2, tokens=0))
    assert lines[-2:] == [
        "└── ● [0, 4) 2 pages, locked x1 (below: 3 nodes, 3 pages, 1 locked)",
        "    └── … 3 nodes, 3 pages, 1 locked",
    ]
    assert printed(tree(pool, max_nodes=1))[-1] == "… other namespaces: 4 nodes, 5 pages, 3 locked"


def test_tree_of_a_tree_on_its_own_and_of_an_empty_one():
    cache = RadixCache(4)
    assert printed(tree(cache)) == ["(empty tree, page size 4)"]
    cache.insert([1, 2, 3, 4], [0])
    assert printed(tree(cache))[-1] == "└── ▅ [0, 4) 1 page, #1: 1 2 3 4"


def test_tree_fits_a_narrow_terminal_and_has_colour_where_there_is_one(pool):
    pool, hits = pool
    lines = printed(tree(pool, hits=hits), width=40)
    assert max(map(len, lines)) <= 40
    assert any(line.endswith("…") for line in lines)
    colour = printed(tree(pool), force_terminal=True, color_system="truecolor")
    assert any("\x1b[" in line for line in colour)


def test_tree_shows_a_namespace_that_looks_like_markup(make_pool):
    pool = case_pool(make_pool, 1, 8)
    with PrefixHits(pool) as hits:
        cache_prompt(pool, [1, 2], extra_key="[red]x[/red]")
        pool.bind_request([1, 2, 3], 3, extra_key="[red]x[/red]")
    assert any("'[red]x[/red]'" in line for line in printed(tree(pool)))
    assert any("'[red]x[/red]'" in line for line in printed(top_prefixes(hits)))


def test_tree_of_a_deep_pool_is_not_recursive():
    cache = RadixCache(1)
    tokens = np.arange(2000)
    for n in range(1, 2001):
        cache.insert(tokens[:n], tokens[:n])
    assert len(printed(tree(cache))) < 25


def test_tree_without_rich_says_what_to_install(pool, monkeypatch):
    pool, hits = pool
    for module in ("rich.console", "rich.table"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"kvpool\[cli\]"):
        tree(pool)
    with pytest.raises(ImportError, match=r"kvpool\[cli\]"):
        top_prefixes(hits)


def test_tree_with_bad_input_names_it(pool):
    with pytest.raises(TypeError, match="expected a KVCachePool, got str"):
        tree("pool")
    with pytest.raises(ValueError, match="max_depth must be at least 1"):
        tree(pool[0], max_depth=0)


# ---- hits


class CountedTable:
    """A request table, its recorder, and the same counts made slowly, page by page."""

    def __init__(self, seed, num_pages, page_size):
        self.rng = np.random.default_rng(seed)
        self.table = RequestTable(num_pages, page_size, 1)
        self.hits = PrefixHits(self.table)
        self.counts, self.saved = Counter(), 0
        self.bound = {}
        self.page_size = page_size

    def words(self, n):
        """`n` pages of tokens, each of one token again and again."""
        return np.repeat(self.rng.integers(0, 2, n), self.page_size).tolist()

    def call(self):
        table, rng = self.table, self.rng
        request, tokens = None, None
        if self.bound:
            request = list(self.bound)[rng.integers(len(self.bound))]
            tokens = self.bound[request]
        verb = rng.choice(["bind", "finish", "checkpoint", "unbind", "fork", "match", "reset"],
                          p=[0.5, 0.2, 0.1, 0.07, 0.05, 0.06, 0.02])  # fmt: skip
        if verb == "bind":
            prompt = self.words(int(rng.integers(1, 7)))[
                : -int(rng.integers(1, self.page_size + 1))
            ]
            prompt = [*prompt, 9]
            key = [None, "a"][int(rng.random() < 0.3)]
            try:
                request = table.bind(prompt, len(prompt) + 3, key, 0, True)
            except KVCacheExhaustedError:
                return
            table.mark_written(
                request, int(rng.integers(request.matched_pages * self.page_size, len(prompt) + 1))
            )
            self.bound[request] = prompt
            matched = request.pages()[: request.matched_pages].tolist()
            self.counts.update(matched)
            self.saved += len(matched) * self.page_size
        elif verb == "match":
            table.ledger.tree.match_prefix(self.words(5))  # splits nodes, and is no bind
        elif verb == "reset":
            table.ledger.reset()
        elif request is None:
            return
        elif verb == "checkpoint":
            table.checkpoint(request, tokens, True)
        elif verb == "fork":
            try:
                child = table.fork(request, len(tokens) + 3)
            except KVCacheExhaustedError:
                return
            self.bound[child] = tokens
        else:
            del self.bound[request]
            if verb == "finish":
                table.finish(request, tokens, True)
            else:
                table.unbind(request)

    def compare(self):
        views = {view.node: view for view in self.table.ledger.tree.nodes()}
        cached = {int(page) for view in views.values() for page in view.pages}
        for page in set(self.counts) - cached:
            del self.counts[page]
        survey = self.table.ledger.tree.survey()
        per_node = dict(
            zip(survey.handles.tolist(), self.hits.per_node(survey).tolist(), strict=True)
        )
        for handle, view in views.items():
            assert {self.counts[int(page)] for page in view.pages} == {per_node[handle]}
        there = sum(self.counts.values()) * self.page_size
        assert self.hits.saved_tokens == self.saved == self.table.prefix_match_tokens
        assert self.hits.prompt_tokens == self.table.prefix_prompt_tokens
        assert self.hits.saved_by_evicted == self.saved - there
        savings = self.hits.top(None)
        assert sum(each.saved_tokens for each in savings) == there
        for each in savings:
            view = views[each.node]
            assert (each.start, each.end - each.start) == (view.start, view.tokens.size)
            assert (each.extra_key, each.lock_ref) == (view.extra_key, view.lock_ref)
            assert each.saved_tokens == each.hits * view.tokens.size
        order = [each.saved_tokens for each in savings]
        assert order == sorted(order, reverse=True)
        assert self.hits.top(2) == savings[:2]


@pytest.mark.parametrize(("seed", "num_pages", "page_size"), [(0, 20, 1), (1, 40, 2), (2, 24, 4)])
def test_hits_after_each_call_are_those_of_a_slow_count(seed, num_pages, page_size):
    driven = CountedTable(seed, num_pages, page_size)
    for _ in range(400):
        driven.call()
        driven.compare()
    assert driven.hits.num_hits > 10
    assert driven.hits.saved_by_evicted > 0


def test_hits_count_from_attaching_to_close(make_pool):
    pool = case_pool(make_pool, 2, 16)
    cache_prompt(pool, R(1, 6))
    pool.unbind_request(pool.bind_request(R(1, 6), 6))
    with PrefixHits(pool) as hits:
        pool.unbind_request(pool.bind_request(R(1, 6), 6))
        pool.unbind_request(pool.bind_request(R(50, 52), 4))
        pool.prefix_reuse_enabled = False
        pool.unbind_request(pool.bind_request(R(1, 6), 6))
        pool.prefix_reuse_enabled = True
        pool.bind_requests(1, 2)  # without a prompt
        pool.unbind_requests()
    hits.close()
    pool.unbind_request(pool.bind_request(R(1, 6), 6))
    assert (hits.num_binds, hits.num_hits) == (2, 1)
    assert (hits.prompt_tokens, hits.saved_tokens) == (9, 4)
    (saving,) = hits.top()
    assert (saving.start, saving.end, saving.hits, saving.tokens) == (0, 4, 1, "1 2 3 4")
    with pytest.raises(ValueError, match="n must be at least 0"):
        hits.top(-1)


def test_hits_of_two_recorders_do_not_meet(make_pool):
    pool = case_pool(make_pool, 1, 8)
    cache_prompt(pool, [1, 2])
    first = PrefixHits(pool)
    pool.unbind_request(pool.bind_request([1, 2], 2))
    second = PrefixHits(pool)
    first.close()
    pool.unbind_request(pool.bind_request([1, 2], 2))
    second.close()
    assert (first.num_binds, second.num_binds) == (1, 1)


def test_top_prefixes_is_a_table_of_what_was_saved(pool):
    pool, hits = pool
    lines = printed(top_prefixes(hits))
    assert lines[0] == "10 of 42 prompt tokens saved by 2 hits of 4 binds"
    assert any("8 │ 80.0% │    2 │     1 │" in line and "[0, 4)" in line for line in lines)
    assert any("2 │ 20.0% │    1 │     1 │" in line and "[4, 6)" in line for line in lines)
    assert lines[-1] == "0 of them by prefixes that were evicted since"


def test_watcher_that_raises_ends_the_bind_and_leaves_nothing_bound(make_pool):
    class Broken:
        def on_bind(self, request):
            raise LookupError(f"request {request.tag}")

        def on_publish(self, request):
            raise LookupError("publish")

    pool = case_pool(make_pool, 1, 8)
    stop = pool.watch(Broken())
    with pytest.raises(LookupError, match="request 1"):
        pool.bind_request([1, 2], 4)
    assert (pool.bound_request_count, pool.free_pages, pool.prefix_prompt_tokens) == (0, 8, 0)
    stop()
    stop()
    request = pool.bind_request([1, 2], 4)
    pool.watch(Broken())
    with pytest.raises(LookupError, match="publish"):
        pool.finish_request(request, [1, 2])
    assert pool.is_bound(request)
