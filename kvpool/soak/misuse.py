"""MisuseVerbs: calls that must be refused, and must leave everything as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import KVCacheExhaustedError, KVCacheStateError, UnknownRequestError
from kvpool.soak.bound import Bound
from kvpool.soak.calls import Said
from kvpool.soak.stage import Stage

NOBODY = 1 << 40  # a request id that no pool reaches
NOWHERE = "nobody's"  # a namespace that no request has
HUGE = 1 << 62  # a number that no allocation may be sized by
BAD_NUMBER = (ValueError, OverflowError, KVCacheExhaustedError)


class Meddler:
    """A token during whose reading another thread enters the pool.

    Parameters
    ----------
    pool : KVCachePool
        Which is in a call then.
    """

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.answers: list[str] = []
        self._refused = threading.Event()
        self._thread = threading.Thread(target=self._enter)

    def __index__(self) -> int:
        self._thread.start()
        self._refused.wait()
        return 1

    def ended(self) -> list[str]:
        """What the other thread was told, once the call is over: `stats` waits for that."""
        self._thread.join()
        return self.answers

    def _enter(self) -> None:
        calls: tuple[Callable[[], Any], ...] = (
            lambda: self.pool.bind_request([1], 1),
            self.pool.unbind_requests,
            self.pool.check,
            lambda: self.pool.alloc(1),
            lambda: self.pool.prefetch([1]),
            self.pool.poll_tiers,
        )
        for call in calls:
            try:
                call()
                self.answers.append("accepted")
            except Exception as error:
                self.answers.append(type(error).__name__)
        self._refused.set()
        self.answers.append(type(self.pool.stats()).__name__)


class MisuseVerbs(Stage):
    """Operations that must fail."""

    def misuse(self, kind: int, handle: int, number: int) -> None:
        """One of many mistakes, about a request or about none."""
        number = number % 10
        self._quieten()
        mark = self.calls.mark()
        self.calls.say("before = picture(pool)")
        before = self._picture()
        bound = self.bound.get(handle)
        if bound is None:
            mistakes = self._mistakes_about_the_pool()
            mistakes[kind % len(mistakes)](number)
        else:
            about = self._mistakes_about_a_request()
            about[kind % len(about)](bound, number)
        after = self._picture()
        if before != after:
            changed = [f"{a} -> {b}" for a, b in zip(before, after, strict=False) if a != b]
            raise self.calls.fail(
                "a refused call changed something",
                "; ".join(changed)[:600],
                "picture(pool) == before",
            )
        self.calls.unsay(mark, 1)
        self.refusals += 1
        # A bind with absurd numbers counts as one that failed.
        self.counts["bind_failures"] = self.pool.stats()["bind_failures"]

    def meddle(self) -> None:
        """A second thread enters in the middle of a call."""
        meddler = Meddler(self.pool)
        self.calls.say("meddler = Meddler(pool)")
        given = Said([meddler, "no token"], lambda: "[meddler, 'no token']")
        self.calls.refused(TypeError, "pool", "bind_request", given, self.page_size)
        self.calls.say("meddler.ended()")
        expected = [KVCacheStateError.__name__] * 6 + ["dict"]
        self.calls.expect(
            expected, meddler.ended(), "the answers to a second thread", "meddler.ended()"
        )

    def _quieten(self) -> None:
        """Fetching is another verb's."""
        raise NotImplementedError

    def _picture(self) -> list[Any]:
        stats = self.pool.stats()
        for name in [name for name in stats if name.startswith("bind_failures")]:
            del stats[name]
        rows = []
        for bound in self.bound.values():
            info = self.pool.request(bound.request_id)
            rows.append(
                (
                    info.request_id,
                    info.capacity,
                    info.valid_len,
                    info.shared_len,
                    *info.page_ids[:64].tolist(),
                )
            )
        return [*stats.items(), *rows, self.pool.radix.num_nodes]

    # ---- mistakes

    def _mistakes_about_the_pool(self) -> list[Callable[[int], object]]:
        refused, size = self.calls.refused, self.page_size
        radix, ids = "pool.radix", UnknownRequestError
        shape = (1, 1, self.shape.num_kv_heads, self.shape.head_dim)
        foreign = np.array([self.shape.num_pages], np.int32)
        beyond = np.arange(self.shape.num_slots, self.shape.num_slots + size)
        return [
            lambda n: refused(ids, "pool", "finish_request", NOBODY + n, [1]),
            lambda n: refused(ids, "pool", "unbind_request", -n - 1),
            lambda n: refused(ids, "pool", "fork_request", NOBODY + n, size),
            lambda n: refused(ids, "pool", "checkpoint_request", NOBODY + n, [1]),
            lambda n: refused(ids, "pool", "extend_request", NOBODY + n, size),
            lambda n: refused(ids, "pool", "activate_step", NOBODY + n),
            lambda n: refused(ValueError, "pool", "activate_step"),
            lambda n: refused(ValueError, "pool", "bind_request", [], n + 1),
            lambda n: refused(ValueError, "pool", "bind_request", [1] * (n + 2), n + 1),
            lambda n: refused(ValueError, "pool", "bind_request", [1, 1 << 31], size),
            lambda n: refused(TypeError, "pool", "bind_request", [1, True], size),
            lambda n: refused(TypeError, "pool", "bind_request", [1, 2.5], size),
            lambda n: refused(TypeError, "pool", "bind_request", "text", size),
            lambda n: refused(BAD_NUMBER, "pool", "bind_requests", 1 + n, -1),
            lambda n: refused(BAD_NUMBER, "pool", "bind_requests", HUGE, HUGE),
            lambda n: refused(ValueError, "pool", "alloc", -n),
            lambda n: refused(BAD_NUMBER, "pool", "alloc", HUGE),
            lambda n: refused(ValueError, "pool", "free", beyond),
            lambda n: refused(ValueError, "pool", "free", np.full(size, -1)),
            lambda n: refused(BAD_NUMBER, radix, "evict", -n - 1),
            lambda n: refused(BAD_NUMBER, radix, "dec_lock_ref", HUGE),
            lambda n: refused(BAD_NUMBER, radix, "inc_lock_ref", HUGE),
            lambda n: self._insert_foreign(np.full(size, n, np.int32), foreign),
            lambda n: self._free_a_foreign_page(n),
            lambda n: self._put_through_nothing(shape),
        ]

    def _mistakes_about_a_request(self) -> list[Callable[[Bound, int], object]]:
        refused = self.calls.refused
        short = KVCacheExhaustedError

        def step(bound: Bound, *args: Any, errors: Any = ValueError) -> None:
            self.activate([bound])
            refused(errors, "step", *args)

        def put(
            bound: Bound, layer: int, start: int, shape: tuple[int, ...], errors: Any = ValueError
        ) -> None:
            rows = self._blank(shape)
            step(bound, "put", layer, start, rows, rows, errors=errors)

        heads, dim = self.shape.num_kv_heads, self.shape.head_dim
        one, layers = (1, 1, heads, dim), self.shape.num_layers
        return [
            lambda b, n: put(b, 0, b.capacity, one, errors=short),
            lambda b, n: put(b, 0, HUGE, one, errors=BAD_NUMBER),
            lambda b, n: put(b, layers, b.shared, one),
            lambda b, n: put(b, 0, -n - 1, one),
            lambda b, n: put(b, 0, b.shared, (1, 1, heads + 1, dim)),
            lambda b, n: put(b, 0, b.shared, (2, 1, heads, dim)),
            lambda b, n: step(b, "get", 0, b.capacity + n + 1, errors=short),
            lambda b, n: step(b, "get", 0, -1),
            lambda b, n: step(b, "page_table", b.capacity + n + 1, errors=short),
            lambda b, n: step(b, "page_table", HUGE, errors=BAD_NUMBER),
            lambda b, n: step(b, "seal_length", b.capacity + 1),
            lambda b, n: step(b, "truncate_to", b.valid_len, b.capacity + 1),
            lambda b, n: step(b, "invalidate_range", b.capacity, b.shared - 1),
            lambda b, n: step(b, "window_slot_indices", b.capacity, n + 1, errors=short),
            lambda b, n: refused(short, "pool", "mark_written", b.request_id, b.capacity + 1),
            lambda b, n: refused(BAD_NUMBER, "pool", "extend_request", b.request_id, HUGE),
            lambda b, n: refused(ValueError, "pool", "activate_step", b.request_id, b.request_id),
            lambda b, n: refused(TypeError, "pool", "finish_request", b.request_id, [1.5]),
            lambda b, n: self._put_on_shared(b, n, one),
            lambda b, n: self._contradict(b, n),
            lambda b, n: self._fork_too_short(b),
            lambda b, n: self._free_its_page(b),
        ]

    def _blank(self, shape: tuple[int, ...]) -> Said:
        blank = self.pool.device.to_device(np.zeros(shape, np.float32))
        return Said(blank, lambda: f"on_device(np.zeros({shape}, np.float32))")

    def _put_on_shared(self, bound: Bound, number: int, one: tuple[int, ...]) -> None:
        if bound.shared:
            rows = self._blank(one)
            self.activate([bound])
            position = number % bound.shared
            self.calls.refused(ValueError, "step", "put", 0, position, rows, rows)
            self.calls.refused(ValueError, "step", "seal_length", position)

    def _contradict(self, bound: Bound, number: int) -> None:
        """Tokens that are not those of the prompt would publish rows that are wrong."""
        if bound.prompt_len:
            tokens = bound.lineage.tokens(bound.prompt_len).copy()
            tokens[number % bound.prompt_len] ^= 1
            for method in ("finish_request", "checkpoint_request"):
                self.calls.refused(ValueError, "pool", method, bound.request_id, tokens)

    def _fork_too_short(self, bound: Bound) -> None:
        written = bound.valid_len
        self.calls.refused(
            ValueError, "pool", "fork_request", bound.request_id, max(0, written - 1)
        )

    def _free_its_page(self, bound: Bound) -> None:
        page = int(self.pool.request(bound.request_id).page_ids[0])
        slots = np.arange(page * self.page_size, (page + 1) * self.page_size)
        self.calls.refused(ValueError, "pool", "free", slots)
        tokens = bound.lineage.tokens(self.page_size).copy()
        pages = np.array([page], np.int32)
        self._insert_foreign(tokens, pages)

    def _insert_foreign(self, tokens: NDArray[np.int32], pages: NDArray[np.int32]) -> None:
        """A page that was not taken, in a namespace where nothing is cached.

        Where the tokens are cached already, an insert keeps nothing and looks at no page.
        """
        self.calls.refused(ValueError, "pool.radix", "insert", tokens, pages, NOWHERE)

    def _free_a_foreign_page(self, number: int) -> None:
        """A page of the caller's together with one that is not: neither is freed."""
        taken = {int(page) for pages in self.taken.values() for page in pages}
        page = number % self.shape.num_pages
        if page not in taken:
            both = [*sorted(taken)[:1], page]
            slots = [p * self.page_size + i for p in both for i in range(self.page_size)]
            self.calls.refused(ValueError, "pool", "free", slots)

    def _put_through_nothing(self, shape: tuple[int, ...]) -> None:
        """A decode graph that was not prepared takes no put."""
        if not self.bound:
            return
        bound = next(iter(self.bound.values()))
        step = self.activate([bound])
        graph = self.pool.verify_graph
        if graph.buffers is None:
            rows = self._blank(shape)
            assert step is not None
            with self.calls.block("pool.verify_graph", graph):
                self.calls.refused(KVCacheStateError, "step", "put", 0, 0, rows, rows)
