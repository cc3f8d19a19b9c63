from kvpool_ext.gate import Gate
from kvpool_ext.lease import PageLease
from kvpool_ext.lengths import LengthTable
from kvpool_ext.pages import PageAllocator
from kvpool_ext.radix import RadixCache

class LedgerMoves:
    allocator: PageAllocator
    tree: RadixCache
    page_size: int
    needed_pages: int
    leases: dict[int, PageLease]
    fetching: dict[int, int]
    fetch_nodes: dict[int, int]
    lengths: LengthTable
    num_losses: int
    last_tag: int
    prompt_tokens: int
    matched_tokens: int
    inserted_tokens: int
    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_columns: int = 1,
        eviction: str = "lru",
        eviction_history: int | None = None,
        *,
        tree_class: type[RadixCache] = ...,
    ) -> None: ...
    def guard_by(self, gate: Gate) -> None: ...
