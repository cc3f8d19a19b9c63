"""A pool with tiers beside what a pool must answer: Hypothesis looks for a difference.

A row of K is a function of namespace, tokens before it, position and layer
(`tests.oracles.prints`), so that a page of anything else shows. Two tiers may lose records, lie,
raise and recover at any time. No call may be refused for what prefetches hold, and no page may be
lost.
"""

import time
from functools import cache

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool import KVCacheExhaustedError, KVCachePool
from tests.helpers.tiers import (
    DIM,
    FAULTS,
    HEADS,
    LAYERS,
    PAGE,
    Faulty,
    MemoryTier,
    attach,
    expected_prints,
    read_prints,
    serve_prints,
)

NUM_PAGES = 24
# What is drawn must not depend on what the background has done, or no example could be repeated.
PICK = st.integers(0, 9)
KEYS = st.sampled_from([None, "tenant"])
# Few different tokens, so that prompts share prefixes; one of them says which branch.
PROMPTS = st.builds(
    lambda branch, length, last: [branch] * length + [last] * 3,
    st.integers(1, 3),
    st.integers(0, 28),
    st.integers(1, 3),
)


@cache
def all_records():
    """Records of all pages that a prompt can have in common with others."""
    tier = MemoryTier()
    with KVCachePool(LAYERS, 64 * PAGE, HEADS, DIM, page_size=PAGE) as pool:
        attach(pool, tier)
        for branch in (1, 2, 3):
            for key in (None, "tenant"):
                serve_prints(pool, [branch] * 28, extra_key=key)
        assert pool.tiers.flush(20)
    return tier.records


