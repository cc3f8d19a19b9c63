import numpy as np
from numpy.typing import NDArray

from kvpool_ext.tree import RadixTree
from kvpool_ext.views import TreeSurvey

def survey_tree(tree: RadixTree) -> TreeSurvey: ...
def node_tokens(tree: RadixTree, node: int, start: int, end: int) -> NDArray[np.int32]: ...
