"""Followers of small pools."""

from kvpool.following import TreeFollower
from kvpool.page_keys import PageKeys
from kvpool.snapshot import Fingerprint


def keys_of(pool, model="m"):
    """Page keys for a pool."""
    return PageKeys(
        Fingerprint(
            model,
            pool.num_layers,
            pool.num_kv_heads,
            pool.head_dim,
            pool.page_size,
            pool.dtype,
            pool.compute_dtype,
            1.0,
            1.0,
        )
    )


def follower_of(pool, **options):
    """A follower of a pool, with no thread; the caller closes it."""
    return TreeFollower(pool._requests.ledger, keys_of(pool), **options)


class Heard:
    """A subscriber that notes what it is told, in a line each."""

    def __init__(self):
        self.lines = []

    def on_stored(self, run):
        """``stored [pages] below parent``."""
        self.lines.append(("stored", run.page_ids.tolist(), run.extra_key))

    def on_removed(self, page_ids, keys):
        """``removed [pages]``."""
        self.lines.append(("removed", page_ids.tolist()))

    def on_cleared(self):
        """``cleared``."""
        self.lines.append(("cleared",))

    def on_caught_up(self):
        """``caught up``."""
        self.lines.append(("caught up",))

    def take(self):
        """What was heard since."""
        lines, self.lines = self.lines, []
        return lines
