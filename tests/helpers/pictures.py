"""Pictures of made-up pools."""

import numpy as np

from kvpool.inspect import PoolPicture
from kvpool.owners import PageOwners, PageState


def picture_of(states, request_ids=None, has_scratch=True):
    """A picture of made-up pages; private ones belong to request 1 unless it is said."""
    states = np.asarray(states, np.uint8)
    private = states == PageState.PRIVATE
    ids = np.where(private, 1, 0) if request_ids is None else np.asarray(request_ids)
    owners = PageOwners(states, ids.astype(np.int64), private.astype(np.int32))
    return PoolPicture(owners, 16, has_scratch)


def random_picture(seed, num_pages):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 12, num_pages)
    states = np.repeat(rng.integers(0, len(PageState), num_pages), lengths)[:num_pages]
    ids = np.repeat(rng.integers(1, 9, num_pages), lengths)[:num_pages]
    return picture_of(states, np.where(states == PageState.PRIVATE, ids, 0))
