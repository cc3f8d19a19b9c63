"""Prompts of a batch: a padded matrix of ids, as the rows of tokens that a pool knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Prompts:
    """Token ids of a batch, aligned on the right.

    Column ``c`` of row ``r`` is position ``c - pads[r]`` of its prompt; columns before are
    padding, whose K and V never reach a pool.

    Attributes
    ----------
    tokens : list of ndarray
        Integers ``[length - pads[r]]``, without padding.
    pads : list of int
        Padding columns of each row, at the left.
    length : int
        Columns.
    """

    tokens: list[NDArray[Any]]
    pads: list[int]
    length: int

    @classmethod
    def of(cls, input_ids: Any, attention_mask: Any, pad_token_ids: set[int]) -> Prompts:
        """Read what a tokenizer gave.

        Parameters
        ----------
        input_ids : tensor or array
            Integers ``[batch, length]``.
        attention_mask : tensor or array, optional
            ``[batch, length]``, 0 for padding.
        pad_token_ids : set of int
            Ids that `generate` would take for padding where there is no mask.

        Raises
        ------
        ValueError
            Another shape, padding that is not at the left, a row of nothing but padding, or ids
            that look like padding and no mask.
        """
        ids = host_array(input_ids)
        if ids.ndim != 2 or not ids.size or ids.dtype.kind not in "iu":
            raise ValueError(
                f"input_ids must be integers [batch, length], got {list(ids.shape)} of {ids.dtype}"
            )
        batch_size, length = ids.shape
        if attention_mask is None:
            if pad_token_ids and np.isin(ids, list(pad_token_ids)).any():
                raise ValueError(
                    f"input_ids hold the padding token ({min(pad_token_ids)}) and there is no "
                    "attention_mask: give it, so that padding is told from text"
                )
            return cls([*ids], [0] * batch_size, length)
        mask = host_array(attention_mask)
        if mask.shape != ids.shape:
            raise ValueError(
                f"Invalid shape of attention_mask: expected {list(ids.shape)} as input_ids, got "
                f"{list(mask.shape)}"
            )
        seen = mask != 0
        pads = length - seen.sum(axis=1)
        expected: NDArray[np.bool_] = np.arange(length) >= pads[:, None]
        wrong = (seen != expected).any(axis=1) | (pads == length)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise ValueError(
                f"row {row} of attention_mask is {mask[row].tolist()}: expected padding at the "
                "left only, and a token (padding_side='left')"
            )
        rows = zip(ids, pads, strict=True)
        return cls([row[pad:] for row, pad in rows], pads.tolist(), length)


def host_array(values: Any) -> Any:
    """A tensor, array or list as a NumPy array on the host; None for None."""
    if values is None:
        return None
    cpu = getattr(values, "cpu", None)
    return np.asarray(values if cpu is None else cpu())
