import numpy as np
from numpy.typing import NDArray

from kvpool_ext.journal import TreeJournal
from kvpool_ext.moves import LedgerMoves
from kvpool_ext.tree import RadixTree

def follow_tree(ledger: LedgerMoves, max_bytes: int) -> TreeJournal: ...
def unfollow_tree(tree: RadixTree, journal: TreeJournal) -> None: ...
def take_changes(
    tree: RadixTree, whole: bool = False
) -> tuple[
    NDArray[np.int32],
    list[str | bytes | int | None],
    NDArray[np.int32] | None,
    list[str | bytes | int | None] | None,
]: ...
