"""A replay of a fleet as slow as can be: prefixes in sets, and in lists by their use; no tree."""

from collections import deque


class SlowTier:
    """Names of pages, the least recently used first."""

    def __init__(self, num_pages):
        self.num_pages, self.names, self.evicted = num_pages, [], 0

    def touch(self, name):
        """Whether it is there; then it is the last to go."""
        if name not in self.names:
            return False
        self.names.remove(name)
        self.names.append(name)
        return True

    def write(self, name):
        """Have it, as the last to go where it is new."""
        if name not in self.names:
            self.names.append(name)
        while self.num_pages is not None and len(self.names) > self.num_pages:
            self.names.pop(0)
            self.evicted += 1


class SlowInstance:
    """Exact LRU over pages, with tiers below: `tests.oracles.replay` has the rules of a pool."""

    def __init__(self, num_pages, page_size, tiers, write):
        self.num_pages, self.page_size = num_pages, page_size
        self.tiers, self.write = tiers, write
        self.free, self.clock = num_pages, 0
        self.cached = {}  # name -> [tick, requests that hold it]
        self.requests = self.tokens = 0  # in flight
        self.served = self.served_tokens = self.evicted = 0
        self.untold = []  # (what happened, name) that the tiers do not know yet

    def run_of(self, names):
        """How many of the first names are cached."""
        count = 0
        while count < len(names) and names[count] in self.cached:
            count += 1
        return count

    def near(self, names):
        """How many of the first names are cached, or behind these in the host tier."""
        count = self.run_of(names)
        if self.tiers["host"] is not None:
            while count < len(names) and names[count] in self.tiers["host"].names:
                count += 1
        return count

    def fits(self, names, total):
        """Whether `total` pages can be had now, the cached ones of `names` among them."""
        found = self.run_of(names)
        room = self.free + sum(not holders for _, holders in self.cached.values())
        return total - found <= room - sum(not self.cached[name][1] for name in names[:found])

    def fetch(self, names):
        """Make what the tiers have behind the cached names cached; how many came from where."""
        local, came, promoted = self.run_of(names), {"host": 0, "remote": 0}, []
        for name in names[local:]:
            place = next((p for p, tier in self.tiers.items() if tier and tier.touch(name)), None)
            if place is None:
                break
            came[place] += 1
            promoted += [name] if place == "remote" else []
        for name in promoted:
            if self.tiers["host"] is not None:
                self.tiers["host"].write(name)
        end = local + sum(came.values())
        self.make_room(end - local, names[:local])
        for name in names[local:end]:
            self.cached[name] = [self.clock, 0]
            self.untold.append(("insert", name))
        self.free -= end - local
        return came

    def make_room(self, num_pages, kept):
        """Evict until so many pages are free, the names in `kept` never."""
        while self.free < num_pages:
            victim = min(
                (n for n, (_, holders) in self.cached.items() if not holders and n not in kept),
                key=lambda name: self.cached[name][0],
            )
            del self.cached[victim]
            self.untold.append(("evict", victim))
            self.evicted += 1
            self.free += 1

    def bind(self, names, found, total):
        """Hold the cached names and pages of its own; what is in flight."""
        for name in names[:found]:
            self.cached[name][1] += 1
        self.make_room(total - found, ())
        self.free -= total - found
        return total - found

    def publish(self, names):
        """Cache what is not; returns how many were new."""
        new = [name for name in names if name not in self.cached]
        for name in reversed(names):
            self.clock += 1
            entry = self.cached.setdefault(name, [self.clock, 0])
            if not entry[1]:
                entry[0] = self.clock
        self.untold += [("insert", name) for name in new]
        return len(new)

    def finish(self, names, held, own):
        """Let go of a request."""
        self.free += own - self.publish(names[held:])
        for name in reversed(names[:held]):
            self.clock += 1
            entry = self.cached[name]
            entry[1] -= 1
            if not entry[1]:
                entry[0] = self.clock

    def tell(self):
        """Write what the tiers do not know yet."""
        for happened, name in self.untold:
            if happened == self.write:
                for tier in self.tiers.values():
                    if tier is not None:
                        tier.write(name)
        self.untold = []


class SlowFleet:
    """Instances, who serves whom, and what each request found where."""

    def __init__(self, num_pages, page_size, window, checkpoints, fleet):
        def tier(tokens):
            if tokens == 0:
                return None
            return SlowTier(None if tokens is None else tokens // page_size)

        self.num_pages, self.page_size, self.window = num_pages, page_size, window
        self.route = fleet.route
        self.remote = tier(fleet.remote_tier)
        self.instances = [
            SlowInstance(
                num_pages,
                page_size,
                {"host": tier(fleet.host_tier), "remote": self.remote},
                fleet.write,
            )
            for _ in range(fleet.instances)
        ]
        self.most_in_flight = window * fleet.instances
        self.checkpoints = checkpoints and self.most_in_flight > 1
        self.in_flight = deque()
        self.matched, self.uncut, self.waited = [], [], 0
        self.host_hits = self.remote_hits = 0

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
        while len(self.in_flight) >= self.most_in_flight:
            self.finish_oldest()
        askable = names[: (prompt_len - 1) // self.page_size]
        instance = self.choose(askable)
        waited = False
        while not instance.fits(askable, total):
            waited = True
            self.finish_oldest()
        self.waited += waited
        came = instance.fetch(askable)
        self.host_hits += came["host"] * self.page_size
        self.remote_hits += came["remote"] * self.page_size
        found = instance.run_of(askable)
        whole = names[: prompt_len // self.page_size]
        uncut = instance.run_of(whole)
        if uncut == found < len(whole):
            tiers = [tier for tier in instance.tiers.values() if tier is not None]
            uncut += any(whole[found] in tier.names for tier in tiers) and found == len(askable)
        self.matched.append(found * self.page_size)
        self.uncut.append(uncut * self.page_size)
        own = instance.bind(names, found, total)
        instance.requests += 1
        instance.tokens += len(tokens)
        instance.served += 1
        instance.served_tokens += prompt_len
        held = found
        if self.checkpoints:
            own -= instance.publish(whole[found:])
            for name in whole[found:]:
                instance.cached[name][1] += 1
            held = max(found, len(whole))
        instance.tell()
        self.in_flight.append((instance, names, held, own, len(tokens)))

    def choose(self, names):
        """The instance that serves a prompt of these names."""
        if self.route == "round-robin":
            served = sum(matched >= 0 for matched in self.matched)
            return self.instances[served % len(self.instances)]
        order = {id(each): number for number, each in enumerate(self.instances)}
        idle_first = sorted(self.instances, key=lambda i: (i.requests, i.tokens, order[id(i)]))
        counts = [each.requests for each in self.instances]
        if max(counts) - min(counts) > self.window and max(counts) > 1.5 * min(counts):
            return idle_first[0]
        return max(idle_first, key=lambda each: each.near(names))

    def finish_oldest(self):
        """End the oldest request in flight, whoever has it."""
        instance, names, held, own, num_tokens = self.in_flight.popleft()
        instance.finish(names, held, own)
        instance.requests -= 1
        instance.tokens -= num_tokens
        instance.tell()

    def drain(self):
        """End them all."""
        while self.in_flight:
            self.finish_oldest()
