"""RealFleet: a trace through real pools with real tiers, step by step, as a replay models it."""

from collections import deque

from kvpool.tiers import HostTier
from kvpool.tiers.records import PageRecords

MODEL = "weights-1"


class RealFleet:
    """Does to pools what `kvpool.replay` models, waiting for the tiers after every step.

    Requests are dealt out in turn; pools are large enough for all that is in flight.

    Parameters
    ----------
    make_pool : callable
        Makes pools.
    cell : Cell
        What to be.
    window : int
        Requests in flight at most, times the instances.
    """

    def __init__(self, make_pool, cell, window):
        fleet = cell.fleet
        self.page_size, self.matched = cell.page_size, []
        self.most_in_flight, self.in_flight = window * fleet.instances, deque()
        self.pools = [
            make_pool(1, cell.capacity, 1, 1, page_size=cell.page_size, eviction=cell.policy)
            for _ in range(fleet.instances)
        ]
        records = PageRecords(self.pools[0]._fingerprint(MODEL))

        def tier(tokens, name):
            num_pages = 4096 if tokens is None else tokens // cell.page_size
            return [HostTier(num_pages * records.record_bytes, name=name)] if tokens != 0 else []

        self.remote = tier(fleet.remote_tier, "remote")
        self.hosts = [tier(fleet.host_tier, "host") for _ in self.pools]
        for pool, host in zip(self.pools, self.hosts, strict=True):
            pool.attach_tiers(
                [*host, *self.remote],
                model=MODEL,
                write=fleet.write,
                max_fetching_pages=pool.num_pages,
                timeout_s=20.0,
            )

    def serve(self, request, tokens):
        """Lead a request through its pool until it is in flight."""
        while len(self.in_flight) >= self.most_in_flight:
            self.finish_oldest()
        pool = self.pools[len(self.matched) % len(self.pools)]
        prompt = tokens[: request.prompt_len]
        fetched = pool.prefetch(prompt, extra_key=request.extra_key)
        fetched.wait(20.0)
        assert fetched.done
        pool.poll_tiers()
        lease = pool.bind_request(prompt, len(tokens), extra_key=request.extra_key)
        self.matched.append(pool.matched_prefix_len(lease))
        assert self.matched[-1] == fetched.found_len
        pool.mark_written(lease, len(prompt))
        if self.most_in_flight > 1:
            pool.checkpoint_request(lease, prompt)
        assert pool.tiers.flush(20.0)
        self.in_flight.append((pool, lease, tokens))

    def finish_oldest(self):
        """End the oldest request in flight."""
        pool, lease, tokens = self.in_flight.popleft()
        pool.mark_written(lease, len(tokens))
        pool.finish_request(lease, tokens)
        assert pool.tiers.flush(20.0)

    def drain(self):
        """End all that is in flight, and say that nothing went wrong on the way."""
        while self.in_flight:
            self.finish_oldest()
        for pool in self.pools:
            stats = pool.tiers.stats()
            for name in ("prefetch_refused", "prefetch_gave_way", "failed_fetches"):
                assert stats[name] == 0, stats
            for name in ("write_dropped", "write_lost", "write_unreachable", "write_gone"):
                assert stats[name] == 0, stats
            pool.check()

    def stats(self, tiers):
        """Records that some tiers have, and those that they let go."""
        found = [tier.stats() for tier in tiers]
        return [each["records"] for each in found], sum(each["evicted_records"] for each in found)
