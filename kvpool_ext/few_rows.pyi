from typing import Any

import numpy as np
from numpy.typing import NDArray

def scatter_few(
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    k_rows: NDArray[Any],
    v_rows: NDArray[Any],
    slots: NDArray[np.integer[Any]],
    num_slots: int,
) -> bool: ...
