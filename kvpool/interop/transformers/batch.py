"""PoolBatch: the rows of one `PoolCache`, and how far each layer of them has come."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import KVCacheStateError
from kvpool.interop.torch import Tensor, import_torch
from kvpool.interop.transformers.passes import ForwardPass, ReadBuffer, check_kv
from kvpool.interop.transformers.prompts import host_array
from kvpool.interop.transformers.rows import BatchRows

if TYPE_CHECKING:
    from kvpool.pool import KVCachePool

CLOSED = "the cache is closed: make another for the next prompt, it will match what this one left"


class PoolBatch:
    """What the layers of a cache share.

    A forward begins with `begin`, which the model calls through a hook and which checks that its
    tokens are those that the pool will take them for; then each layer updates once.

    Parameters
    ----------
    pool : KVCachePool
        Where K and V are.
    rows : BatchRows
        The rows, bound.
    eos_token_ids : collection of int
        Tokens after which `generate` fills a row up.
    """

    def __init__(self, pool: KVCachePool, rows: BatchRows, eos_token_ids: Collection[int]) -> None:
        self.pool, self.rows = pool, rows
        self._eos_token_ids = frozenset(eos_token_ids)
        self._buffer = ReadBuffer(pool)
        self._pass: ForwardPass | None = None
        # Columns of each layer; they differ in a forward only, or after one that failed.
        self.columns = [rows.reused_columns] * pool.num_layers
        self.num_forwarded = 0
        self._is_fresh = True
        self.is_closed = False

    # ---- one forward

    def begin(self, inputs: Mapping[str, Any]) -> int:
        """Look at what a forward is given, and prepare for it.

        Parameters
        ----------
        inputs : mapping
            Arguments of the model's decoder by name.

        Returns
        -------
        int
            Leading columns of the inputs that the rows have already, and that the model must not
            be given: assisted decoding hands the whole prompt over, whatever a cache holds.

        Raises
        ------
        ValueError
            K and V of the forward would depend on more than the tokens of the prompts, or on
            others.
        KVCacheExhaustedError
            No pages for its columns.
        """
        if self.is_closed:
            raise KVCacheStateError(CLOSED)
        self._pass = None
        input_ids = inputs.get("input_ids")
        floats = [name for name, value in inputs.items() if _is_features(name, value)]
        if input_ids is None or floats:
            raise ValueError(
                f"the model was given {', '.join(floats) or 'no input_ids'}: a pool knows K and V "
                "by token ids, and serves models of text only"
            )
        past = min(self.columns)
        ids, positions = (host_array(inputs.get(name)) for name in ("input_ids", "position_ids"))
        num_known = past if self._is_whole(ids, positions) else 0
        if num_known:
            ids, positions = ids[:, num_known:], positions[:, num_known:]
        if len(ids) != len(self.rows):
            self._expand(len(ids))
        end = past + ids.shape[1]
        self._check_tokens(ids, past)
        self._check_mask(inputs.get("attention_mask"), end)
        self._check_positions(positions, past, end)
        self.rows.reserve(end)
        self._pass = ForwardPass(self.rows, past, end, self._buffer)
        self.rows.note(past, ids)
        self.columns = [past] * len(self.columns)
        self.num_forwarded += ids.size
        self._is_fresh = False
        return num_known

    def _is_whole(self, ids: Any, positions: Any) -> bool:
        """Whether a first forward is given the columns that were reused along with the rest."""
        return (
            self._is_fresh
            and positions is not None
            and positions.ndim == 2
            and ids.shape[1] == positions.shape[1] >= self.rows.prompts.length
            and not positions[:, 0].any()
        )

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write K and V of one layer, and read all of it; see `ForwardPass.update`."""
        now = self._pass
        if now is None:
            raise KVCacheStateError(
                CLOSED
                if self.is_closed
                else "K and V came from a forward that this cache was not told of: call the model "
                "that it was made for"
            )
        if self.columns[layer] != now.past:
            raise KVCacheStateError(f"layer {layer} was updated twice in one forward")
        if k.requires_grad and import_torch().is_grad_enabled():
            raise KVCacheStateError("a pool keeps no gradients: call under torch.no_grad()")
        pool = self.pool
        expected = (len(self.rows), pool.num_kv_heads, now.end - now.past, pool.head_dim)
        check_kv(layer, k, v, expected)
        found = now.update(layer, k, v)
        self.columns[layer] = now.end
        return found

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of all columns of one layer, in the compute dtype of the pool."""
        if self.is_closed:
            raise KVCacheStateError(CLOSED)
        end = self.columns[layer]
        return ForwardPass(self.rows, end, end, ReadBuffer(self.pool)).read(layer)

    def _expand(self, num_given: int) -> None:
        """Have as many rows as the model was given: beams, or several sequences of a prompt."""
        times, rest = divmod(num_given, len(self.rows))
        if rest or max(self.columns) != self.rows.reused_columns:
            raise ValueError(
                f"the cache has {len(self.rows)} rows, the model was given {num_given}"
            )
        self.rows.repeat(times)

    def _check_tokens(self, ids: Any, past: int) -> None:
        prompts = self.rows.prompts
        count = min(prompts.length - past, ids.shape[1])
        if count <= 0:
            return
        for row, index in enumerate(self.rows.prompt_of):
            pad, tokens = prompts.pads[index], prompts.tokens[index]
            first = max(past, pad)
            expected = tokens[first - pad : max(past + count - pad, 0)]
            if not np.array_equal(ids[row, first - past : count], expected):
                raise ValueError(
                    f"row {row}: columns {past} to {past + count} of input_ids are not those of "
                    "the prompt that the cache was made with"
                )

    def _check_mask(self, mask: Any, end: int) -> None:
        pads = self.rows.pads
        if mask is None:
            if max(pads) == 0:
                return
            raise ValueError(
                f"row {int(np.argmax(pads))} has {max(pads)} columns of padding and the model was "
                "given no attention_mask: give generate the one that the cache has"
            )
        if isinstance(mask, Mapping) or mask.ndim != 2:
            raise ValueError(
                "attention_mask must be [batch, columns]: with another mask K and V may depend on "
                "more than the tokens before"
            )
        expected: NDArray[np.bool_] = np.arange(end) >= np.array(pads)[:, None]
        if not np.array_equal(host_array(mask) != 0, expected):
            raise ValueError(
                f"attention_mask {list(mask.shape)} is not the one that the cache was made with, "
                f"and ones for later tokens, {list(expected.shape)}: give both the same one "
                "(generate makes one of its own where it is given none and finds padding tokens)"
            )

    def _check_positions(self, found: Any, past: int, end: int) -> None:
        pads = np.array(self.rows.pads)[:, None]
        columns = np.arange(past, end)
        if found is None:
            if pads.any():
                raise ValueError("rows have padding and the model was given no position_ids")
            return
        if found.ndim != 2 or ((found != columns - pads) & (columns >= pads)).any():
            raise ValueError(
                f"position_ids {list(found.shape)} do not count the tokens of each row from 0: "
                f"expected {past - int(pads[0, 0])} and on in row 0"
            )

    # ---- rows and columns

    def select(self, sources: Sequence[int]) -> None:
        """See `BatchRows.select`."""
        self._between_forwards("reorder_cache")
        self.rows.select(sources)

    def repeat(self, times: int) -> None:
        """See `BatchRows.repeat`."""
        self._between_forwards("batch_repeat_interleave")
        self.rows.repeat(times)

    def crop(self, num_columns: int) -> None:
        """Take back the last `num_columns` columns, all of them generated."""
        if num_columns == 0:
            return
        past = self._between_forwards("crop")
        end, length = past - num_columns, self.rows.prompts.length
        if end < length:
            raise ValueError(
                f"crop takes back {num_columns} of {past} columns, of which {length} are the "
                "prompt's: make another cache for another prompt"
            )
        pads = self.rows.pads
        self.rows.step.truncate_to([end - pad for pad in pads], [past - pad for pad in pads])
        self.columns = [end] * len(self.columns)

    def _between_forwards(self, verb: str) -> int:
        if self.is_closed:
            raise KVCacheStateError(CLOSED)
        past = min(self.columns)
        if past != max(self.columns):
            raise KVCacheStateError(f"{verb} in the middle of a forward, or after one that failed")
        self._pass = None
        return past

    def restart(self, make_rows: Callable[[], BatchRows]) -> None:
        """Give the rows back, and bind them again."""
        if self.is_closed:
            raise KVCacheStateError(CLOSED)
        self.close()
        self.rows = make_rows()
        self.columns = [self.rows.reused_columns] * len(self.columns)
        self.is_closed = False
        self._is_fresh = True

    # ---- the end

    def finish(self) -> int:
        """Insert what each row holds and end; see `PoolCache.finish`."""
        if self.is_closed:
            return 0
        past = min(self.columns)
        ends = [self._end_of_text(row, past) for row in range(len(self.rows))]
        num_inserted = self.rows.finish(ends)
        self.close()
        return num_inserted

    def close(self) -> None:
        """End without inserting anything."""
        self.is_closed = True
        self._pass = None
        self.rows.unbind()

    def _end_of_text(self, row: int, past: int) -> int:
        """Column behind the end of text that the row ends with, without what only fills it up."""
        length, ends = self.rows.prompts.length, self._eos_token_ids
        tokens = self.rows.continuations[row][: max(past - length, 0)]
        # One token fills it up. A cache of several turns has ends of text in between, too.
        fill = len(tokens) - 1
        while fill > 0 and tokens[fill - 1] == tokens[-1]:
            fill -= 1
        for index in (fill - 1, fill):
            if index >= 0 and tokens[index] in ends:
                return length + index + 1
        return past


def _is_features(name: str, value: Any) -> bool:
    """Whether an argument is a tensor of numbers, not of ids: embeddings, pixels."""
    is_floating_point = getattr(value, "is_floating_point", None)
    return name != "attention_mask" and is_floating_point is not None and is_floating_point()