class TieredPool(RuleBasedStateMachine):
    poison = False
    write = "insert"

    def __init__(self):
        super().__init__()
        self.tiers = [Faulty("upper", max_records=12), Faulty("lower")]
        self.tiers[1].records.update(all_records())
        self.pool = KVCachePool(
            LAYERS, NUM_PAGES * PAGE, HEADS, DIM, page_size=PAGE, poison=self.poison
        )
        self.attach()
        self.bound = {}  # request id -> prompt, namespace
        self.prefetches = []
        self.taken = []

    def attach(self):
        record_bytes = 1024
        attach(
            self.pool,
            *self.tiers,
            write=self.write,
            low_pages=NUM_PAGES // 2,
            max_fetching_pages=NUM_PAGES,
            staging_bytes=6 * 3 * record_bytes,
            retry_s=0.0001,
        )

    # ---- requests

    @rule(prompt=PROMPTS, key=KEYS, extra=st.integers(0, 12))
    def bind(self, prompt, key, extra):
        pool, capacity = self.pool, len(prompt) + extra
        fits = pool.would_fit(prompt, capacity, extra_key=key)
        try:
            request = pool.bind_request(prompt, capacity, extra_key=key)
        except KVCacheExhaustedError:
            assert not fits
            self.assert_short_without_prefetches(
                lambda: pool.would_fit(prompt, capacity, extra_key=key)
            )
            return
        assert fits
        matched = pool.matched_prefix_len(request)
        self.bound[request] = (prompt, key)
        self.put(request, matched)

    def put(self, request, start):
        prompt, key = self.bound[request]
        step = self.pool.activate_step(request)
        rows = expected_prints(prompt, key)
        for layer in range(LAYERS):
            k = np.ascontiguousarray(rows[layer][None, start:])
            step.put(layer, start, k, -k)
        self.look(request)

    def look(self, request):
        prompt, key = self.bound[request]
        found = read_prints(self.pool, request, len(prompt))
        assert (found == expected_prints(prompt, key)).all()

    def assert_short_without_prefetches(self, would_fit):
        """What was refused would be refused without any prefetch too."""
        for prefetch in self.prefetches:
            prefetch.cancel()
        give_up = time.monotonic() + 20
        while self.pool.stats()["pages_fetching"]:
            assert time.monotonic() < give_up
            self.pool.poll_tiers()  # those that nobody has any more
            time.sleep(0.0005)
        assert not would_fit()

    @rule(pick=PICK, how=st.sampled_from(["finish", "unbind", "checkpoint", "look"]))
    def end(self, pick, how):
        if not self.bound:
            return
        request = sorted(self.bound)[pick % len(self.bound)]
        prompt, _ = self.bound[request]
        self.look(request)
        if how == "checkpoint":
            self.pool.checkpoint_request(request, prompt)
        elif how == "finish":
            self.pool.finish_request(request, prompt)
        elif how == "unbind":
            self.pool.unbind_request(request)
        if how in ("finish", "unbind"):
            del self.bound[request]

    @rule(pick=PICK, more=st.integers(1, 20))
    def extend(self, pick, more):
        if not self.bound:
            return
        request = sorted(self.bound)[pick % len(self.bound)]
        capacity = self.pool.request(request).capacity + more
        try:
            self.pool.extend_request(request, capacity)
        except KVCacheExhaustedError as error:
            ledger = self.pool._requests.ledger
            needed = error.needed_pages
            self.assert_short_without_prefetches(
                lambda: needed <= ledger.allocator.num_free + ledger.evictable_pages
            )

    @rule(num_pages=st.integers(1, 6))
    def alloc(self, num_pages):
        try:
            self.taken.append(self.pool.alloc(num_pages * PAGE))
        except KVCacheExhaustedError:
            ledger = self.pool._requests.ledger
            self.assert_short_without_prefetches(
                lambda: num_pages <= ledger.allocator.num_free + ledger.evictable_pages
            )

    @rule()
    def free(self):
        if self.taken:
            self.pool.free(self.taken.pop())

    @rule(num_tokens=st.integers(0, 40))
    def evict(self, num_tokens):
        pages = self.pool.radix.evict(num_tokens).astype(np.int64)
        self.pool.free((pages[:, None] * PAGE + np.arange(PAGE)).ravel())

    @rule(goes_on=st.booleans())
    def reset(self, goes_on):
        self.pool.reset_prefix_cache()
        if goes_on:
            self.pool.tiers.resume()

    # ---- tiers

    @rule(prompt=PROMPTS, key=KEYS, publish=st.booleans(), keep=st.booleans())
    def prefetch(self, prompt, key, publish, keep):
        prefetch = self.pool.prefetch(prompt, key, publish=publish)
        assert prefetch.local_len % PAGE == 0
        if keep:
            self.prefetches.append(prefetch)

    @rule(
        pick=PICK,
        how=st.sampled_from(["wait", "publish", "cancel", "drop", "some"]),
        part=st.integers(0, 7),
    )
    def meddle(self, pick, how, part):
        if not self.prefetches:
            return
        place = pick % len(self.prefetches)
        prefetch = self.prefetches[place]
        assert prefetch.found_len >= prefetch.local_len or prefetch.done
        if how == "wait":
            prefetch.wait(20)
            assert prefetch.done
        elif how == "publish":
            assert prefetch.publish() == prefetch.found_len
        elif how == "some":
            most = prefetch.found_len // PAGE
            assert prefetch.publish(min(part, most)) <= max(most * PAGE, prefetch.local_len)
        elif how == "cancel":
            prefetch.cancel()
            assert prefetch.done
        if how != "wait":
            del self.prefetches[place]

    @rule()
    def poll(self):
        gained = self.pool.poll_tiers()
        assert gained % PAGE == 0

    @rule()
    def flush(self):
        assert self.pool.tiers.flush(20) or self.write == "evict"

    @rule(tier=st.integers(0, 1), fault=st.sampled_from(["", "", "", *FAULTS]))
    def change_fault(self, tier, fault):
        self.tiers[tier].fault = fault

    @rule(tier=st.integers(0, 1), number=st.integers(1, 8))
    def lose_records(self, tier, number):
        records = self.tiers[tier].records
        for key in list(records)[::2][:number]:
            records.pop(key, None)

    @rule()
    def get_all_records(self):
        self.tiers[1].records.update(all_records())

    @rule()
    def attach_anew(self):
        self.pool.tiers.close()
        self.prefetches.clear()
        assert self.pool.stats()["pages_fetching"] == 0
        self.attach()

    @invariant()
    def adds_up(self):
        self.pool.check()
        stats = self.pool.stats()
        taken = sum(slots.size // PAGE for slots in self.taken)
        assert stats["pages_taken"] - stats["pages_fetching"] == taken

    def teardown(self):
        pool = self.pool
        for request in sorted(self.bound):
            self.look(request)
            pool.unbind_request(request)
        for slots in self.taken:
            pool.free(slots)
        pool.tiers.close()
        assert pool.stats()["pages_taken"] == 0
        assert pool.radix.protected_size == 0
        pool.check()
        pool.close()


class Poisoned(TieredPool):
    poison = True


class AheadOfEviction(TieredPool):
    write = "evict"


for machine in (TieredPool, Poisoned, AheadOfEviction):
    machine.TestCase.settings = settings(deadline=None, stateful_step_count=30)
TestTieredPool = TieredPool.TestCase
TestPoisonedTieredPool = pytest.mark.slow(Poisoned.TestCase)
TestTieredPoolAheadOfEviction = pytest.mark.slow(AheadOfEviction.TestCase)
