import numpy as np
from numpy.typing import NDArray

class NodeArena:
    num_live: int
    hash_key: bytes
    def __init__(self, page_size: int) -> None: ...
    def hash_of(self, parent: int, tokens: NDArray[np.int32]) -> int: ...
