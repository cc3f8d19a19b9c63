"""Subjects of the page allocators: take so many pages, give them back."""

import statistics
import time

import numpy as np

from bench.curves.drivers import Driver
from bench.curves.subject import FLOOR, PEERS, POOL, Panel, Subject
from bench.curves.timing import timed
from kvpool import PageAllocator

SHUFFLED = "kvpool-shuffled"
AT_ONCE = 64  # calls a loop, if the pool has the pages
MOST_IDS = 1 << 17  # taken in a loop: more, and malloc would get fresh memory for them
LOOPS = 5  # whose median is a sample
LOOP = 5e-3  # seconds that one of them may take
TAKE, GIVE = range(2)


class Verbs:
    """`take(k)` and `give(what take answered)` of one contender."""

    def __init__(self, contender, panel):
        page_size, num_pages = panel.page_size, panel.number // panel.page_size
        self.num_pages = num_pages
        if contender in (POOL, SHUFFLED):
            pages = PageAllocator(num_pages)
            if contender == SHUFFLED:
                everything = pages.take(num_pages)
                np.random.default_rng(0).shuffle(everything)
                pages.give(everything)
            self.take, self.give = pages.take, pages.give
        elif contender == FLOOR:
            ids, row = bytes(4 * 8_192 + 1), bytearray(4 * 8_192)  # all of it were no copy

            def give(found):
                row[: len(found)] = found

            self.take, self.give = lambda k: ids[: 4 * k], give
        else:
            peer = Driver(contender, panel.number, page_size).contender
            if contender.startswith("vllm"):
                blocks = peer.manager.block_pool
                self.take, self.give = blocks.get_new_blocks, blocks.free_blocks
            else:
                slots = peer.slots
                self.take = lambda k: slots.alloc(k * page_size)
                self.give = lambda found: slots.free_segment(found, start_pos=0)


def take_or_give(which):
    """Samplers of one of the two verbs; the other is called untimed."""

    def make(contender, panel, sizes):
        verbs = Verbs(contender, panel)

        def loop(k, count):
            take, give, clock = verbs.take, verbs.give, time.perf_counter
            start = clock()
            taken = [take(k) for _ in range(count)]
            end = clock()
            if which == TAKE:
                seconds = end - start
            if which == GIVE:
                start = clock()
            for found in taken:
                give(found)
            if which == GIVE:
                seconds = clock() - start
            return seconds / count

        def sample(k):
            count = max(1, min(AT_ONCE, verbs.num_pages // (2 * k), MOST_IDS // k))
            once = timed(lambda: verbs.give(verbs.take(k)))
            count = max(1, min(count, int(LOOP / once)))
            loop(k, count)
            return statistics.median(loop(k, count) for _ in range(LOOPS))

        return {k: lambda k=k: sample(k) for k in sizes}

    return make


PANELS = tuple(
    Panel(page_size, f"{capacity // 1_000_000}M tokens", capacity)
    for page_size in (16, 64, 1)
    for capacity in (1_000_000, 10_000_000)
)
SUBJECTS = tuple(
    Subject(
        name,
        title,
        "pages in one call",
        (1, 8, 64, 512, 8_192),
        take_or_give(which),
        contenders=(FLOOR, POOL, SHUFFLED, *(peer for peer in PEERS if peer != "sglang-rust")),
        panels=PANELS,
        floor="copy of the page ids, as bytes",
        notes=(
            "take, give: PageAllocator; sglang's two trees share one allocator, of int64 tensors",
        ),
    )
    for which, (name, title) in enumerate(
        (("take", "Take pages"), ("give", "Give pages back")),
    )
)
