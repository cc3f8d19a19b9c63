"""What a replay found: of one cell, and of all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.replay.cell import Cell
from kvpool.replay.fleet_result import PLACES, FleetResult
from kvpool.replay.losses import Loss

_FIGURES = (
    *("complete", "num_requests", "prompt_tokens", "output_tokens"),
    *("too_large", "too_large_tokens", "waited"),
    *("hit_tokens", "hit_rate", "mean_hit_rate"),
    *("cut_requests", "cut_tokens", "uncut_hit_rate", "uncut_mean_hit_rate"),
    *("evicted_pages", "evicted_tokens", "peak_pages", "peak_bound_pages"),
    *("bookkeeping_s", "bookkeeping_requests_per_s", "seconds", "requests_per_s"),
)


@dataclass
class CellResult:
    """One cell, as far as it was replayed.

    Attributes
    ----------
    cell : Cell
        What was replayed.
    num_pages : int
        Pages of its pool, or of each of its pools.
    complete : bool
        False: interrupted; all figures are of the requests until then.
    num_requests, prompt_tokens, output_tokens : int
        Requests that were served, and what they wrote.
    too_large, too_large_tokens : int
        Requests that no waiting makes fit, and their prompt tokens. They are left out of all other
        figures.
    waited : int
        Requests that waited for room, besides the window.
    hit_tokens : int
        Prompt tokens that bind found cached.
    cut_requests, cut_tokens : int
        A bind matches at most ``prompt_len - 1`` tokens, for a model must compute one position to
        get logits. A prompt that is cached to its end, where that is the end of a page, so loses
        a page that was there: in so many requests, of so many tokens.
    evicted_pages : int
        Taken out of the tree to make room.
    peak_pages, peak_bound_pages : int
        Most pages of one pool that were not free, and most that requests in flight held.
    bookkeeping_s : float
        Seconds inside of kvpool's calls: bind, mark_written, checkpoint, finish.
    seconds : float
        Seconds in all, with reading and making tokens.
    losses : list of Loss
        Requests that lost most, worst first.
    matched_lens : ndarray or None
        int32, one a request of the trace, in order: what bind matched; -1 where it was too large.
    bytes_per_token : int or None
        What a token costs, where that is known.
    fleet : FleetResult
        Where the hits came from, and who served whom.
    """

    cell: Cell
    num_pages: int
    complete: bool = False
    num_requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    too_large: int = 0
    too_large_tokens: int = 0
    waited: int = 0
    hit_tokens: int = 0
    cut_requests: int = 0
    cut_tokens: int = 0
    evicted_pages: int = 0
    peak_pages: int = 0
    peak_bound_pages: int = 0
    bookkeeping_s: float = 0.0
    seconds: float = 0.0
    losses: list[Loss] = field(default_factory=list)
    matched_lens: NDArray[np.int32] | None = None
    bytes_per_token: int | None = None
    fleet: FleetResult = field(default_factory=FleetResult)
    _sum_of_rates: float = 0.0
    _sum_of_uncut_rates: float = 0.0

    def count(self, prompt_len: int, output_len: int, matched_len: int, uncut_len: int) -> None:
        """Add a request that was served; `uncut_len`: what it matches without the n - 1 rule."""
        self.num_requests += 1
        self.prompt_tokens += prompt_len
        self.output_tokens += output_len
        self.hit_tokens += matched_len
        self.cut_requests += uncut_len > matched_len
        self.cut_tokens += uncut_len - matched_len
        self._sum_of_rates += matched_len / prompt_len
        self._sum_of_uncut_rates += uncut_len / prompt_len

    @property
    def hit_rate(self) -> float | None:
        """Hit tokens of all prompt tokens; None without a request, like all that follow."""
        return _share(self.hit_tokens, self.prompt_tokens)

    @property
    def mean_hit_rate(self) -> float | None:
        """Mean over the requests of the share of its prompt that each one found."""
        return _share(self._sum_of_rates, self.num_requests)

    @property
    def uncut_hit_rate(self) -> float | None:
        """`hit_rate` if a match were not cut at ``prompt_len - 1``."""
        return _share(self.hit_tokens + self.cut_tokens, self.prompt_tokens)

    @property
    def uncut_mean_hit_rate(self) -> float | None:
        """`mean_hit_rate` if a match were not cut at ``prompt_len - 1``."""
        return _share(self._sum_of_uncut_rates, self.num_requests)

    @property
    def evicted_tokens(self) -> int:
        """Tokens on the evicted pages."""
        return self.evicted_pages * self.cell.page_size

    @property
    def bookkeeping_requests_per_s(self) -> float | None:
        """Requests a second of kvpool's own calls."""
        return _share(self.num_requests, self.bookkeeping_s)

    @property
    def requests_per_s(self) -> float | None:
        """Requests a second of the whole replay."""
        return _share(self.num_requests, self.seconds)

    def as_dict(self) -> dict[str, Any]:
        """The cell, and all figures but `matched_lens`, as JSON has them.

        What only a fleet has is there only for one.
        """
        cell = self.cell
        more = {} if cell.fleet.is_plain else {"fleet": self._fleet_as_dict()}
        return {
            "capacity": cell.capacity,
            "page_size": cell.page_size,
            "policy": cell.policy,
            "num_pages": self.num_pages,
            **{name: getattr(self, name) for name in _FIGURES},
            "losses": [loss.as_dict() for loss in self.losses],
            **more,
        }

    @property
    def local_hit_tokens(self) -> int:
        """Of the hit tokens, those that the pool itself had."""
        return self.hit_tokens - self.fleet.host_hit_tokens - self.fleet.remote_hit_tokens

    def hit_rate_of(self, place: str) -> float | None:
        """Part of `hit_rate` that came from ``"local"``, ``"host"`` or ``"remote"``."""
        tokens = {
            "local": self.local_hit_tokens,
            "host": self.fleet.host_hit_tokens,
            "remote": self.fleet.remote_hit_tokens,
        }
        return _share(tokens[place], self.prompt_tokens)

    @property
    def peak_bytes(self) -> dict[str, int | None]:
        """K and V at most: of one pool, of one host tier, of the store; None if not known."""
        cost = self.bytes_per_token
        peaks = (self.peak_pages, self.fleet.host_peak_pages, self.fleet.remote_peak_pages)
        return {
            place: None if cost is None else pages * self.cell.page_size * cost
            for place, pages in zip(PLACES, peaks, strict=True)
        }

    def _fleet_as_dict(self) -> dict[str, Any]:
        return {
            **vars(self.cell.fleet),
            "local_hit_tokens": self.local_hit_tokens,
            **{f"{place}_hit_rate": self.hit_rate_of(place) for place in PLACES},
            **self.fleet.as_dict(),
            **{f"{place}_peak_bytes": peak for place, peak in self.peak_bytes.items()},
        }


@dataclass(frozen=True)
class ReplayReport:
    """A replay of a trace through some cells.

    Attributes
    ----------
    trace : str
        Name of the file.
    num_requests, prompt_tokens, output_tokens, longest_request : int
        What the trace has; the longest in tokens.
    num_lines, num_malformed : int
        Lines read, and those that are no request.
    malformed : list of (int, str)
        Number and reason of the first few of these.
    options : dict
        What the replay was asked for.
    complete : bool
        False: interrupted.
    results : list of CellResult
        The cells that were asked for, in order, as far as they were replayed.
    bounds : dict
        Page size -> the cell of that page size in which nothing is evicted.
    """

    trace: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    longest_request: int
    num_lines: int
    num_malformed: int
    malformed: list[tuple[int, str]]
    options: dict[str, Any]
    complete: bool
    results: list[CellResult]
    bounds: dict[int, CellResult]

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        found = dict(vars(self))
        found["malformed"] = [{"line": line, "reason": reason} for line, reason in self.malformed]
        found["results"] = [result.as_dict() for result in self.results]
        found["bounds"] = [bound.as_dict() for bound in self.bounds.values()]
        return found


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
