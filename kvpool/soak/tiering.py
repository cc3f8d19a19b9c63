"""TierVerbs: tiers that come and go below a pool, and a way there and back."""

from __future__ import annotations

from typing import Any

from kvpool.errors import KVCacheStateError
from kvpool.soak.bound import KEYS
from kvpool.soak.calls import Said
from kvpool.soak.fetching import WAIT_S, FetchVerbs
from kvpool.soak.lineage import Text, length_of
from kvpool.soak.store import ORDERS, POLICIES, Store
from kvpool.soak.wild_tier import FAULTS


class TierVerbs(FetchVerbs):
    """Operations on tiers."""

    # ---- tiers

    def attach_tiers(self, policy: int, order: int, narrow: int) -> None:
        """Attach tiers, of which a pool before this one may have filled some."""
        if self.is_attached:
            return
        if self.store is None:
            self.store = Store(self.shape, self.calls)
        self.policy, order = POLICIES[policy % len(POLICIES)], order % len(ORDERS)
        names = ORDERS[order]
        self.most_fetching = 2 if narrow & 8 else self.shape.num_pages
        self.calls.let(
            "tiers",
            "pool",
            "attach_tiers",
            Said([self.store.tiers[name] for name in names], lambda: f"[{', '.join(names)}]"),
            model=f"weights-{self.weights}",
            write=self.policy,
            **self.store.options(self.shape.num_pages, order, narrow),
        )
        self.is_attached, self.is_halted = True, False
        self.attached_weights = self.weights
        if self.policy != "none":
            self.cached.write_all()

    def close_tiers(self) -> None:
        """Let go of the tiers, whatever is under way."""
        if not self.is_attached:
            return
        self.count_fetched()
        self.calls.call("tiers", "close")
        self.is_attached = self.has_dropped = self.may_fetch = self.cached.writes = False
        self.calls.expect(True, self.pool.tiers is None, "pool.tiers", "pool.tiers is None")
        found, asked = self.pool.stats()["pages_fetching"], "pool.stats()['pages_fetching']"
        self.calls.expect(0, found, "pages_fetching after a close of tiers", asked)
        for fetching in self.fetches.values():
            self._ended(fetching)

    def renew(self, same: int) -> None:
        """Reset the cache: for new weights; or the old ones go on, and so do their tiers."""
        self.calls.call("pool", "reset_prefix_cache")
        self.cache_was_reset()
        if not same % 2:
            self.weights += 1
        elif self.is_attached and self.attached_weights == self.weights:
            self.calls.call("tiers", "resume")
            self.is_halted = False
            if self.policy != "none":
                self.cached.write_all()

    def flush_tiers(self) -> None:
        """Write what is due; nothing but policy ``evict`` may leave some of it."""
        if not self.is_attached:
            return
        done = self.calls.call("tiers", "flush", WAIT_S)
        if self.policy != "evict":
            self.calls.expect(True, done, "the answer of a flush")

    def upset_tier(self, fault: int, count: int) -> None:
        """A tier misbehaves in its next calls."""
        if self.store is not None:
            self.store.misbehave(self.calls, FAULTS[fault % len(FAULTS)], max(count, 0))

    def look_at_tiers(self) -> None:
        """Counters, from this thread."""
        if not self.is_attached:
            return
        halted = self.calls.names["tiers"].is_halted
        self.calls.expect(self.is_halted, halted, "is_halted", "tiers.is_halted")
        counts = self.calls.let("counts", "tiers", "stats")
        for name, count in counts.items():
            if count < 0:
                self.calls.expect(0, count, f"the counter {name}", f"min(0, counts[{name!r}])")
        self.calls.call("tiers", "stats_by_tier")

    # ---- there and back

    def round_trip(self, text: Text, key: int) -> None:
        """What the tree has of a text comes back from tiers that did all they were asked for."""
        length = length_of(text)
        if not (self.is_attached and self.reuse and length) or self.is_halted:
            return
        for handle in list(self.fetches):
            self.cancel_fetch(handle)
        lineage = self.lineage(text, 0, key)
        prompt, name = lineage.tokens(length).copy(), KEYS[lineage.key]
        had = self.calls.let("match", "pool.radix", "match_prefix", prompt, name).length
        self.flush_tiers()
        self.evict_all()
        self.calls.let("fetch", "pool", "prefetch", prompt, name)
        local = self.calls.names["fetch"].local_len
        found = self.calls.call("fetch", "wait", WAIT_S)
        least = min(had, self.whole(length - 1), local + self.most_fetching * self.page_size)
        assert self.store is not None, "tiers are attached"
        tiers: Any = self.calls.names["tiers"]
        is_well = self.store.is_well(tiers.stats(), tiers.stats_by_tier())
        if self.policy == "none" or self.has_dropped or not is_well:
            least = local
        most = self.whole(length - 1)
        if not least <= found <= most:
            raise self.calls.fail(
                "what came back from tiers",
                f"{found} tokens, expected {least} .. {most}",
                f"{least} <= found <= {most}, found",
            )
        self.cached.fetch(lineage, local, found)
        self.may_fetch = True
        self.calls.call("fetch", "publish")
        self.calls.say("del fetch")
        del self.calls.names["fetch"]

    # ---- mistakes

    def misuse_tiers(self, kind: int, number: int) -> None:
        """One of many mistakes: each is refused, and the tiers are those that were there."""
        number %= 10
        tiers = self.pool.tiers
        wrong = (ValueError, TypeError, KVCacheStateError)
        nothing = Said([], lambda: "[]")
        attach: list[tuple[Said, dict[str, Any]]] = [
            (nothing, {"model": "weights-0"}),
            (Said([object()], lambda: "[object()]"), {"model": "weights-0"}),
            (nothing, {"model": ""}),
            (nothing, {"model": "weights-0", "write": "sometimes"}),
        ]
        prompts: list[Any] = [[], [1, 1 << 31], [1, 2.5], [1, True], "text"]
        mistakes: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
            *(("attach_tiers", (given,), options) for given, options in attach),
            *(("prefetch", (prompt,), {}) for prompt in prompts),
            ("prefetch", ([1, 2], 1.5), {}),
        ]
        method, args, options = mistakes[kind % len(mistakes)]
        self.calls.refused(wrong, "pool", method, *args, **options)
        for fetching in self.fetches.values():
            self.calls.refused(wrong, fetching.name, "publish", -1 - number)
            if self._lives(fetching) and not fetching.publishes:
                beyond = fetching.length // self.page_size + 1 + number
                self.calls.refused(ValueError, fetching.name, "publish", beyond)
        question = f"pool.tiers is {'None' if tiers is None else 'tiers'}"
        self.calls.expect(True, self.pool.tiers is tiers, "pool.tiers after a mistake", question)
