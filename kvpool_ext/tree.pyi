class RadixTree:
    page_size: int
    eviction: str
    evicted_pages: int
    def __init__(self, page_size: int = 1, eviction: str = "lru", num_pages: int = 0) -> None: ...
