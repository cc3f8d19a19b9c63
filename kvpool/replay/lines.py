"""One line of a trace: what it must say, and the request that it describes.

Two formats, told apart by their keys, one JSON object a line:

- *hashed* (Mooncake's): ``input_length``, ``output_length`` and ``hash_ids``, one id for each
  block of prompt tokens (512 in Mooncake's traces; the last block may be partial). Equal ids stand
  for equal blocks.
- *tokens*: ``tokens``, the prompt itself, and ``output_length`` or ``output_tokens``. Where the
  answer is known, say it: the next turn of a conversation then finds it cached.

Both may have an ``extra_key``, the namespace of the request. Other keys are ignored; so is
``timestamp``: a replay has the order of the lines, not their times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.request import ExtraKey
from kvpool_ext.tokens import as_tokens

MAX_REQUEST_TOKENS = 1 << 26  # a limit, so that one wrong length cannot size an array
EXPECTED = (
    '{"timestamp": 0, "input_length": 700, "output_length": 50, "hash_ids": [7, 9]} or '
    '{"tokens": [5, 17, 3], "output_length": 50}'
)


class MalformedLineError(ValueError):
    """A line that describes no request; the message says why, without the line's number."""


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """A prompt known by its blocks.

    Attributes
    ----------
    length : int
        Tokens of the prompt.
    hash_ids : ndarray
        int64 ``[ceil(length / block_size)]``.
    block_size : int
        Tokens of a block.
    """

    length: int
    hash_ids: NDArray[np.int64]
    block_size: int

    def whole_blocks(self) -> Iterator[bytes]:
        """For each whole block, what tells it from others after the same blocks."""
        names = self.hash_ids.tobytes()
        for i in range(self.length // self.block_size):
            yield names[8 * i : 8 * i + 8]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt known by its tokens.

    Attributes
    ----------
    tokens : ndarray
        int32 ``[length]``.
    block_size : int
        Tokens of what `whole_blocks` calls a block.
    """

    tokens: NDArray[np.int32]
    block_size: int

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return int(self.tokens.size)

    def whole_blocks(self) -> Iterator[bytes]:
        """For each whole block, what tells it from others after the same blocks."""
        for end in range(self.block_size, self.length + 1, self.block_size):
            yield self.tokens[end - self.block_size : end].tobytes()


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes
    ----------
    line : int
        Where it stands in the file; the first line is 1.
    prompt : HashedPrompt or TokenPrompt
        At least one token.
    output_len : int
        Tokens of the answer.
    output_tokens : ndarray or None
        int32 ``[output_len]``, where the trace knows them.
    extra_key : str, bytes, int or None
        Namespace.
    """

    line: int
    prompt: HashedPrompt | TokenPrompt
    output_len: int
    output_tokens: NDArray[np.int32] | None
    extra_key: ExtraKey

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return self.prompt.length

    def num_tokens(self, prompts_only: bool) -> int:
        """Tokens that the request writes in all."""
        return self.prompt_len if prompts_only else self.prompt_len + self.output_len


def parse_line(text: bytes, number: int, block_size: int) -> TraceRequest:
    """The request that a line describes.

    Raises
    ------
    MalformedLineError
        It describes none.
    """
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"{error.msg.lower()} at column {error.colno}"
        raise MalformedLineError(f"no JSON: {reason}, found {_start_of(text)}") from None
    except (ValueError, RecursionError) as error:
        raise MalformedLineError(f"no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise MalformedLineError(f"expected a JSON object, found {_start_of(text)}")
    prompt: HashedPrompt | TokenPrompt
    if "hash_ids" in fields:
        prompt = _hashed_prompt(fields, block_size)
    elif "tokens" in fields:
        prompt = TokenPrompt(_token_ids(fields, "tokens"), block_size)
    else:
        found = ", ".join(map(repr, list(fields)[:8])) or "none"
        raise MalformedLineError(f"neither hash_ids nor tokens among its keys: {found[:80]}")
    if prompt.length == 0:
        raise MalformedLineError("the prompt is empty, expected at least one token")
    output_tokens = _token_ids(fields, "output_tokens") if "output_tokens" in fields else None
    if output_tokens is None:
        output_len = _length(fields, "output_length")
    else:
        output_len = output_tokens.size
        if "output_length" in fields and _length(fields, "output_length") != output_len:
            raise MalformedLineError(
                f"output_length is {fields['output_length']}, output_tokens are {output_len}"
            )
    if prompt.length + output_len > MAX_REQUEST_TOKENS:
        raise MalformedLineError(
            f"{prompt.length:,} prompt and {output_len:,} output tokens, expected at most "
            f"{MAX_REQUEST_TOKENS:,} in all"
        )
    extra_key = fields.get("extra_key")
    if isinstance(extra_key, bool) or not isinstance(extra_key, str | int | None):
        kind = type(extra_key).__name__
        raise MalformedLineError(f"extra_key must be a string or an integer, got {kind}")
    return TraceRequest(number, prompt, output_len, output_tokens, extra_key)


def _hashed_prompt(fields: dict[str, Any], block_size: int) -> HashedPrompt:
    length = _length(fields, "input_length")
    ids = fields["hash_ids"]
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise MalformedLineError("hash_ids must be a list of integers")
    needed = -(-length // block_size)
    if len(ids) != needed:
        raise MalformedLineError(
            f"an input_length of {length:,} needs {needed:,} hash ids of {block_size} tokens, got "
            f"{len(ids):,}: is the block size right?"
        )
    return HashedPrompt(length, _as_int64(ids), block_size)


def _as_int64(ids: list[int]) -> NDArray[np.int64]:
    """Hash ids, signed or unsigned, as 64 bits."""
    try:
        return np.array(ids, np.int64)
    except OverflowError:
        pass
    try:
        return np.array(ids, np.uint64).view(np.int64)
    except OverflowError:
        raise MalformedLineError(
            f"hash_ids must fit 64 bits, all signed or all unsigned, got {min(ids)} .. {max(ids)}"
        ) from None


def _token_ids(fields: dict[str, Any], key: str) -> NDArray[np.int32]:
    values = fields[key]
    if not isinstance(values, list):
        raise MalformedLineError(f"{key} must be a list of integers")
    try:
        tokens = as_tokens(values)
    except (TypeError, ValueError) as error:
        raise MalformedLineError(f"{key}: {error}") from None
    if tokens.size and tokens.min() < 0:
        # Negative ids are those of made-up answers.
        raise MalformedLineError(f"{key}: token ids are at least 0, got {tokens.min()}")
    return tokens


def _length(fields: dict[str, Any], key: str) -> int:
    value = fields.get(key)
    if type(value) is not int:
        found = "none" if key not in fields else f"{type(value).__name__} {str(value)[:20]!r}"
        raise MalformedLineError(f"{key} must be an integer, got {found}")
    if not 0 <= value <= MAX_REQUEST_TOKENS:
        raise MalformedLineError(f"{key} must be in 0 .. {MAX_REQUEST_TOKENS:,}, got {value:,}")
    return value


def _start_of(text: bytes) -> str:
    start = text[:24].decode("utf-8", "backslashreplace").strip()
    return repr(start + ("..." if len(text.strip()) > 24 else ""))
