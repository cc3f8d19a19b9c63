"""A second thread in a pool is refused, whatever it calls, and harms nobody."""

import ast
import gc
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

import kvpool
from kvpool import KVCacheStateError, RadixCache
from kvpool_ext.gate import Gate
from tests.helpers.entries import (
    OPEN,
    TokensThatCall,
    Watcher,
    during_a_call,
    guarded_calls,
    in_thread,
)
from tests.helpers.pools import R, assert_ledger, case_pool, snapshot

KVPOOL = Path(kvpool.__file__).parent


def test_every_call_of_a_second_thread_is_refused_and_changes_nothing(make_pool):
    pool, calls = guarded_calls(make_pool)
    a = pool.step.request_ids[0]
    before = snapshot(pool, a)
    answers = {}

    def try_all():
        for name, call in calls.items():
            answers[name] = in_thread(call)

    prompt = TokensThatCall([7, 8], try_all)
    pool.unbind_request(pool.bind_request(prompt, 4))
    let_in = {
        name: answer
        for name, answer in answers.items()
        if not isinstance(answer, KVCacheStateError) or "in use by thread" not in str(answer)
    }
    assert let_in == {}
    assert list(answers) == list(calls)
    after = snapshot(pool, a)
    # The bind around it counts its prompt, and nothing else has changed.
    assert after[2].pop("prefix_prompt_tokens") - before[2].pop("prefix_prompt_tokens") == 2
    assert after == before
    assert in_thread(pool.check) is None, "the gate is shut after the call"


def test_every_public_name_is_refused_or_named_as_open(make_pool):
    pool, calls = guarded_calls(make_pool)
    parts = {
        "pool": pool,
        "radix": pool.radix,
        "step": pool.step,
        "decode_graph": pool.decode_graph,
        "verify_graph": pool.verify_graph,
    }
    for part, found in parts.items():
        public = {name for name in dir(found) if not name.startswith("_")}
        guarded = {name.removeprefix(f"{part}.") for name in calls if name.startswith(f"{part}.")}
        assert public - guarded - set(OPEN[part]) == set(), f"{part}: say which threads may"


def test_plain_gauges_are_open_to_a_second_thread(make_pool):
    pool, _ = guarded_calls(make_pool)

    def look():
        assert pool.free_pages + pool.bound_request_count > 0
        assert pool.is_bound(999) is False
        assert pool.matched_prefix_len(999) == 0
        assert pool.radix.total_size == pool.radix.evictable_size + pool.radix.protected_size
        assert pool.prefix_match_tokens <= pool.prefix_prompt_tokens
        assert pool.key_layer(0).shape == (128, 2, 8)
        return "looked"

    assert during_a_call(pool, look) == "looked"


def test_the_owner_may_enter_again_from_inside(make_pool):
    pool = case_pool(make_pool, 4, 8)
    inside = []

    def more():
        inside.append(pool.stats()["requests_bound"])
        inside.append(pool.bind_request(R(1, 3), 4))

    a = pool.bind_request(TokensThatCall(R(1, 5), more), 8)
    stop = pool.watch(Watcher(lambda: inside.append(pool.stats()["requests_bound"])))
    pool.bind_request([9], 4)
    stop()
    stop()
    assert inside == [0, 1, 3]
    assert a == 2
    assert in_thread(pool.unbind_requests) is None
    assert_ledger(pool)


def test_a_clean_up_of_the_collector_inside_a_call_is_the_owners(make_pool):
    pool = case_pool(make_pool, 4, 8)

    class Request:
        def __init__(self):
            self.id = pool.bind_request(R(1, 3), 4)
            self.me = self

        def __del__(self):
            pool.unbind_request(self.id)

    for _ in range(3):
        Request()
    gc.collect()  # of what a test before this one left
    Request()
    assert pool.bound_request_count == 1
    pool.bind_request(TokensThatCall(R(1, 5), gc.collect), 8)
    assert pool.bound_request_count == 1
    assert in_thread(pool.check) is None
    assert_ledger(pool)


