"""Prompt: what of a request is looked up, with the keys of its pages."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvpool.replay.keys import ReplayKeys
from kvpool.replay.lines import TraceRequest
from kvpool.request import ExtraKey


class Prompt:
    """The prompt of one request.

    Parameters
    ----------
    request : TraceRequest
        Whose it is.
    tokens : ndarray
        int32 ``[num_tokens + 1]``, from `TokenWriter.tokens`.
    page_keys : ReplayKeys
        Makes the keys, when they are first asked for.

    Attributes
    ----------
    length : int
        Tokens.
    tokens : ndarray
        int32 ``[length]``.
    and_one_more : ndarray
        int32 ``[length + 1]``, the last without a meaning.
    extra_key : str, bytes, int or None
        Namespace.
    most_matched : int
        Pages that a bind matches at most: one token is left to be computed.
    """

    def __init__(
        self, request: TraceRequest, tokens: NDArray[np.int32], page_keys: ReplayKeys
    ) -> None:
        self.length = request.prompt_len
        self.tokens = tokens[: self.length]
        self.and_one_more = tokens[: self.length + 1]
        self.extra_key: ExtraKey = request.extra_key
        self.most_matched = (self.length - 1) // page_keys.page_size
        self._page_keys = page_keys

    @cached_property
    def keys(self) -> list[bytes]:
        """Keys of the whole pages."""
        return self._page_keys.of_prompt(self.tokens, self.extra_key)
