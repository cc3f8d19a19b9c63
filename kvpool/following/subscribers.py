"""Subscribers: who is told of a tree, each apart from the others' failures."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Any

from kvpool.following.contract import TreeSubscriber

_logger = logging.getLogger(__name__)


class Subscribers:
    """Those who are told, in the order in which they came, and those who wait to be.

    Any thread may call; only one at a time calls `call`. No subscriber runs under the lock.
    """

    def __init__(self) -> None:
        # The collector may run a clean-up in the middle that ends a subscription.
        self._lock = threading.RLock()
        self._told: list[TreeSubscriber] = []
        self._joining: list[TreeSubscriber] = []
        self.num_dropped = 0
        """Those that raised, and are told nothing more."""

    def __len__(self) -> int:
        return len(self._told) + len(self._joining)

    @property
    def told(self) -> tuple[TreeSubscriber, ...]:
        """Those who know of everything so far."""
        return tuple(self._told)

    @property
    def joining(self) -> tuple[TreeSubscriber, ...]:
        """Those who know of nothing yet."""
        return tuple(self._joining)

    def add(self, subscriber: TreeSubscriber) -> None:
        """Let `subscriber` wait to be told what is there."""
        with self._lock:
            self._joining.append(subscriber)

    def remove(self, subscriber: TreeSubscriber) -> None:
        """Tell `subscriber` nothing more; one who is not here stays so."""
        with self._lock:
            self._told = [each for each in self._told if each is not subscriber]
            self._joining = [each for each in self._joining if each is not subscriber]

    def admit(self, joined: tuple[TreeSubscriber, ...]) -> None:
        """From now on those of `joined` who are still here are told every change."""
        with self._lock:
            self._told += [each for each in joined if _is_one_of(each, self._joining)]
            self._joining = [each for each in self._joining if not _is_one_of(each, joined)]

    def __contains__(self, subscriber: object) -> bool:
        with self._lock:
            return _is_one_of(subscriber, (*self._told, *self._joining))

    def call(self, those: tuple[TreeSubscriber, ...], name: str, *arguments: Any) -> None:
        """Call `name` of those who are still here; one that raises is logged, and is not any more.

        What is no `Exception`, an interrupt above all, is raised.
        """
        for subscriber in those:
            if subscriber not in self:
                continue
            try:
                getattr(subscriber, name)(*arguments)
            except Exception:
                _logger.exception(
                    "subscriber %r of the tree raised in %s: it is told nothing more",
                    subscriber,
                    name,
                )
                self.num_dropped += 1
                self.remove(subscriber)


def _is_one_of(subscriber: object, those: Iterable[TreeSubscriber]) -> bool:
    return any(each is subscriber for each in those)