def test_two_flows_of_one_thread_may_leave_in_any_order():
    gate = Gate(KVCacheStateError)
    gate.enter()  # a call that waits, as in a greenlet
    gate.enter()  # another one of the same thread
    gate.leave()  # the first
    assert isinstance(in_thread(gate.enter), KVCacheStateError)
    gate.leave()
    assert in_thread(gate.check) is None


def test_a_refused_call_that_leaves_does_not_open_the_gate():
    gate = Gate(KVCacheStateError)
    gate.enter()
    for _ in range(3):
        assert isinstance(in_thread(gate.enter), KVCacheStateError)
        in_thread(gate.leave)
    assert isinstance(in_thread(gate.check), KVCacheStateError)
    gate.leave()
    gate.leave()  # once too often, as after an interrupt before `enter`
    assert in_thread(gate.check) is None
    assert isinstance(in_thread(lambda: [gate.enter(), gate.leave()]), list)


def test_close_during_a_call_of_another_thread_is_refused(make_pool):
    pool = case_pool(make_pool, 4, 8)
    answer = during_a_call(pool, pool.close)
    assert isinstance(answer, KVCacheStateError)
    assert not pool.closed
    tree = pool.radix
    pool.close()
    pool.close()
    with pytest.raises(KVCacheStateError, match="closed"):
        tree.match_prefix([1])


def test_a_tree_of_its_own_refuses_a_second_thread_too():
    tree = RadixCache(1)
    answers = []
    tokens = TokensThatCall([1, 2], lambda: answers.append(in_thread(lambda: tree.evict(1))))
    tree.insert(tokens, [5, 6])
    assert isinstance(answers[0], RuntimeError)
    assert "the radix tree is in use by thread" in str(answers[0])
    assert tree.match_prefix([1, 2]).pages.tolist() == [5, 6]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timer")
def test_an_interrupt_at_any_place_leaves_the_gate_open(make_pool):
    """Interrupts land between any two byte codes; whatever they cut off, the gate opens again."""
    pool = case_pool(make_pool, 4, 8)
    assert threading.current_thread() is threading.main_thread()

    class Interrupted(BaseException):
        pass

    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    num_interrupts = 0
    try:
        for n in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + n % 100 * 1e-6)
                while True:
                    pool.is_bound(1)
                    pool.free_slots  # noqa: B018
                    pool.would_fit([1, 2], 4)
                    pool.page_owner(0)
            except Interrupted:
                num_interrupts += 1
            assert in_thread(pool.check) is None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert num_interrupts == 300


def test_a_forked_child_of_a_quiet_moment_may_go_on(make_pool):
    if not hasattr(os, "fork"):
        pytest.skip("no fork on this system")
    pool = case_pool(make_pool, 4, 8)
    child = os.fork()
    if child == 0:
        pool.bind_request([1], 4)
        os._exit(7 if pool.stats()["requests_bound"] == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert pool.bound_request_count == 0


def test_every_entry_is_the_first_thing_in_its_try():
    """An `enter` before its `try` stays for ever where an interrupt comes between the two."""
    num_entries = 0
    for path in KVPOOL.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        entries = {
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and is_entry(node) and path.name != "rows.py"
        }
        first = {
            node.body[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Try) and "leave()" in ast.unparse(node.finalbody)
        }
        num_entries += len(entries)
        lines = [node.lineno for node in entries - first]
        assert not lines, f"{path.name}: enter inside of the try, lines {lines}"
    assert num_entries > 40


def is_entry(statement):
    """Whether a statement enters a gate."""
    text = ast.unparse(statement)
    return text.endswith("gate.enter()") or text.endswith("self._enter()")


def test_a_gate_counts_outermost_calls():
    gate = Gate(KVCacheStateError, "the shed")
    assert (gate.moment(), gate.num_calls) == (0, 0)
    gate.enter()
    gate.enter()
    assert (gate.moment(), in_thread(gate.moment)) == (1, -1)
    gate.leave()
    assert in_thread(gate.moment) == -1
    gate.leave()
    assert in_thread(gate.moment) == 1
    gate.close()
    with pytest.raises(KVCacheStateError, match="the shed is closed"):
        gate.moment()
    np.testing.assert_equal(gate.closed, True)
