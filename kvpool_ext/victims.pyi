import numpy as np
from numpy.typing import NDArray

from kvpool_ext.tree import RadixTree

def next_victims(tree: RadixTree, num_pages: int) -> NDArray[np.int32]: ...
