import numpy as np
from numpy.typing import NDArray

from kvpool_ext.tables import StepRows

class PageMapRows:
    num_rows: int
    max_pages: int
    def resize(self, num_rows: int, max_pages: int) -> None: ...
    def shape_for(self, step: StepRows) -> tuple[int, int]: ...
    def num_ints(self, step: StepRows) -> int: ...
    def pack(
        self,
        step: StepRows,
        lengths: NDArray[np.int64],
        starts: NDArray[np.int64] | None,
        window_len: int,
        max_indices: int,
        out: NDArray[np.int32],
    ) -> int: ...
    def accept(self, step: StepRows) -> None: ...
