"""The window of one row: what it writes in a forward pass, and what of that stays.

A decode writes one token, a prefill all that are not cached; with speculation a draft comes on
top. In positions of the row, half-open:

===============  ==========================================  =====================================
part             what                                        after the pass
===============  ==========================================  =====================================
[0, start)       written by earlier passes, or cached        stays
[start, known)   the row's own tokens                        stays
[known, sealed)  the part of the draft that the model        stays; the row's own tokens by now
                 itself would have said
[sealed, end)    the rest of the draft                       taken back, never published
===============  ==========================================  =====================================

The logits of the last token of ``[start, known)`` and of every token of the draft say what comes
next, each as if the draft ended there: a draft of n tokens gives its row 1 to n + 1 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from examples.smollm2.drafting import PromptLookup
from examples.smollm2.generation import Generation
from examples.smollm2.sampling import margin, sample


@dataclass(eq=False)
class Window:
    """What one row writes in one forward pass.

    Attributes
    ----------
    row : Generation
        Whose window it is.
    start : int
        The position of its first token.
    tokens : list of int
        The tokens to write, the draft included.
    draft : list of int
        The last of them, which are guesses.
    accepted_len : int
        How many of the draft turned out right; known after :meth:`take_tokens`.
    """

    row: Generation
    start: int
    tokens: list[int]
    draft: list[int]
    accepted_len: int = 0

    @property
    def end(self) -> int:
        """The position behind the window."""
        return self.start + len(self.tokens)

    @property
    def sealed_len(self) -> int:
        """Tokens of the row that are written and right."""
        return self.end - len(self.draft) + self.accepted_len

    @property
    def num_logits(self) -> int:
        """How many of its last tokens say what comes next."""
        return len(self.draft) + 1

    def take_tokens(
        self,
        logits: np.ndarray,
        eos_token: int,
        context_len: int,
        on_token: Callable[[Generation], None],
    ) -> str:
        """Give the row its tokens: as far as the draft is right, and one more.

        A token is sampled as without a draft, for its own place in the answer, and a draft token
        is right where it is the very same: so a draft changes no answer, at any temperature.

        Parameters
        ----------
        logits : array [num_logits, vocab_size], host
            Of the last tokens of the window.
        eos_token, context_len : int
            The token that ends an answer, and how many tokens the model reads.
        on_token : callable
            Called with the row after every token.

        Returns
        -------
        str
            Why the answer ends here, or "".
        """
        row, reason = self.row, ""
        for i in range(self.num_logits):
            scores = np.ascontiguousarray(logits[i])
            token = sample(scores, row.request.sampling, len(row.answer))
            if token == eos_token:
                reason = "eos"
                break
            row.answer.append(token)
            row.margins.append(margin(scores))
            on_token(row)
            right = i < len(self.draft) and token == self.draft[i]
            self.accepted_len += right
            reason = _reason_to_stop(row, context_len)
            if reason or not right:
                break
        row.num_forwards += 1
        row.drafted_len += len(self.draft)
        row.accepted_len += self.accepted_len
        return reason


def draft_for(row: Generation, num_tokens: int, eos_token: int, context_len: int) -> list[int]:
    """Return a guess of what a row says next, of at most ``num_tokens`` tokens.

    The pass that verifies it gives a token on top, so it ends one token before the answer has to.
    """
    allowed = min(row.request.max_tokens - len(row.answer), context_len - len(row.tokens))
    num_tokens = min(num_tokens, allowed - 1)
    if num_tokens < 1:
        return []
    if row.lookup is None:
        row.lookup = PromptLookup(row.request.prompt)
    lookup, num_prompt = row.lookup, len(row.request.prompt)
    lookup.extend(row.answer[len(lookup) - num_prompt :])
    draft = lookup.draft(num_tokens)
    # Nothing follows the end of an answer, and nobody has to write it to choose it.
    return draft[: draft.index(eos_token)] if eos_token in draft else draft


def _reason_to_stop(row: Generation, context_len: int) -> str:
    if len(row.answer) == row.request.max_tokens:
        return "max_tokens"
    return "context" if len(row.tokens) == context_len else ""
