from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool_ext.reading import TreeReading
from kvpool_ext.views import InsertResult, MatchResult

class RadixCache(TreeReading):
    def match_prefix(
        self, tokens: Any, extra_key: str | bytes | int | None = None
    ) -> MatchResult: ...
    def insert(
        self,
        tokens: Any,
        pages: Any,
        extra_key: str | bytes | int | None = None,
        priority: int = 0,
    ) -> InsertResult: ...
    def evict(self, num_tokens: int) -> NDArray[np.int32]: ...
    def inc_lock_ref(self, node: int) -> None: ...
    def dec_lock_ref(self, node: int) -> None: ...
    def reset(self) -> NDArray[np.int32]: ...
