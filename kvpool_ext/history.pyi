from typing import Any

from kvpool_ext.runs import TokenRuns

class EvictionHistory:
    page_size: int
    max_pages: int
    max_records: int
    num_pages: int
    num_records: int
    num_forgotten: int
    evicted_pages: int
    reset_ns: int
    def __init__(self, runs: TokenRuns, page_size: int, max_pages: int) -> None: ...
    def trace(
        self,
        tokens: Any,
        num_live: int,
        num_pages: int,
        ends: dict[int, int],
        extra_key: str | bytes | int | None,
    ) -> list[tuple[int, int, int, int, int, int]]: ...
    def reach(self) -> tuple[int, int | None]: ...
    def clock(self) -> int: ...
    def memory(self) -> tuple[int, int]: ...
    def check(self) -> None: ...
