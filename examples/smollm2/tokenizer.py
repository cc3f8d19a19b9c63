"""The tokenizer and the chat format, rebuilt from the metadata of the GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

DEFAULT_SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

# What `tokenizer.ggml.token_type` calls a token that stands for itself and is never merged.
CONTROL_TOKEN = 3

# How text is cut before merging, by the metadata's `tokenizer.ggml.pre`. "smollm": every digit
# on its own, then GPT-2's regular expression, which is what ByteLevel does by default.
PRE_TOKENIZERS: dict[str, list[Any]] = {
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
}

Message = Mapping[str, str]  # "role" and "content"


def with_system(messages: Sequence[Message]) -> list[Message]:
    """Return the messages, with the default system message in front if they bring none."""
    if messages and messages[0]["role"] != "system":
        return [{"role": "system", "content": DEFAULT_SYSTEM_PROMPT}, *messages]
    return list(messages)


def render_chat(messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
    """Return the text that the model's own chat template makes of the messages."""
    turns = [
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
        for message in with_system(messages)
    ]
    return "".join(turns) + ("<|im_start|>assistant\n" if add_generation_prompt else "")


class ChatTokenizer:
    """Byte-level BPE with the chat markers of SmolLM2.

    Parameters
    ----------
    values : mapping
        The GGUF metadata (see :func:`examples.smollm2.weights.metadata`).
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        model, pre = values["tokenizer.ggml.model"], values.get("tokenizer.ggml.pre")
        if model != "gpt2" or pre not in PRE_TOKENIZERS:
            raise ValueError(
                f"expected a 'gpt2' tokenizer with one of the splits {sorted(PRE_TOKENIZERS)}, "
                f"got {model!r} with {pre!r}"
            )
        names = values["tokenizer.ggml.tokens"]
        vocab = {name: token for token, name in enumerate(names)}
        merges = [tuple(merge.split(" ", 1)) for merge in values["tokenizer.ggml.merges"]]
        self._tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre])
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens(
            [
                AddedToken(name, special=True, normalized=False)
                for name, kind in zip(names, values["tokenizer.ggml.token_type"], strict=True)
                if kind == CONTROL_TOKEN
            ]
        )
        # Text between the markers is only text: a user who types "<|im_end|>" closes no turn.
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = len(names)
        self.turn_start = vocab["<|im_start|>"]
        self.turn_end = vocab["<|im_end|>"]
        self.eos_token: int = values["tokenizer.ggml.eos_token_id"]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of plain text; chat markers in it are not special."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens; chat markers are left out."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of :func:`render_chat`, up to where the assistant is to speak."""
        tokens = [
            token for message in with_system(messages) for token in self._encode_turn(message)
        ]
        return [*tokens, self.turn_start, *self.encode("assistant\n")]

    def encode_follow_up(
        self, prompt: Sequence[int], answer: Sequence[int], user: str
    ) -> list[int]:
        """Return the prompt of the next turn: everything so far, token for token, and a question.

        Encoding the decoded answer again could cut it differently, and then the prefix of the
        next turn would not be the one whose K/V is cached.
        """
        closed = [*prompt, *answer]
        if closed[-1] != self.turn_end:
            closed.append(self.turn_end)
        question = self._encode_turn({"role": "user", "content": user})
        return [
            *closed,
            *self.encode("\n"),
            *question,
            self.turn_start,
            *self.encode("assistant\n"),
        ]

    def _encode_turn(self, message: Message) -> list[int]:
        body = self.encode(f"{message['role']}\n{message['content']}")
        return [self.turn_start, *body, self.turn_end, *self.encode("\n")]
