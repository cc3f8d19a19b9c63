"""How a trace is replayed, and where a replay stands."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.replay.cell import Cell
from kvpool.replay.lines import MAX_REQUEST_TOKENS


@dataclass(frozen=True)
class ReplayOptions:
    """How a trace is replayed.

    Attributes
    ----------
    window : int
        Requests in flight at most, times the instances; the oldest of all ends first.
    checkpoint : bool
        With more than one in flight: publish each prompt when it has been computed, so that the
        requests beside it share it. Off: at the end of its request.
    prompts_only : bool
        Leave the outputs out.
    block_size : int
        Prompt tokens of one hash id.
    limit : int or None
        Only the first so many requests.
    strict : bool
        A malformed line is an error; else it is counted, and skipped.
    bound : bool
        Replay each page size without bound too. Its memory grows with the trace.
    explain : int
        In each cell, say of so many requests, those that lost most, why they did. The
        memory grows with the trace: what is evicted is remembered.
    keep_matches : bool
        Keep what every request matched.
    bytes_per_token : int or None
        What a token costs, for figures in bytes.

    Raises
    ------
    ValueError, TypeError
        A number out of range, or none.
    """

    window: int = 32
    checkpoint: bool = True
    prompts_only: bool = False
    block_size: int = 512
    limit: int | None = None
    strict: bool = False
    bound: bool = True
    explain: int = 0
    keep_matches: bool = False
    bytes_per_token: int | None = None

    def __post_init__(self) -> None:
        for name in ("window", "block_size", "limit", "explain", "bytes_per_token"):
            value = getattr(self, name)
            may_be_none = name in ("limit", "bytes_per_token")
            if type(value) is not int and not (value is None and may_be_none):
                raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if self.window < 1:
            raise ValueError(f"window must be at least 1 request, got {self.window}")
        if not 1 <= self.block_size <= MAX_REQUEST_TOKENS:
            raise ValueError(
                f"block_size must be in 1 .. {MAX_REQUEST_TOKENS:,}, got {self.block_size}"
            )
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1 request, got {self.limit}")
        if self.bytes_per_token is not None and self.bytes_per_token < 1:
            raise ValueError(f"bytes_per_token must be at least 1, got {self.bytes_per_token}")
        if self.explain < 0:
            raise ValueError(f"explain must be at least 0 requests, got {self.explain}")


@dataclass(frozen=True)
class Progress:
    """Where a replay stands.

    Attributes
    ----------
    cell : Cell or None
        What is replayed now; None while the trace is read for the first time.
    passes, num_passes : int
        Passes over the file that are done, and all of them.
    pass_bytes, file_bytes : int
        How far the pass is, and where it ends; the first pass may end before.
    num_requests : int
        Requests of this pass so far.
    seconds : float
        Of this pass so far.
    hit_rate : float or None
        Of this cell so far.
    """

    cell: Cell | None
    passes: int
    num_passes: int
    pass_bytes: int
    file_bytes: int
    num_requests: int
    seconds: float
    hit_rate: float | None
