"""A config.json as sizing reads it: found, parsed, and with the numbers in it checked."""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.numbers import INT32_MAX
from kvpool.sizing.errors import SizingError
from kvpool.sizing.shapes import SHAPES

# What the configs of a family leave out, because it is the default of its class in transformers: a
# nested text_config is written as the difference to that class.
LEFT_OUT: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma3_text": {
        "head_dim": 256,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "vocab_size": 262208,
    },
    "qwen3": {"head_dim": 128},
}
# Under which keys models of several parts keep the config of the language model.
_NESTED = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True)
class Config:
    """One model's config.

    Attributes
    ----------
    name : str
        The built-in name, or the path as it was given.
    whole, text : mapping
        The file's content; the part about the language model, which may be the same.
    folder : Path or None
        Where the file lies, and with it perhaps the weights.
    """

    name: str
    whole: Mapping[str, Any]
    text: Mapping[str, Any]
    folder: Path | None

    @property
    def is_nested(self) -> bool:
        """Whether the language model is one part of a larger one."""
        return any(self.whole.get(key) for key in _NESTED)

    def either(self, *keys: str) -> Any:
        """The first of these keys that is set, in the text part or else in the whole."""
        for part in (self.text, self.whole):
            for key in keys:
                if part.get(key) is not None:
                    return part[key]
        return None


def load_config(source: str | Path) -> Config:
    """Read a config.json, a folder that has one, or a built-in shape by name.

    Raises
    ------
    SizingError
        No such file and no such shape, no JSON, or JSON that is not an object.
    """
    path = Path(source)
    name = str(source)
    if path.is_dir():
        path /= "config.json"
    elif name.lower() in SHAPES and not path.exists():
        shape = SHAPES[name.lower()]
        return Config(name.lower(), shape, shape, None)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SizingError(_not_found(name, path)) from None
    except OSError as error:
        raise SizingError(f"{path} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise SizingError(f"{path} is no config: it is nested too deeply") from None
    except ValueError as error:  # broken JSON, or bytes that are not UTF-8
        raise SizingError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise SizingError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    text = next((content[key] for key in _NESTED if content.get(key)), content)
    if not isinstance(text, dict):
        raise SizingError(
            f"{path}: the config of the language model is a {type(text).__name__}, expected a "
            "JSON object"
        )
    left_out = LEFT_OUT.get(str(text.get("model_type")), {})
    present = {key: value for key, value in text.items() if value is not None}
    return Config(name, content, left_out | present, path.parent)


def whole_number(config: Mapping[str, Any], key: str) -> int:
    """A number that must be there, and an integer that a size can be.

    Raises
    ------
    SizingError
        It is missing, or is something else.
    """
    value = config.get(key)
    if value is None:
        raise SizingError(f"config lacks {key}")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= INT32_MAX:
        raise SizingError(
            f"config has {key} = {reprlib.repr(value)}, expected an integer in 1 .. {INT32_MAX}"
        )
    return value


def _not_found(name: str, path: Path) -> str:
    if path.name == "config.json" and path != Path(name):
        return f"the folder {name} has no config.json"
    close = difflib.get_close_matches(name.lower(), SHAPES, n=2, cutoff=0.7)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"{name} is no file and no built-in shape.{hint} Built in: {', '.join(SHAPES)}"
