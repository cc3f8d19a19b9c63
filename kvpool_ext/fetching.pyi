import numpy as np
from numpy.typing import NDArray

from kvpool_ext.ledger import PageLedger

def begin_fetch(
    ledger: PageLedger, number: int, node: int | None, num_pages: int
) -> NDArray[np.int32] | None: ...
def bring_in(
    ledger: PageLedger,
    number: int,
    tokens: NDArray[np.int32],
    pages: NDArray[np.int32],
    num_local: int,
    extra_key: str | bytes | int | None,
) -> tuple[int, int]: ...
def end_fetch(ledger: PageLedger, number: int, pages: NDArray[np.int32] | None = None) -> int: ...
