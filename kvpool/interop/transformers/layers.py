"""PoolLayer: what transformers asks of the cache of one layer."""

from __future__ import annotations

from typing import Any

from kvpool.interop.torch import Tensor
from kvpool.interop.transformers.batch import PoolBatch
from kvpool.interop.transformers.guest import CacheLayerMixin


class PoolLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `PoolCache`.

    It keeps K and V of all columns, of a sliding layer too: the mask narrows what such a layer
    reads, and a later prompt that shares a prefix needs what came before the window.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = True

    def __init__(self, batch: PoolBatch, layer: int) -> None:
        # Not the base class's: there `keys` and `values` are tensors that it holds.
        self._batch, self._layer = batch, layer

    @property
    def is_initialized(self) -> bool:
        """Whether there is anything in it."""
        return self.get_seq_length() > 0

    @property
    def batch_size(self) -> int:
        """Rows."""
        return len(self._batch.rows)

    @property
    def keys(self) -> Tensor:
        """K of all columns, ``[rows, heads, columns, head_dim]``, not to be written to."""
        return self._batch.read(self._layer)[0]

    @property
    def values(self) -> Tensor:
        """V of all columns, ``[rows, heads, columns, head_dim]``, not to be written to."""
        return self._batch.read(self._layer)[1]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the pool has its memory already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Write K and V of new tokens, and read all; see `ForwardPass.update`.

        What comes back is overwritten by the next update, of any layer.
        """
        return self._batch.update(self._layer, key_states, value_states)

    def get_seq_length(self) -> int:
        """Columns."""
        return self._batch.columns[self._layer]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns after `query_length` more, and the first of them."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: it grows while the pool has pages."""
        return -1
