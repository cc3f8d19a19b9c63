"""KVCacheLayout: the shape of a model's K and V, and what one token costs."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.dtypes import itemsize_of
from kvpool.numbers import INT32_MAX, INT64_MAX, whole_number


@dataclass(frozen=True)
class KVCacheLayout:
    """Shape of the cache of one rank, free of any model family.

    Attributes
    ----------
    num_layers : int
        Layers with K and V of their own.
    num_kv_heads : int
        K/V heads on this rank.
    head_dim : int
        Elements of one head.
    max_batch_size : int
        Requests at once; caps the pool together with `max_seq_len`.
    max_seq_len : int
        Tokens of the longest request.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_batch_size: int = 1
    max_seq_len: int = 2048

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "max_batch_size", "max_seq_len"):
            value = whole_number(getattr(self, name), name, 1, INT64_MAX)
            object.__setattr__(self, name, value)

    def bytes_per_token(self, dtype: Any) -> int:
        """Bytes of K and V of one token over all layers.

        >>> KVCacheLayout(32, 8, 128).bytes_per_token("bfloat16")
        131072
        """
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize_of(dtype)

    @classmethod
    def from_config(
        cls,
        config: str | Path | Mapping[str, Any] | Any,
        *,
        max_batch_size: int = 1,
        max_seq_len: int | None = None,
        tp_size: int = 1,
    ) -> KVCacheLayout:
        """Read a Hugging Face style ``config.json``.

        Parameters
        ----------
        config : path, mapping or object
            A file, its content, or an object with the same attributes. A nested ``text_config`` is
            used where present.
        max_batch_size : int
            Requests at once.
        max_seq_len : int, optional
            Tokens of the longest request; default ``max_position_embeddings``, else 2048.
        tp_size : int
            Tensor-parallel ranks. KV heads are divided among them, or replicated when there are
            fewer heads.

        Raises
        ------
        ValueError
            Missing keys, sizes that do not divide, or an attention that K/V pages of equal heads
            cannot hold.
        """
        read = _reader(config)
        if read("kv_lora_rank") is not None:
            raise ValueError(
                "config has kv_lora_rank (MLA): its cache is not K and V of equal heads"
            )
        num_layers = _required(read, "num_hidden_layers", "n_layer", "num_layers")
        num_heads = _required(read, "num_attention_heads", "n_head")
        num_kv_heads = (
            _integer(read, "num_key_value_heads")
            or _integer(read, "multi_query_group_num")
            or num_heads
        )
        head_dim = _integer(read, "head_dim")
        if head_dim is None:
            hidden_size = _required(read, "hidden_size", "n_embd")
            if hidden_size % num_heads:
                raise ValueError(
                    f"hidden_size {hidden_size} is no multiple of {num_heads} attention heads"
                )
            head_dim = hidden_size // num_heads
        if max_seq_len is None:
            max_seq_len = _integer(read, "max_position_embeddings") or 2048
        return cls(
            num_layers,
            _heads_of_rank(num_kv_heads, tp_size),
            head_dim,
            max_batch_size,
            max_seq_len,
        )


def _heads_of_rank(num_kv_heads: int, tp_size: int) -> int:
    tp_size = whole_number(tp_size, "tp_size", 1)
    if num_kv_heads >= tp_size:
        if num_kv_heads % tp_size:
            raise ValueError(
                f"{num_kv_heads} KV heads do not divide among tp_size {tp_size} ranks"
            )
        return num_kv_heads // tp_size
    if tp_size % num_kv_heads:
        raise ValueError(
            f"{num_kv_heads} KV heads cannot be replicated evenly on tp_size {tp_size} ranks"
        )
    return 1


def _reader(config: Any) -> Any:
    if isinstance(config, (str, Path)):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except RecursionError:
            raise ValueError(f"{config} is no config: it is nested too deeply") from None
    inner = (
        config.get("text_config")
        if isinstance(config, Mapping)
        else getattr(config, "text_config", None)
    )
    if inner is not None:
        config = inner
    if isinstance(config, Mapping):
        return config.get
    return lambda key: getattr(config, key, None)


def _required(read: Any, *keys: str) -> int:
    for key in keys:
        value = _integer(read, key)
        if value is not None:
            return value
    raise ValueError(f"config lacks {' or '.join(keys)}")


def _integer(read: Any, key: str) -> int | None:
    """A number of a config, None where it is not set; ValueError unless it can be a size."""
    value = read(key)
    if value is None:
        return None
    try:
        return whole_number(value, key, 1, INT32_MAX)
    except (TypeError, ValueError):
        raise ValueError(
            f"config has {key} = {reprlib.repr(value)}, expected an integer in 1 .. {INT32_MAX}"
        ) from None
