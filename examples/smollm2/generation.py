"""One request of the serving loop: what is asked, and the record of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from examples.smollm2.drafting import PromptLookup
from examples.smollm2.sampling import GREEDY, SamplingParams


@dataclass(frozen=True)
class GenerationRequest:
    """What is asked: a prompt in tokens, and when to stop."""

    name: str
    prompt: Sequence[int]
    max_tokens: int = 48
    sampling: SamplingParams = GREEDY

    def __post_init__(self) -> None:
        if len(self.prompt) == 0:
            raise ValueError(f"request {self.name!r}: expected at least one prompt token")
        if self.max_tokens < 1:
            raise ValueError(
                f"request {self.name!r}: expected max_tokens >= 1, got {self.max_tokens}"
            )


@dataclass(eq=False)
class Generation:
    """One request on its way through the engine, and its record afterwards."""

    request: GenerationRequest
    answer: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)  # best minus second logit, per token
    finish_reason: str = ""  # "eos", "max_tokens", "context", "pool", "refused"; "" while alive
    message: str = ""  # why it was refused or cut short
    matched_len: int = 0  # prompt tokens found in the cache, at the first bind
    prefilled_len: int = 0  # prompt and answer tokens computed by prefill, over all binds
    preemptions: int = 0
    waited_steps: int = 0  # steps that ran without it, before it was bound and when preempted
    num_forwards: int = 0  # forward passes that it had a row in, its prefills included
    drafted_len: int = 0  # tokens guessed and verified
    accepted_len: int = 0  # of these, right
    lookup: PromptLookup | None = None  # what the guesses come from; only while alive
    request_id: int = 0  # the pool's while bound; those count from 1
    bound_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0

    @property
    def tokens(self) -> list[int]:
        """The prompt and the answer so far."""
        return [*self.request.prompt, *self.answer]

    @property
    def num_sampled(self) -> int:
        """Tokens of the answer, and the one that ended it if that was the model's choice."""
        return len(self.answer) + (self.finish_reason == "eos")

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a forward pass gave it; exactly 1 without speculation."""
        return self.num_sampled / self.num_forwards if self.num_forwards else 0.0

    @property
    def time_to_first_token(self) -> float:
        """Seconds from the first bind to the first token."""
        return self.first_token_at - self.bound_at

    @property
    def seconds(self) -> float:
        """Seconds from the first bind to the end."""
        return self.finished_at - self.bound_at

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens a second, after the first."""
        if len(self.answer) < 2:
            return 0.0
        return (len(self.answer) - 1) / (self.finished_at - self.first_token_at)
