from kvpool_ext.gate import Gate
from kvpool_ext.history import EvictionHistory
from kvpool_ext.journal import TreeJournal

class RadixTree:
    page_size: int
    eviction: str
    evicted_pages: int
    epoch: int
    history: EvictionHistory | None
    journal: TreeJournal | None
    gate: Gate
    def __init__(
        self,
        page_size: int = 1,
        eviction: str = "lru",
        num_pages: int = 0,
        eviction_history: int | None = 0,
    ) -> None: ...
