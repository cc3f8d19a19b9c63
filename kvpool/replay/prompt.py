"""Prompt: what of a request is looked up, with the keys of its pages."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvpool.page_keys import PageKeys
from kvpool.replay.lines import TraceRequest
from kvpool.request import ExtraKey
from kvpool.snapshot.fingerprint import Fingerprint

# What a replay knows of a model.
_NAME, _SHAPE, _DTYPE = "kvpool replay", (1, 1, 1), "float16"


class Prompt:
    """The prompt of one request.

    Parameters
    ----------
    request : TraceRequest
        Whose it is.
    tokens : ndarray
        int32 ``[num_tokens + 1]``, from `TokenWriter.tokens`.
    page_keys : PageKeys
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
        self, request: TraceRequest, tokens: NDArray[np.int32], page_keys: PageKeys
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
        return self._page_keys.of_tokens(self.tokens, self.extra_key)


def replay_keys(page_size: int) -> PageKeys:
    """Makes the keys of a replay: those of no model, and the same in all its pools."""
    layers, heads, head_dim = _SHAPE
    return PageKeys(
        Fingerprint(
            model=_NAME,
            num_layers=layers,
            num_kv_heads=heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype=_DTYPE,
            compute_dtype=_DTYPE,
            k_scale=1.0,
            v_scale=1.0,
        )
    )
