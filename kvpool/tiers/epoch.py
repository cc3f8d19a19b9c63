"""TreeEpoch: whether a tree is still of the weights that its page keys name."""

from __future__ import annotations

from kvpool_ext.radix import RadixCache


class TreeEpoch:
    """Ends when the tree is reset: what is cached after that may be of new weights.

    Pages of new weights must never be written under keys of the old ones, nor old ones be read
    for new ones. Any thread may ask.

    Parameters
    ----------
    tree : RadixCache
        The pool's.
    """

    def __init__(self, tree: RadixCache) -> None:
        self._tree = tree
        self._number = tree.epoch

    @property
    def is_over(self) -> bool:
        """Whether the tree was reset since."""
        return self._tree.epoch != self._number

    def renew(self) -> None:
        """Say that the weights are the same as before the reset."""
        self._number = self._tree.epoch
