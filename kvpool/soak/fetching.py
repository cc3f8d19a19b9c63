"""FetchVerbs: prefetches of the traffic, and what is true of them whenever their pages arrive."""

from __future__ import annotations

import time

from kvpool.soak.aborts import Interrupted, with_stop
from kvpool.soak.bound import KEYS
from kvpool.soak.caching import TreeVerbs
from kvpool.soak.finding import Finding
from kvpool.soak.lineage import Text, length_of
from kvpool.soak.store import Fetching

WAIT_S = 20.0  # for what must come by itself: longer is a hang


class FetchVerbs(TreeVerbs):
    """Operations on prefetches, with tiers or without."""

    def prefetch(self, handle: int, text: Text, key: int, publishes: int) -> None:
        """Have what is missing of a prompt fetched."""
        if handle in self.fetches or not length_of(text):
            return
        lineage = self.lineage(text, 0, key)
        prompt = lineage.tokens(length_of(text)).copy()
        length = self.whole(prompt.size - 1) if self.reuse else 0
        name, before = f"fetch_{handle}", self._counts()
        found = self.calls.let(
            name, "pool", "prefetch", prompt, KEYS[lineage.key], publish=bool(publishes)
        )
        local, after = found.local_len, self._counts()
        most = self.cached.most(lineage, length)
        if local % self.page_size or not 0 <= local <= most:
            raise self.calls.fail(
                "the local length of a prefetch",
                f"{local} of {prompt.size} tokens, at most {most} were published",
                f"{name}.local_len in range(0, {most + 1}, {self.page_size})",
            )
        gave_way = None
        if before and after and local < length:
            is_refused = after["prefetch_refused"] > before["prefetch_refused"]
            gave_way = None if is_refused else after["prefetch_gave_way"]
        fetching = Fetching(
            name, lineage, length, local, bool(publishes), self.num_resets, gave_way
        )
        if gave_way is None:
            self.calls.expect(True, found.done, "a prefetch of nothing", f"{name}.done")
        else:
            self.may_fetch = True
            if publishes:
                self.cached.fetch(lineage, local, length)
        self.fetches[handle] = fetching

    def wait_for_fetch(self, handle: int) -> None:
        """Wait until it is done: every tier has a time-out, so that it is."""
        fetching = self.fetches.get(handle)
        if fetching is None:
            return
        found = self.calls.call(fetching.name, "wait", WAIT_S)
        done = self.calls.names[fetching.name].done
        self.calls.expect(True, done, "a prefetch that was waited for", f"{fetching.name}.done")
        self._check_found(fetching, found)

    def publish_fetch(self, handle: int, part: int) -> None:
        """Publish all that has come, or so many pages of it; below zero is all."""
        fetching = self.fetches.pop(handle, None)
        if fetching is None:
            return
        prefetch = self.calls.names[fetching.name]
        before = prefetch.found_len
        asked = min(part, before // self.page_size) if part >= 0 else None
        lives = self._lives(fetching) and not fetching.publishes
        told = () if asked is None else (asked,)
        found = self.calls.call(fetching.name, "publish", *told)
        least = before if asked is None else max(asked * self.page_size, fetching.local)
        most = max(fetching.local, least if asked is not None else fetching.length)
        if not lives:
            self._check_between(fetching, found, 0, max(fetching.length, fetching.local))
        else:
            if fetching.resets != self.num_resets:
                least = most = 0
            self._check_between(fetching, found, least, most)
            self.cached.fetch(fetching.lineage, fetching.local, found)
            tokens, key = fetching.lineage.tokens(found), KEYS[fetching.lineage.key]
            if found:
                match = self.calls.let("match", "pool.radix", "match_prefix", tokens, key)
                what = "the cached length after a publish"
                self.calls.expect(found, match.length, what, "match.length")
        self._ended(fetching)
        self._drop(fetching)

    def cancel_fetch(self, handle: int) -> None:
        """End it, twice."""
        fetching = self.fetches.pop(handle, None)
        if fetching is not None:
            self.calls.call(fetching.name, "cancel")
            self.calls.call(fetching.name, "cancel")
            self._ended(fetching)
            self._drop(fetching)

    def drop_fetch(self, handle: int) -> None:
        """Nobody has it any more: what it publishes comes, and what it does not goes back."""
        fetching = self.fetches.pop(handle, None)
        if fetching is not None:
            self.has_dropped = self.has_dropped or self.is_attached
            self._drop(fetching)

    def poll_tiers(self) -> None:
        """Publish what has arrived."""
        free = self.pool.free_pages
        found = self.calls.call("pool", "poll_tiers")
        most = self.shape.num_slots if self.may_fetch else 0
        if found % self.page_size or not 0 <= found <= most or self.pool.free_pages < free:
            raise self.calls.fail(
                "the answer of poll_tiers",
                f"{found} tokens, {self.pool.free_pages - free} more pages are free",
                f"found in range(0, {most + 1}, {self.page_size})",
            )

    def interrupt_prefetch(self, text: Text) -> None:
        """An abort while a prefetch reads its prompt leaves nothing behind."""
        tokens = self.lineage(text, 0, 0).tokens(length_of(text)).tolist()
        self.calls.refused(Interrupted, "pool", "prefetch", with_stop(tokens))

    # ---- what they share

    def _quieten(self) -> None:
        """Have nothing on its way that could arrive in the middle of something."""
        for handle in list(self.fetches):
            self.cancel_fetch(handle)
        if self.has_dropped:
            self.close_tiers()

    def _end_fetches(self) -> None:
        """Give all pages back that a prefetch has, those of one that nobody has any more too."""
        for handle in list(self.fetches):
            self.cancel_fetch(handle)
        if self.has_dropped:
            self.calls.say("settle(pool)")
            give_up = time.monotonic() + WAIT_S
            while self.pool.stats()["pages_fetching"] or self.pool.radix.protected_size:
                if time.monotonic() > give_up:
                    raise Finding("pages of dropped prefetches stay out", str(self.pool.stats()))
                self.pool.poll_tiers()
                time.sleep(0.001)
        if self.num_operations % 2:
            self.close_tiers()

    def _forget_fetches(self) -> None:
        """The pool is closed, and they are over: nothing hangs, nothing is refused."""
        for fetching in self.fetches.values():
            lived = self._lives(fetching) and not fetching.publishes
            most = 0 if lived else max(fetching.length, fetching.local)
            self._check_between(fetching, self.calls.call(fetching.name, "wait", WAIT_S), 0, most)
            self._check_between(fetching, self.calls.call(fetching.name, "publish"), 0, most)
            self._ended(fetching)
            self.calls.call(fetching.name, "cancel")
            self._drop(fetching)
        self.fetches.clear()

    def _counts(self) -> dict[str, int]:
        found: dict[str, int] = self.calls.names["tiers"].stats() if self.is_attached else {}
        return found

    def _lives(self, fetching: Fetching) -> bool:
        """Whether it has pages that wait for a word; False where that cannot be told."""
        gave_way = self._counts().get("prefetch_gave_way")
        return gave_way is not None and gave_way == fetching.gave_way

    def _check_found(self, fetching: Fetching, found: int) -> None:
        least = fetching.local if self._lives(fetching) and not fetching.publishes else 0
        self._check_between(fetching, found, least, max(fetching.length, fetching.local))

    def _check_between(self, fetching: Fetching, found: int, least: int, most: int) -> None:
        if found % self.page_size or not least <= found <= most:
            raise self.calls.fail(
                "the tokens of a prefetch",
                f"{found} of {fetching.name}, expected {least} .. {most}",
                f"found in range({least}, {most + 1}, {self.page_size}), found",
            )

    def _ended(self, fetching: Fetching) -> None:
        done = self.calls.names[fetching.name].done
        self.calls.expect(True, done, "a prefetch that was ended", f"{fetching.name}.done")
        fetching.gave_way = None

    def _drop(self, fetching: Fetching) -> None:
        self.calls.say(f"del {fetching.name}")
        del self.calls.names[fetching.name]

    def close_tiers(self) -> None:
        """Tiers are another verb's."""
        raise NotImplementedError
