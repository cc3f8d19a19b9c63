"""Model: what sizing knows of a model, from its config and from what the person adds to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.dtypes import FLOAT_DTYPES, dtype_name, itemsize_of
from kvpool.layout import KVCacheLayout
from kvpool.sizing.config import Config, load_config
from kvpool.sizing.errors import SizingError
from kvpool.sizing.parameters import (
    FAMILIES,
    Part,
    check_division,
    count_parameters,
    elements_of_rank,
)
from kvpool.sizing.refusals import why_not_sizable, windowed_layers
from kvpool.sizing.weights import stored_weights


@dataclass(frozen=True)
class Model:
    """A model that can be sized.

    Attributes
    ----------
    name : str
        Built-in name or path.
    config : Config
        What it was read from.
    parts : list of Part or None
        Parameters by kind; None where the family is not known.
    weight_bytes : int
        Of the whole model.
    weight_source : str
        Where that number is from, in words.
    notes : tuple of str
        What a reader of the numbers has to know.
    """

    name: str
    config: Config
    parts: list[Part] | None
    weight_bytes: int
    weight_source: str
    notes: tuple[str, ...]

    @property
    def num_parameters(self) -> int | None:
        """Parameters of the language model; None where the family is not known."""
        return None if self.parts is None else sum(part.elements for part in self.parts)

    @property
    def max_position_embeddings(self) -> int | None:
        """Tokens of the longest request that the model was made for; None if it does not say."""
        longest = self.config.text.get("max_position_embeddings")
        return longest if isinstance(longest, int) else None

    def layout(
        self, tp_size: int = 1, max_batch_size: int = 1, max_seq_len: int | None = None
    ) -> KVCacheLayout:
        """The K and V of one of `tp_size` ranks.

        Raises
        ------
        SizingError
            Keys are missing, the heads do not divide among the ranks, or the cache is not K and V.
        """
        try:
            layout = KVCacheLayout.from_config(
                self.config.text,
                max_batch_size=max_batch_size,
                max_seq_len=max_seq_len,
                tp_size=tp_size,
            )
        except ValueError as error:
            raise SizingError(f"{self.name}: {error}") from None
        check_division(self.config.text, tp_size)
        return layout

    def weights_of_rank(self, tp_size: int) -> int:
        """Bytes of weights that one rank holds: its share, and all that every rank holds whole.

        By the parts where they are known, else an even share.
        """
        if self.parts is None or self.num_parameters is None:
            return -(-self.weight_bytes // tp_size)
        elements = elements_of_rank(self.parts, tp_size, self.layout().num_kv_heads)
        # Exact where the bytes are the parameters' own; in proportion where they were given.
        return -(-self.weight_bytes * elements // self.num_parameters)


def read_model(
    source: str | Path, *, dtype: str | None = None, weight_bytes: int | None = None
) -> Model:
    """Read a config and find out how large the weights are.

    Parameters
    ----------
    source : str or path
        A config.json, a folder with one, or a built-in shape by name.
    dtype : str, optional
        Of the weights: float32, float16 or bfloat16. By default what the files beside the config
        hold, else the config's own dtype.
    weight_bytes : int, optional
        Bytes of the whole model's weights, for what cannot be counted (quantised models, others).

    Raises
    ------
    SizingError
        The config cannot be read or sized, or its weights cannot be counted.
    """
    if weight_bytes is not None and weight_bytes < 0:
        raise SizingError(f"weights must be at least 0 bytes, got {weight_bytes}")
    if weight_bytes is not None and dtype is not None:
        raise SizingError("give the bytes of the weights or their dtype, not both")
    config = load_config(source)
    reason = why_not_sizable(config)
    if reason is not None:
        raise SizingError(f"{config.name} cannot be sized: {reason}")
    # The layout first: what it says of missing keys and of MLA is the clearer message.
    Model(config.name, config, None, 0, "", ()).layout()
    try:
        parts = count_parameters(config.text, tied=bool(config.either("tie_word_embeddings")))
    except SizingError as error:
        raise SizingError(f"{config.name}: {error}") from None
    notes = [note for note in (windowed_layers(config),) if note]
    if weight_bytes is not None:
        total, origin = weight_bytes, "as given"
    else:
        total, origin = _weights(config, parts, dtype)
        if config.is_nested and origin.startswith("parameters"):
            notes.append(
                "the weights are those of the language model only; other parts (vision, audio) "
                "come on top: give the bytes of all of it for the exact number"
            )
    return Model(config.name, config, parts, total, origin, tuple(notes))


def _weights(config: Config, parts: list[Part] | None, dtype: str | None) -> tuple[int, str]:
    if dtype is None:
        stored = stored_weights(config.folder) if config.folder is not None else None
        if stored is not None:
            return stored
        if config.either("quantization_config"):
            raise SizingError(
                f"{config.name} is quantised (quantization_config), so its weights cannot be "
                "counted: give their bytes (metadata.total_size of model.safetensors.index.json)",
                remedy="weights",
            )
    if parts is None:
        raise SizingError(
            f"{config.name} has model_type {config.text.get('model_type')!r}, whose parameters "
            f"cannot be counted (known: {', '.join(FAMILIES)}): give the bytes of the weights",
            remedy="weights",
        )
    name = _weight_dtype(config, dtype)
    elements = sum(part.elements for part in parts)
    return elements * itemsize_of(name), f"parameters in {name}"


def _weight_dtype(config: Config, dtype: str | None) -> str:
    asked: Any = dtype or config.either("dtype", "torch_dtype") or "bfloat16"
    name = dtype_name(asked)
    if name not in FLOAT_DTYPES:
        raise SizingError(
            f"dtype of the weights must be one of {', '.join(FLOAT_DTYPES)}, got {name!r}: for "
            "quantised weights give their bytes",
            remedy="weights",
        )
    return name
