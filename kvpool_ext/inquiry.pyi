from typing import Any

from kvpool_ext.moves import LedgerMoves
from kvpool_ext.views import Inquiry

def inquire(ledger: LedgerMoves, tokens: Any, extra_key: str | bytes | int | None) -> Inquiry: ...
