"""PoisonedTable: the requests of a poisoned pool."""

from __future__ import annotations

from typing import Any

from kvpool.poison.ledger import PoisonedLedger, poisoned_ledger
from kvpool.poison.stored import StoredPages
from kvpool.requests import RequestTable
from kvpool.storage import KVStorage


class PoisonedTable(RequestTable):
    """`RequestTable` over a ledger that poisons.

    Parameters
    ----------
    storage : KVStorage
        Whose pages; `arguments` and `options` are those of `RequestTable`.
    """

    ledger: PoisonedLedger

    def __init__(self, storage: KVStorage, *arguments: Any, **options: Any) -> None:
        self._stored = StoredPages(storage)
        super().__init__(*arguments, **options)

    def _make_ledger(self, *arguments: Any) -> PoisonedLedger:
        return poisoned_ledger(self._stored, *arguments)

    def check(self) -> None:
        """As `RequestTable.check`, and every free and every cached page; O(bytes of the pool)."""
        super().check()
        self.ledger.books.check()
