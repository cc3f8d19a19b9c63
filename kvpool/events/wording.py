"""Wording: how the events of one stream say what they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvpool.events.namespaces import LoraName, is_text
from kvpool.events.wire import BlockHash, short_hash
from kvpool.numbers import INT32_MAX, whole_number
from kvpool.request import ExtraKey

HASHES: dict[str, Callable[[bytes], BlockHash]] = {"bytes": bytes, "int": short_hash}


@dataclass(frozen=True)
class Wording:
    """What all events of a stream have in common.

    Attributes
    ----------
    topic : bytes
        First frame of each message.
    medium : str
        Where the pages lie.
    hash_of : callable
        What a page key is published as.
    lora_name : callable or None
        The adapter of a namespace.
    data_parallel_rank : int or None
        Of the pool.
    """

    topic: bytes
    medium: str
    hash_of: Callable[[bytes], BlockHash]
    lora_name: LoraName | None
    data_parallel_rank: int | None

    @classmethod
    def of(
        cls,
        topic: str,
        device_kind: str,
        hash_as: str,
        lora_name: LoraName | None,
        data_parallel_rank: int | None,
    ) -> Wording:
        """From what callers say; TypeError or ValueError for what cannot be."""
        if not isinstance(topic, str):
            raise TypeError(f"topic must be a str, got {type(topic).__name__}")
        if not is_text(topic):
            raise ValueError(f"topic must be text that UTF-8 can hold, got {topic!r}")
        if hash_as not in HASHES:
            raise ValueError(f"hash_as must be one of {', '.join(HASHES)}, got {hash_as!r}")
        if lora_name is not None and not callable(lora_name):
            raise TypeError(
                "lora_name must be a function that gives the adapter of an extra_key, or None, "
                f"got {type(lora_name).__name__}"
            )
        if data_parallel_rank is not None:
            whole_number(data_parallel_rank, "data_parallel_rank", 0, INT32_MAX)
        medium = "GPU" if device_kind == "cuda" else "CPU"
        return cls(topic.encode(), medium, HASHES[hash_as], lora_name, data_parallel_rank)

    def adapter_of(self, extra_key: ExtraKey) -> str | None:
        """The adapter of a namespace, None where there is none; no namespace has none.

        Raises
        ------
        TypeError, ValueError
            The caller's function gave what is no name.
        """
        if self.lora_name is None or extra_key is None:
            return None
        name = self.lora_name(extra_key)
        if name is None:
            return None
        if not isinstance(name, str):
            raise TypeError(
                f"lora_name must give a str or None, got {type(name).__name__} for {extra_key!r}"
            )
        if not is_text(name):
            raise ValueError(f"lora_name must give text that UTF-8 can hold, got {name!r}")
        return name
