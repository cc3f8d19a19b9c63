"""ReplayKeys: the keys of a replay's pages, each hashed once where a prompt goes straight on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvpool.page_keys import PageKeys
from kvpool.request import ExtraKey
from kvpool.snapshot.fingerprint import Fingerprint

# What a replay knows of a model.
_NAME, _SHAPE, _DTYPE = "kvpool replay", (1, 1, 1), "float16"


class ReplayKeys(PageKeys):
    """Page keys of no model, the same in all pools of a replay.

    A prompt is looked up in the tiers, and then its pages come to a tree whose follower asks how
    they are called. The keys of the last prompt are remembered for that: hashing is half of the
    time of a replay with tiers.

    Parameters
    ----------
    page_size : int
        Tokens per page.
    """

    def __init__(self, page_size: int) -> None:
        layers, heads, head_dim = _SHAPE
        super().__init__(
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
        # Of the last prompt: its pages, their keys, and which page follows a key.
        self._tokens = np.empty((0, page_size), np.int32)
        self._keys: list[bytes] = []
        self._next: dict[bytes, int] = {}

    def of_prompt(self, tokens: NDArray[np.int32], extra_key: ExtraKey) -> list[bytes]:
        """As `of_tokens`, and remember them; `tokens` must not change until the next prompt."""
        root = self.root(extra_key)
        num_pages = len(tokens) // self.page_size
        paged = tokens[: num_pages * self.page_size].reshape(num_pages, self.page_size)
        keys = self.below(root, paged)
        self._tokens, self._keys = paged, keys
        self._next = {above: i for i, above in enumerate([root, *keys])}
        return keys

    def below(
        self, above: bytes, tokens: NDArray[np.int32], *, pause: bool = False
    ) -> list[bytes]:
        """As `PageKeys.below`; pages of the last prompt are not hashed again."""
        begin = self._next.get(above)
        if begin is None:
            return super().below(above, tokens, pause=pause)
        known = self._tokens[begin : begin + len(tokens)]
        same = (known == tokens[: len(known)]).all(axis=1)
        num_same = len(known) if same.all() else int(same.argmin())
        keys = self._keys[begin : begin + num_same]
        if num_same < len(tokens):
            keys += super().below(keys[-1] if keys else above, tokens[num_same:], pause=pause)
        return keys
