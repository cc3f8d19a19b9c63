"""Figures of a pool are of one moment, whoever reads them; eight threads that hammer one pool."""

import sys
import threading
import time

import numpy as np
import pytest

from kvpool import KVCacheExhaustedError, KVCacheStateError
from kvpool.metrics import metrics_text
from kvpool.pool import figures
from tests.helpers.entries import TokensThatCall, in_thread
from tests.helpers.pools import R, assert_ledger, case_pool, read, values, write

NUM_HAMMERS, PAGE_SIZE, NUM_PAGES = 8, 4, 64


def assert_consistent(stats):
    """What holds of the figures of any one moment."""
    states = [stats[f"pages_{name}"] for name in ("free", "private", "tree", "taken")]
    assert sum(states) == stats["pages_total"] == NUM_PAGES, stats
    assert min(states) >= 0
    assert 0 <= stats["pages_evictable"] <= stats["pages_tree"]
    assert 0 <= stats["prefix_match_tokens"] <= stats["prefix_prompt_tokens"]
    causes = [stats[f"bind_failures_{cause}"] for cause in ("no_pages", "too_large", "fork")]
    assert sum(causes) == stats["bind_failures"]


def pages_in_text(text):
    """Pages of all states in a scrape, and all pages."""
    lines = [line for line in text.splitlines() if line.startswith("kvpool_pages{")]
    total = next(line for line in text.splitlines() if line.startswith("kvpool_pool_info"))
    return sum(int(line.split()[-1]) for line in lines), f'num_pages="{NUM_PAGES}"' in total


class Race:
    """An owner who works, readers of figures, and hammers that call whatever there is.

    Only the owner's calls are to succeed. A hammer is let in where it falls between two of them,
    so it calls what changes nothing that the owner counts on: it binds and unbinds, takes and
    gives, matches, all on small things of its own, and gives back what it got.
    """

    def __init__(self, pool, seconds):
        self.pool = pool
        self.end = time.monotonic() + seconds
        self.errors = []
        self.refused = self.let_in = self.samples = self.rounds = 0
        self.lock = threading.Lock()
        self.leftovers = []

    def run(self):
        """Race until the time is over; raise what went wrong."""
        workers = [threading.Thread(target=self._hammer, args=(n,)) for n in range(NUM_HAMMERS)]
        workers.append(threading.Thread(target=self._guard, args=(self._sample,)))
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            for worker in workers:
                worker.start()
            self._guard(self._own)
        finally:
            for worker in workers:
                worker.join(120)
            sys.setswitchinterval(interval)
        if self.errors:
            raise self.errors[0]
        assert not any(worker.is_alive() for worker in workers)

    def _guard(self, work):
        try:
            while time.monotonic() < self.end and not self.errors:
                work()
        except BaseException as error:
            self.errors.append(error)

    def persist(self, call):
        """The owner's call, again and again until no hammer is inside."""
        while True:
            try:
                return call()
            except KVCacheStateError as error:
                assert "in use by thread" in str(error)  # noqa: PT017
                time.sleep(0)

    def _own(self):
        """A request from bind to finish, every byte of it looked at."""
        pool, persist = self.pool, self.persist
        first = 1000 * (self.rounds % 3)
        tokens = [*R(first, first + 7), 50_000 + self.rounds]
        try:
            a = persist(lambda: pool.bind_request(tokens, 16))
        except KVCacheExhaustedError:
            return
        matched = pool.matched_prefix_len(a)
        base = first  # what is cached of these tokens was written so before
        step = persist(lambda: pool.activate_step(a))
        for layer in range(2):
            columns = base + np.arange(matched, 9, dtype=np.float32) + 1000 * layer
            k = np.ascontiguousarray(
                np.broadcast_to(columns[None, :, None, None], (1, 9 - matched, 2, 8))
            )
            persist(lambda layer=layer, k=k: step.put(layer, matched, k, -k))
        got = persist(lambda: step.get(0, 9))[0][0, :, 0, 0].tolist()
        assert got == values(base, 0, 9)
        if self.rounds % 5 == 4:
            persist(pool.check)
        if self.rounds % 2:
            persist(lambda: pool.finish_request(a, tokens))
        else:
            persist(lambda: pool.unbind_request(a))
        self.rounds += 1

    def _sample(self):
        assert_consistent(self.pool.stats())
        found, is_whole = pages_in_text(metrics_text(self.pool))
        assert found == NUM_PAGES
        assert is_whole
        self.samples += 1

    def _hammer(self, number):
        pool, rng = self.pool, np.random.default_rng(number)
        mine, taken = [], []
        verbs = (
            lambda: mine.append(pool.bind_request([-number - 1], 4)),
            lambda: mine and pool.unbind_request(mine[-1]) is None and mine.pop(),
            lambda: taken.append(pool.alloc(4)),
            lambda: taken and pool.free(taken[-1]) is None and taken.pop(),
            lambda: pool.radix.match_prefix(R(0, 7)),
            lambda: pool.would_fit([1, 2], 4),
            lambda: list(pool.radix.nodes()),
            lambda: pool.radix.format_tree(),
            lambda: pool.explain(R(0, 7)),
            lambda: pool.page_owner(number),
            pool.page_owners,
            pool.check,
            lambda: mine and pool.valid_len(mine[-1]),
            lambda: mine and pool.request(mine[-1]),
            lambda: mine and pool.mark_written(mine[-1], 1),
        )

        def strike():
            # Not more than two of each, so that the owner finds pages.
            verb = verbs[rng.integers(len(verbs))]
            if len(mine) > 1:
                verb = verbs[1]
            if len(taken) > 1:
                verb = verbs[3]
            try:
                verb()
                self.let_in += 1
            except KVCacheStateError as error:
                assert "in use by thread" in str(error)  # noqa: PT017
                self.refused += 1
            except KVCacheExhaustedError:
                pass

        self._guard(strike)
        with self.lock:
            self.leftovers.append((mine, taken))

    def clear_up(self):
        """Give back what the hammers still held, as nobody races any more."""
        for mine, taken in self.leftovers:
            for request_id in mine:
                self.pool.unbind_request(request_id)
            for slots in taken:
                self.pool.free(slots)


