"""`generate`: ``model.generate`` over a pool, in one call."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from kvpool.interop.torch import Tensor, import_torch
from kvpool.interop.transformers.cache import PoolCache

if TYPE_CHECKING:
    from kvpool.pool import KVCachePool
    from kvpool.request import ExtraKey


def generate(
    model: Any,
    pool: KVCachePool,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    extra_key: ExtraKey = None,
    priority: int = 0,
    prefetch_timeout_s: float = 1.0,
    **options: Any,
) -> Any:
    """``model.generate``, computing only what the pool has not, and leaving it what it computed.

    Pages are reserved for all beams and sequences up to the length that `options` allow, so a
    shortage shows before anything is computed.

    Parameters
    ----------
    model, pool, input_ids, attention_mask, extra_key, priority, prefetch_timeout_s
        See `PoolCache`.
    **options
        For ``model.generate``: ``max_new_tokens``, ``do_sample``, ``num_beams`` and the like.

    Returns
    -------
    torch.Tensor or transformers.utils.ModelOutput
        What ``model.generate`` returns.

    Raises
    ------
    KVCacheExhaustedError
        The pages cannot be had; then nothing is bound.
    ValueError
        See `PoolCache`; or `options` bring another cache, or want none.
    TypeError
        `input_ids` is no tensor.
    """
    if not isinstance(input_ids, import_torch().Tensor):
        raise TypeError(
            f"input_ids must be a torch.Tensor [batch, length], got {type(input_ids).__name__}: "
            "of what a tokenizer returns, give input_ids and attention_mask"
        )
    if _setting(model, options, "use_cache") is False:
        raise ValueError("generate over a pool is with a cache, got use_cache=False")
    others = {"cache", "past_key_values", "cache_implementation"} & set(options)
    if others:
        raise ValueError(f"generate over a pool makes the cache itself, got {sorted(others)}")
    num_beams, num_sequences = (
        int(_setting(model, options, name) or 1) for name in ("num_beams", "num_return_sequences")
    )
    with PoolCache(
        model,
        pool,
        input_ids,
        attention_mask,
        max_new_tokens=_max_new_tokens(model, options, input_ids.shape[1]),
        rows_per_prompt=max(num_beams, num_sequences),
        extra_key=extra_key,
        priority=priority,
        prefetch_timeout_s=prefetch_timeout_s,
    ) as cache:
        options[cache_argument(model)] = cache
        return model.generate(input_ids, attention_mask=attention_mask, **options)


def cache_argument(model: Any) -> str:
    """What this model calls its cache: transformers renamed ``past_key_values`` to ``cache``."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _setting(model: Any, options: dict[str, Any], name: str) -> Any:
    """A setting as `generate` resolves it: its argument, its config, the model's config."""
    given = (options.get("generation_config"), model.generation_config)
    values = [options.get(name), *(getattr(config, name, None) for config in given)]
    return next((value for value in values if value is not None), None)


def _max_new_tokens(model: Any, options: dict[str, Any], length: int) -> int:
    """Tokens that `generate` may add to a prompt of `length`, 0 where nothing says it."""
    max_new_tokens = _setting(model, options, "max_new_tokens")
    if max_new_tokens is not None:
        return int(max_new_tokens)
    max_length = _setting(model, options, "max_length")
    return 0 if max_length is None else max(int(max_length) - length, 0)
