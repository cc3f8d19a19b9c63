"""A replay as slow as can be: one entry a page, named by all tokens before its end; no tree."""

from collections import deque


class SlowReplay:
    """Exact LRU over pages; a page is free, private to a request, or cached.

    Recency is of pages: one is as recent as the last time that a request let go of it, deepest
    page first, or published it while nobody held it.
    """

    def __init__(self, num_pages, page_size, window, checkpoints):
        self.num_pages, self.page_size, self.window = num_pages, page_size, window
        self.checkpoints = checkpoints and window > 1
        self.free, self.clock = num_pages, 0
        self.cached = {}  # name -> [tick, requests that hold it]
        self.in_flight = deque()  # [names, pages held, pages of its own]
        self.matched, self.uncut, self.evicted, self.waited = [], [], 0, 0

    def serve(self, tokens, prompt_len, extra_key=None):
        """One request, until it is in flight; -1 where it is too large."""
        names = [
            (extra_key, tuple(tokens[:end]))
            for end in range(self.page_size, len(tokens) + 1, self.page_size)
        ]
        total = -(-len(tokens) // self.page_size)
        if total > self.num_pages:
            self.matched.append(-1)
            self.uncut.append(-1)
            return
        while len(self.in_flight) >= self.window:
            self.finish_oldest()
        has_waited = False
        while True:
            found = self.run_of(names[: (prompt_len - 1) // self.page_size])
            room = self.free + sum(not holders for _, holders in self.cached.values())
            room -= sum(not self.cached[name][1] for name in names[:found])
            if total - found <= room:
                break
            has_waited = True
            self.finish_oldest()
        self.waited += has_waited
        self.uncut.append(self.run_of(names[: prompt_len // self.page_size]) * self.page_size)
        self.matched.append(found * self.page_size)
        for name in names[:found]:
            self.cached[name][1] += 1
        own = total - found
        while self.free < own:
            victim = min(
                (name for name, (_, holders) in self.cached.items() if not holders),
                key=lambda name: self.cached[name][0],
            )
            del self.cached[victim]
            self.evicted += 1
            self.free += 1
        self.free -= own
        if self.checkpoints:
            end = prompt_len // self.page_size
            own -= self.publish(names[found:end])
            for name in names[found:end]:
                self.cached[name][1] += 1
            found = max(found, end)
        self.in_flight.append((names, found, own))

    def run_of(self, names):
        """How many of the first names are cached."""
        count = 0
        while count < len(names) and names[count] in self.cached:
            count += 1
        return count

    def publish(self, names):
        """Cache what is not; returns how many were new."""
        num_new = 0
        for name in reversed(names):
            self.clock += 1
            num_new += name not in self.cached
            entry = self.cached.setdefault(name, [self.clock, 0])
            if not entry[1]:
                entry[0] = self.clock
        return num_new

    def finish_oldest(self):
        """End the oldest request in flight."""
        names, held, own = self.in_flight.popleft()
        self.free += own - self.publish(names[held:])
        for name in reversed(names[:held]):
            self.clock += 1
            entry = self.cached[name]
            entry[1] -= 1
            if not entry[1]:
                entry[0] = self.clock
