"""What every contender answers to, and which there are."""

import importlib
import importlib.util


class Job:
    """One request on its way through a contender, which may add what it needs."""

    def __init__(self, index, tokens, num_prompt):
        self.index = index
        self.tokens = tokens  # prompt and output, int32
        self.prompt = tokens[:num_prompt]
        self.num_prompt = num_prompt
        self.num_tokens = len(tokens)
        self.hit = 0  # tokens found in the cache


class Contender:
    """A cache and its pages; `worker` calls the phases of each request in this order.

    A subclass leaves out the phases that it does not have, or that are part of another.
    """

    name = "?"
    page_sizes = None  # those it can run with; None: all
    publishes = "finish"  # when others can hit what it computed: at "finish", "prefill" or "bind"
    exact_lru = False  # whether its hits must be the oracle's at every capacity
    notes = ()  # what is stubbed, rewritten, or timed in another column

    def __init__(self, capacity, page_size):
        self.capacity, self.page_size = capacity, page_size

    @classmethod
    def versions(cls):
        """Package -> version of what is measured."""
        return {}

    def before_turn(self, trace, hits, requests):
        """Hear which requests begin in the next turn, and the hits of the oracle. Not timed."""

    def prepare(self, job):
        """Turn the tokens into the contender's own form. Not timed."""

    def match(self, job):
        """Find the cached prefix of all but the last prompt token."""

    def lock(self, job):
        """Protect it from eviction."""

    def alloc(self, job):
        """Have pages for the rest of prompt and output, evicting when short; sets `job.hit`."""

    def prefill(self, job):
        """What is owed when the prompt has been computed."""

    def finish(self, job):
        """Cache prompt and output, give back what is not cached, unlock."""

    def cached_tokens(self):
        """Tokens in the cache when nothing is in flight; AssertionError if pages have leaked."""
        raise NotImplementedError

    def other_bytes(self):
        """Resident bytes that are no bookkeeping: K and V."""
        return 0


# name -> (module and class, packages it needs). Loaded in the process of the contender only.
PLACES = {
    "floor": ("bench.replay.floor:Floor", ()),
    "kvpool": ("bench.replay.ours:Pool", ()),
    "kvpool-shuffled": ("bench.replay.ours:ShuffledPool", ()),
    "kvpool-checkpoint": ("bench.replay.ours:CheckpointingPool", ()),
    "kvpool-parts": ("bench.replay.ours:TreeAndAllocator", ()),
    "sglang-rust": ("bench.replay.sglang_rust:RustTree", ("sglang", "torch", "msgspec")),
    "sglang-py": ("bench.replay.sglang:PythonTree", ("sglang", "torch", "msgspec")),
    "vllm-sha256": ("bench.replay.vllm:Sha256Manager", ("vllm", "torch", "cbor2")),
    "vllm-xxhash": ("bench.replay.vllm:XxhashManager", ("vllm", "torch", "cbor2", "xxhash")),
}


def contender_class(name):
    """The class of a contender."""
    module, _, attribute = PLACES[name][0].partition(":")
    return getattr(importlib.import_module(module), attribute)


def missing_packages(name):
    """Packages that a contender needs and that are not installed."""
    return [package for package in PLACES[name][1] if importlib.util.find_spec(package) is None]
