from typing import final

from kvpool_ext.classes import ClassRing

EVICTION_POLICIES: tuple[str, ...]

def check_eviction(eviction: str) -> str: ...

@final
class EvictionOrder(ClassRing):
    def __init__(
        self, page_size: int, num_tokens: int = 0, num_remembered: int = 0, eviction: str = "lru"
    ) -> None: ...
