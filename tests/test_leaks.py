"""Every verb a few hundred times, the slow run many thousand: what it leaves behind is nothing.

A round must leave less than a reference, a block and eight bytes a call, the slow run a tenth of
it; three rounds are run, and the one that left least counts. Each case ends as it began, so what
stays is a leak.
"""

import gc
import weakref

import pytest

from kvpool import EVICTION_POLICIES, KVCachePool
from kvpool.page_table import PageTable
from kvpool_ext.lease import PageLease
from tests.helpers.leak_cases import LONG, PROMPT, ROWS, Cases
from tests.helpers.leaks import left_by

WATCHED = (None, True, False, (), "", 0, 1, PROMPT, LONG, ROWS, KVCachePool, PageLease, PageTable)
VERBS = [name for name in vars(Cases) if not name.startswith("_")]
EXPENSIVE = {"another_thread", "make_and_close", "in_a_cycle", "looking", "graphs", "make_refused"}


def assert_nothing_is_left(cases, name, loops):
    in_use = []

    def call():
        getattr(cases, name)()

    for _ in range(30):  # until the history of evictions is as full as it gets
        call()
    in_use.append(cases.pool.radix.memory()["runs_in_use_bytes"])
    left = left_by(call, loops, WATCHED)
    in_use.append(cases.pool.radix.memory()["runs_in_use_bytes"])
    cases.pool.check()
    assert in_use[0] == in_use[1]
    # What measuring holds itself does not grow with the calls: fewer than one for each.
    allowed = max(90, loops // 10)
    assert left["references"] <= allowed, left
    assert left["objects"] <= allowed, left
    assert left["blocks"] <= allowed, left
    # Half a chunk of malloc's for each: other threads of the process allocate meanwhile.
    assert left["bytes"] <= 16 * loops, left


@pytest.mark.parametrize("name", VERBS)
def test_repeat_a_verb_leaves_nothing(name):
    assert_nothing_is_left(Cases(), name, 100)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
@pytest.mark.parametrize("name", VERBS)
def test_repeat_a_verb_for_long_leaves_nothing(name, eviction):
    assert_nothing_is_left(Cases(eviction), name, 2000 if name in EXPENSIVE else 5000)


def test_drop_a_pool_frees_it_and_its_views_outlive_it():
    cases = Cases()
    view, table = cases.pool.key_layer(0), cases.step.page_table(11)
    info, nodes = cases.pool.request(cases.bound), list(cases.pool.radix.nodes())
    pool = weakref.ref(cases.pool)
    cases.pool.close()
    del cases
    gc.collect()
    assert pool() is None
    view[...] = 3
    assert table.indptr.tolist() == [0, 3]
    assert len(info.page_ids) == 6
    assert sum(len(node.pages) for node in nodes) == 6


def test_a_leak_would_be_seen():
    kept = []
    assert left_by(lambda: kept.append([PROMPT]), 100, WATCHED)["references"] >= 100
    assert left_by(lambda: kept.append(bytearray(5000)), 100, WATCHED)["bytes"] >= 8 * 100