def race(make_pool, seconds):
    """Run a race, and look at what is left of the pool."""
    pool = case_pool(make_pool, PAGE_SIZE, NUM_PAGES)
    kept = pool.bind_request(R(700, 719), 24)
    write(pool, kept, 0, 20, 700)
    found = Race(pool, seconds)
    found.run()
    found.clear_up()
    assert found.rounds > 0
    assert found.samples > 0
    assert found.refused > 0, "nobody was refused: the race tested nothing"
    assert read(pool, kept, 20) == values(700, 0, 20)
    pool.unbind_request(kept)
    assert pool.bound_request_count == 0
    assert pool.radix.protected_size == 0
    stats = pool.stats()
    assert_consistent(stats)
    assert (stats["pages_private"], stats["pages_taken"]) == (0, 0)
    assert_ledger(pool)
    return found


def test_eight_threads_harm_nobody(make_pool):
    race(make_pool, 2)


@pytest.mark.slow
@pytest.mark.long
def test_eight_threads_harm_nobody_for_a_minute(make_pool):
    found = race(make_pool, 60)
    print(
        f"{found.rounds} requests of the owner, {found.let_in} calls let in, {found.refused} "
        f"refused, {found.samples} samples of the figures"
    )


def test_stats_wait_for_the_end_of_a_call(make_pool):
    pool = case_pool(make_pool, PAGE_SIZE, NUM_PAGES)
    answers, reading = [], threading.Event()

    def read_it():
        reading.set()
        answers.append(pool.stats())

    reader = threading.Thread(target=read_it)

    def inside():
        reader.start()
        assert reading.wait(30)
        time.sleep(0.05)
        assert answers == []  # not while the call runs

    pool.bind_request(TokensThatCall(R(1, 5), inside), 8)
    reader.join(30)
    assert answers[0]["requests_bound"] == 1
    assert answers[0]["pages_private"] == 2


def test_stats_give_up_when_a_call_never_ends(make_pool, monkeypatch):
    monkeypatch.setattr(figures, "PATIENCE_SECONDS", 0.05)
    pool = case_pool(make_pool, PAGE_SIZE, NUM_PAGES)
    answers = []
    pool.bind_request(TokensThatCall([1], lambda: answers.append(in_thread(pool.stats))), 4)
    assert isinstance(answers[0], KVCacheStateError)
    assert "a call of another thread has not ended" in str(answers[0])


def test_stats_of_a_pool_that_closes_meanwhile(make_pool):
    pool = case_pool(make_pool, PAGE_SIZE, NUM_PAGES)
    pool.close()
    assert isinstance(in_thread(pool.stats), KVCacheStateError)
