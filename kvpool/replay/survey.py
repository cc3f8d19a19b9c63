"""Survey: what a first pass over a trace learns, so that no pool has to be larger than it needs.

A pool without bound is a pool in which nothing is ever evicted. Its pages are bounded by what the
tree can hold at the end, and by what requests in flight hold besides: the blocks of a prompt that
an earlier prompt had, after equal blocks before them, are in the tree already and count once.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.paging import num_pages_for_length
from kvpool.replay.lines import TraceRequest


class Survey:
    """Sums over a trace, and the pages that a pool without bound needs.

    Parameters
    ----------
    page_sizes : sequence of int
        Those that will be asked for.
    prompts_only : bool
        Leave the outputs out.
    find_shared : bool
        Look for blocks that were seen before. It costs about a hundred bytes for each distinct
        block, a twentieth of what the tree of an unbounded pool takes; without it every block
        counts as new, and the memory is constant.

    Attributes
    ----------
    num_requests, prompt_tokens, output_tokens : int
        So far; `output_tokens` also counts what `prompts_only` leaves out.
    longest : int
        Tokens of the longest request.
    """

    def __init__(self, page_sizes: Sequence[int], prompts_only: bool, find_shared: bool) -> None:
        self.num_requests = self.prompt_tokens = self.output_tokens = self.longest = 0
        self._prompts_only = prompts_only
        self._tree_pages = dict.fromkeys(page_sizes, 0)
        self._seen: set[int] | None = set() if find_shared else None

    def add(self, request: TraceRequest) -> None:
        """Count one request."""
        num_tokens = request.num_tokens(self._prompts_only)
        shared_len = 0 if self._seen is None else _shared_len(request, self._seen)
        self.num_requests += 1
        self.prompt_tokens += request.prompt_len
        self.output_tokens += request.output_len
        self.longest = max(self.longest, num_tokens)
        for page_size in self._tree_pages:
            self._tree_pages[page_size] += num_tokens // page_size - shared_len // page_size

    def unbounded_pages(self, page_size: int, window: int) -> int:
        """Pages with which a pool never evicts, with at most `window` requests in flight."""
        in_flight = min(window, self.num_requests) * num_pages_for_length(self.longest, page_size)
        return self._tree_pages[page_size] + in_flight


def _shared_len(request: TraceRequest, seen: set[int]) -> int:
    """Tokens of leading whole blocks that `seen` has; afterwards it has all of them."""
    # Bytes and text, for the hash of an int is itself: -1 and -2 have the same one.
    name = hash(repr(request.extra_key))
    shared_len, all_seen = 0, True
    for block in request.prompt.whole_blocks():
        name = hash((name, block))
        all_seen = all_seen and name in seen
        if all_seen:
            shared_len += request.prompt.block_size
        else:
            seen.add(name)
    return shared_len
