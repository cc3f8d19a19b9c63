from collections.abc import Iterable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

class TreeJournal:
    num_pages: int
    page_size: int
    max_bytes: int
    num_words: int
    lost: bool
    num_losses: int
    def __init__(self, num_pages: int, page_size: int, max_bytes: int) -> None: ...
    def check(self, page_ids: Iterable[int]) -> None: ...
    def forget(self) -> None: ...
    def still_cached(
        self, page_ids: Any, generations: NDArray[np.uint32]
    ) -> NDArray[np.bool_]: ...

@final
class RecordMemory: ...
