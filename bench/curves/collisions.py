"""Subject of adversarial keys: one-page leaves that were made to collide, in a hash without a key.

The hash of the tree is keyed, so a look-up among them is to cost what one among random pages does.
"""

import numpy as np

from bench.curves.colliders import searched_pages, written_pages
from bench.curves.subject import Panel, Subject
from bench.curves.timing import timed
from kvpool import RadixCache

SAMPLE = 64  # look-ups a sample
RANDOM, ALIKE = "random pages", "pages alike but for the last token"
BUCKET, HASH = "one bucket, tokens of a vocabulary", "one hash, any int32 as token"


def pages_of(kind, count, page_size):
    """``[count, page_size]`` tokens: the first pages of as many prompts."""
    if kind == RANDOM:
        return np.random.default_rng(0).integers(0, 128_000, (count, page_size)).astype(np.int32)
    if kind == ALIKE:
        pages = np.zeros((count, page_size), np.int32)
        pages[:, -1] = np.arange(count)
        return pages
    if kind == HASH:
        return written_pages(count, page_size)
    num_buckets = 64  # the arena begins with so many, and doubles; a root takes one entry
    while num_buckets < 2 * count:
        num_buckets *= 2
    return searched_pages(count, page_size, num_buckets)


def look_up(kind, panel, sizes):
    samplers = {}
    for size in sizes:
        tree = RadixCache(panel.page_size)
        prompts = list(pages_of(kind, size, panel.page_size))
        ids = np.arange(size, dtype=np.int32)
        for i, prompt in enumerate(prompts):
            tree.insert(prompt, ids[i : i + 1])
        assert tree.num_nodes == size
        places = np.random.default_rng(1).integers(0, size, SAMPLE).tolist()
        chosen = [prompts[i] for i in places]
        found = [tree.match_prefix(prompt).pages[0] for prompt in chosen]
        assert found == places, "a collision has cost a hit"

        def sample(tree=tree, chosen=chosen):
            waiting = iter(chosen)
            return timed(lambda: tree.match_prefix(next(waiting)), len(chosen))

        samplers[size] = sample
    return samplers


SUBJECTS = (
    Subject(
        "collisions",
        "kvpool: look up one of many keys that collide",
        "leaves in the tree",
        (64, 256, 1_024, 4_096, 16_384),
        look_up,
        contenders=(RANDOM, ALIKE, BUCKET, HASH),
        panels=(Panel(16), Panel(64)),
        reach={BUCKET: 4_096},
        notes=(
            "collisions: a hit is confirmed by comparing tokens, so they cost time and no hit",
        ),
    ),
)
