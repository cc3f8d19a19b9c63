"""From logits to the next token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SamplingParams:
    """How one request picks its tokens.

    Attributes
    ----------
    temperature : float
        0 picks the most likely token (greedy).
    top_p : float
        Sample among the most likely tokens that together reach this probability.
    seed : int
        The n-th token of a request depends on the logits, the seed and n only: neither the batch
        it ran in nor a preemption changes an answer.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"expected a temperature >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"expected 0 < top_p <= 1, got {self.top_p}")
        if self.seed < 0:
            raise ValueError(f"expected a seed >= 0, got {self.seed}")


GREEDY = SamplingParams()


def sample(logits: np.ndarray, params: SamplingParams, index: int) -> int:
    """Pick a token.

    Parameters
    ----------
    logits : array [vocab_size], host
        The scores of the next token.
    params : SamplingParams
        How to pick.
    index : int
        Which token of the answer this is, from 0.
    """
    if params.temperature == 0:
        return int(np.argmax(logits))
    scores = logits.astype(np.float64) / params.temperature
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    reached = np.cumsum(probabilities[order])
    # The token that crosses top_p is still in, so that there is always one to pick.
    kept = int(np.searchsorted(reached, params.top_p)) + 1
    reached = reached[:kept]
    draw = np.random.default_rng((params.seed, index)).random() * reached[-1]
    return int(order[min(int(np.searchsorted(reached, draw, side="right")), len(reached) - 1)])


def margin(logits: np.ndarray) -> float:
    """Return by how much the best of ``logits`` ([vocab_size], host) beats the second best."""
    second, best = np.partition(logits, -2)[-2:]
    return float(best - second)
