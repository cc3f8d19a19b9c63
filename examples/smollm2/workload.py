"""Chat requests from a file, and the schedule on which they arrive.

The file is JSON::

    {
        "system": "...",
        "requests": [
            {"name": "france", "user": "What is the capital of France?", "arrives": 0},
            {"name": "france-2", "user": "And of Italy?", "follows": "france", "max_tokens": 20},
        ],
    }

``arrives`` counts engine steps, not seconds, so that every run of a file batches the same way. A
request that ``follows`` another is the next turn of its conversation: it arrives when the other
has its answer. Optional for each: ``system``, ``max_tokens``, ``temperature``, ``top_p`` and
``seed``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from examples.smollm2.generation import Generation, GenerationRequest
from examples.smollm2.sampling import SamplingParams
from examples.smollm2.serving import Engine
from examples.smollm2.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class ChatRequest:
    """One turn of a conversation, as the request file states it."""

    name: str
    user: str
    system: str | None = None  # None: the model's default; a follow-up turn has its first turn's
    arrives: int = 0
    follows: str | None = None
    max_tokens: int = 40
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("name", self.name), ("user", self.user)):
            if not isinstance(value, str) or not value:
                raise ValueError(f"expected {name!r} to be a text, got {value!r}")
        for name, least in (("arrives", 0), ("max_tokens", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"expected {name!r} to be an integer >= {least}, got {value!r}")
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"expected {name!r} to be a number, got {value!r}")
        if self.system is not None and not isinstance(self.system, str):
            raise ValueError(f"expected 'system' to be a text, got {self.system!r}")
        _ = self.sampling  # its own checks

    @property
    def sampling(self) -> SamplingParams:
        """How this request picks its tokens."""
        return SamplingParams(self.temperature, self.top_p, self.seed)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat of a first turn."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.user}]


def load_requests(path: str | Path, **defaults: Any) -> list[ChatRequest]:
    """Read a request file.

    Parameters
    ----------
    path : path
        The JSON file.
    **defaults
        Values for fields of :class:`ChatRequest` that a request does not state itself.

    Raises
    ------
    ValueError
        If the file is not what the module's text says; the message names the request.
    OSError
        If it cannot be read.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("requests"), list):
        raise ValueError(f"{path}: expected an object with a list 'requests'")
    if "system" in data:
        defaults["system"] = data["system"]
    known = {field.name for field in fields(ChatRequest)}
    requests: list[ChatRequest] = []
    for number, entry in enumerate(data["requests"]):
        where = f"{path}: request {number}"
        if not isinstance(entry, dict) or not {"name", "user"} <= entry.keys() <= known:
            raise ValueError(
                f"{where}: expected 'name', 'user' and any of {sorted(known - {'name', 'user'})}, "
                f"got {sorted(entry) if isinstance(entry, dict) else entry!r}"
            )
        try:
            request = ChatRequest(**{**defaults, **entry})
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        earlier = {other.name for other in requests}
        if request.name in earlier:
            raise ValueError(f"{where}: the name {request.name!r} is taken")
        if request.follows is not None and request.follows not in earlier:
            raise ValueError(
                f"{where}: it follows {request.follows!r}, which is no earlier request"
            )
        requests.append(request)
    if not requests:
        raise ValueError(f"{path}: expected at least one request")
    return requests


def play(
    engine: Engine,
    tokenizer: ChatTokenizer,
    requests: Sequence[ChatRequest],
    *,
    on_step: Callable[[], None] | None = None,
) -> dict[str, Generation]:
    """Serve chat requests on their schedule until all have their answers.

    Parameters
    ----------
    engine : Engine
        An idle engine.
    tokenizer : ChatTokenizer
        For the prompts.
    requests : sequence of ChatRequest
        A turn comes after the one that it follows.
    on_step : callable, optional
        Called after every step.

    Returns
    -------
    dict
        The finished generation of every request, by name, in the order of ``requests``.
    """
    served: dict[str, Generation] = {}
    to_come, clock = list(requests), 0
    while to_come or not engine.idle:
        still_to_come = []
        for request in to_come:
            prompt = _prompt_if_due(tokenizer, request, served, clock)
            if prompt is None:
                still_to_come.append(request)
            else:
                served[request.name] = engine.submit(
                    GenerationRequest(request.name, prompt, request.max_tokens, request.sampling)
                )
        to_come = still_to_come
        if engine.idle and to_come:
            clock = max(clock, min(request.arrives for request in to_come))  # nothing until then
            continue
        engine.step()
        clock += 1
        if on_step is not None:
            on_step()
    return {request.name: served[request.name] for request in requests}


def _prompt_if_due(
    tokenizer: ChatTokenizer, request: ChatRequest, served: dict[str, Generation], clock: int
) -> list[int] | None:
    """Return the prompt of a request that arrives now, or None if it arrives later."""
    if request.arrives > clock:
        return None
    if request.follows is None:
        return tokenizer.encode_chat(request.messages)
    before = served.get(request.follows)
    if before is None or not before.finish_reason:
        return None
    return tokenizer.encode_follow_up(before.request.prompt, before.answer, request.user)
