"""Draft tokens without a draft model, by looking up what followed the last tokens before.

Answers quote: the question, the system prompt, an earlier turn, themselves. Where the last few
tokens of a sequence stood in it before, what came next then is a good guess of what comes next
now, and a guess costs nothing but its place in the window that verifies it. The idea is that of
the project prompt-lookup-decoding (2023), which scans the prompt for the longest n-gram anew for
every draft; here an index grows with the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable


class PromptLookup:
    """One sequence, and where each short run of its tokens ends in it.

    Ends of equal runs are chained, the latest first, as in a compressor that looks for matches:
    adding a token is O(1), a draft walks one chain and scans nothing.

    Parameters
    ----------
    tokens : iterable of int
        The first tokens.
    min_match : int
        The last tokens that must have stood before, at least: a draft from a shorter match is
        mostly wrong.
    max_match : int
        A match of so many tokens is good enough; no longer one is looked for.
    max_candidates : int
        Earlier ends to look at, the latest first; bounds what a draft costs in a text that says
        the same thing over and over.
    """

    def __init__(
        self,
        tokens: Iterable[int] = (),
        *,
        min_match: int = 2,
        max_match: int = 8,
        max_candidates: int = 16,
    ) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(
                f"expected 1 <= min_match <= max_match, got {min_match} and {max_match}"
            )
        if max_candidates < 1:
            raise ValueError(f"expected max_candidates >= 1, got {max_candidates}")
        self._min_match = min_match
        self._max_match = max_match
        self._max_candidates = max_candidates
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # run of min_match tokens -> its last end
        self._earlier: list[int] = [0]  # end -> end of the same run before; 0: there is none
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the sequence."""
        known, latest, earlier, width = self._tokens, self._latest, self._earlier, self._min_match
        for token in tokens:
            known.append(token)
            end = len(known)
            if end < width:
                earlier.append(0)
                continue
            run = tuple(known[end - width :])
            earlier.append(latest.get(run, 0))
            latest[run] = end

    def draft(self, num_tokens: int) -> list[int]:
        """Return what may come next: ``num_tokens`` tokens, or none if nothing matches.

        They are what followed the longest match of the sequence's last tokens, the latest of
        equally long ones. A match so near that its continuation reaches the end goes on in a
        circle, as the sequence does that it was found in.
        """
        end = self._longest_match()
        if end == 0 or num_tokens < 1:
            return []
        known, period = self._tokens, len(self._tokens) - end
        drafted = known[end : end + num_tokens]
        while len(drafted) < num_tokens:
            drafted.append(drafted[len(drafted) - period])
        return drafted

    def _longest_match(self) -> int:
        """Return the end of the best earlier occurrence of the last tokens; 0 if there is none."""
        known, last = self._tokens, len(self._tokens)
        best_end = best_len = 0
        end = self._earlier[last]
        for _ in range(self._max_candidates):
            if end == 0 or best_len == self._max_match:
                break
            match_len, longest = self._min_match, min(self._max_match, end)
            while (
                match_len < longest and known[end - 1 - match_len] == known[last - 1 - match_len]
            ):
                match_len += 1
            if match_len > best_len:
                best_end, best_len = end, match_len
            end = self._earlier[end]
        return best_end
