"""Subject of memory: what a full pool holds beside K and V, a cached token."""

from bench.curves.allocators import SHUFFLED
from bench.curves.drivers import Driver, fresh_tokens
from bench.curves.subject import PEERS, POOL, Subject
from bench.replay.worker import private_bytes

CAPACITY = 10_000_000
OWN = "kvpool, its own books"


def bytes_a_token(contender, panel, sizes):
    """Written memory of the process since before the contender was made, K and V taken off."""
    name = POOL if contender == OWN else contender

    def sampler(length):
        length -= length % panel.page_size
        Driver(name, 1_024, panel.page_size).store(fresh_tokens(128))  # what is loaded late
        before = private_bytes()
        driver = Driver(name, CAPACITY, panel.page_size)
        for _ in range(CAPACITY // length):
            driver.store(fresh_tokens(length))
        grown = private_bytes() - before - driver.contender.other_bytes()
        cached = driver.contender.cached_tokens()
        if contender != OWN:
            return grown / cached
        books = driver.contender.pool.radix.memory()
        return sum(books[part] for part in ("slab_bytes", "outside_bytes", "node_bytes")) / cached

    return {length: lambda length=length: sampler(length) for length in sizes}


SUBJECTS = (
    Subject(
        "memory",
        "Memory of a full pool of 10M tokens beside K and V",
        "tokens of each cached prompt",
        (128, 1_024, 8_192, 65_536),
        bytes_a_token,
        contenders=(POOL, SHUFFLED, OWN, *PEERS),
        unit="bytes/token",
        notes=(
            "memory: growth of Private_Dirty; 'its own books' is radix.memory(); the page "
            "allocator's 5 bytes a page are touched only where pages were free or taken raw, all "
            "of them in kvpool-shuffled",
        ),
        rounds=1,
        one_size_a_process=True,
    ),
)
