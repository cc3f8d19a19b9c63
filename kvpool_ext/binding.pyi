from typing import Any

from kvpool_ext.lease import PageLease
from kvpool_ext.publishing import LedgerPublishing

class LedgerBinding(LedgerPublishing):
    def bind(
        self,
        tokens: Any,
        capacity: int,
        extra_key: str | bytes | int | None,
        priority: int,
        reuse: bool,
    ) -> PageLease | None: ...
    def bind_blank(
        self, num_pages: int, extra_key: str | bytes | int | None, publishes: bool
    ) -> PageLease | None: ...
    def would_fit(
        self, tokens: Any, capacity: int, extra_key: str | bytes | int | None, reuse: bool
    ) -> bool: ...
    def room_of_fetches(self) -> int: ...
    def room_if_alone(
        self, tokens: Any, extra_key: str | bytes | int | None, reuse: bool
    ) -> tuple[int, int]: ...
    def pages_for(self, num_tokens: int, capacity: int) -> int: ...
    def take_back(self, lease: PageLease) -> None: ...
    def bind_alone(
        self, tokens: Any, capacity: int, extra_key: str | bytes | int | None, reuse: bool
    ) -> PageLease | None: ...
    def bind_equal(
        self,
        batch_size: int,
        num_pages: int,
        extra_key: str | bytes | int | None,
        publishes: bool,
    ) -> tuple[list[PageLease], list[int]] | None: ...
