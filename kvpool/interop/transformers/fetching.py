"""Prefixes that tiers below the pool have, brought to it before a batch is bound."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.request import ExtraKey


def fetch_prefixes(
    pool: Any, prompts: Sequence[Any], extra_key: ExtraKey, timeout_s: float
) -> None:
    """Prefetch each prompt and wait for all of them, at most `timeout_s` seconds together.

    What has come by then is in the tree, and the rest is given up. Without tiers it does nothing.

    Parameters
    ----------
    pool : KVCachePool
        With or without tiers.
    prompts : sequence of array
        Token ids ``[n]`` each.
    extra_key : str, bytes, int or None
        Namespace.
    timeout_s : float
        0 or less: nothing is fetched.
    """
    if timeout_s <= 0 or pool.tiers is None:
        return
    deadline = time.monotonic() + timeout_s
    with ExitStack() as fetches:  # leaving publishes what has arrived
        for prefetch in [
            fetches.enter_context(pool.prefetch(each, extra_key)) for each in prompts
        ]:
            prefetch.wait(max(deadline - time.monotonic(), 0.0))
