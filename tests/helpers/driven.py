"""A pool in the middle of its life: driven by random calls beside its model."""

import numpy as np

from tests.oracles.drawing import NumpyChooser
from tests.oracles.twin import WEIGHTS, PoolTwin


def drive(seed, num_calls, num_pages=24, page_size=4, **options):
    """Yield a `PoolTwin` after each of `num_calls` random calls on it."""
    rng = np.random.default_rng(seed)
    twin = PoolTwin(num_pages, page_size, max_words=4, **options)
    shares = np.array(list(WEIGHTS.values())) / sum(WEIGHTS.values())
    for verb in rng.choice(list(WEIGHTS), num_calls, p=shares).tolist():
        getattr(twin, verb)(NumpyChooser(rng))
        yield twin


def driven(seed, num_calls, num_pages=24, page_size=4, **options):
    """The twin after all of them."""
    *_, twin = drive(seed, num_calls, num_pages, page_size, **options)
    return twin
