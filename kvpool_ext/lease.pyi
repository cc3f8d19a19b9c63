import numpy as np
from numpy.typing import NDArray

class PageLease:
    tag: int
    row: int
    matched_len: int | None
    serial: int
    num_pages: int
    matched_pages: int
    tree_pages: int
    shared_pages: int
    entered_pages: int
    num_shrinks: int
    live: bool
    extra_key: str | bytes | int | None
    priority: int
    known_len: int
    prompt_len: int
    def pages(self) -> NDArray[np.int32]: ...
    def private_pages(self) -> NDArray[np.int32]: ...
