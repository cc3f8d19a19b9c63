"""Prompt look-up against a scan of the whole sequence."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from examples.smollm2.drafting import PromptLookup


def scanned_draft(tokens, num_tokens, min_match, max_match, max_candidates):
    """What `PromptLookup.draft` promises, found the slow way."""
    last = len(tokens)
    tail = tokens[last - min_match :]
    ends = [
        end
        for end in range(last - 1, min_match - 1, -1)
        if last >= min_match and tokens[end - min_match : end] == tail
    ][:max_candidates]
    if not ends:
        return []

    def match_len(end):
        return next(
            (n for n in range(min(end, max_match)) if tokens[end - 1 - n] != tokens[last - 1 - n]),
            min(end, max_match),
        )

    best = max(ends, key=match_len)  # the first of equals, so the latest
    sequence = list(tokens)
    for i in range(num_tokens):
        sequence.append(sequence[best + i])
    return sequence[last:]


# Few different tokens, so that everything occurs several times.
SEQUENCES = st.lists(st.integers(0, 3), max_size=60)


class TestPromptLookup:
    @given(SEQUENCES, st.integers(0, 9), st.integers(1, 4), st.integers(0, 4), st.integers(1, 6))
    @example([1, 1, 1, 1, 1, 1], 4, 2, 1, 1)
    @example([1, 2], 4, 2, 0, 1)
    def test_draft_equals_a_scan_of_the_sequence(
        self, tokens, num_tokens, min_match, beyond, max_candidates
    ):
        max_match = min_match + beyond
        lookup = PromptLookup(
            tokens, min_match=min_match, max_match=max_match, max_candidates=max_candidates
        )
        assert lookup.draft(num_tokens) == scanned_draft(
            tokens, num_tokens, min_match, max_match, max_candidates
        )

    @given(SEQUENCES, st.integers(0, 60))
    def test_growing_equals_starting_with_all(self, tokens, cut):
        grown = PromptLookup(tokens[:cut])
        grown.draft(3)  # changes nothing
        for token in tokens[cut:]:
            grown.extend([token])
        assert len(grown) == len(tokens)
        assert grown.draft(8) == PromptLookup(tokens).draft(8)

    def test_longest_match_wins_over_a_later_one(self):
        # "5 6" stood before twice; "4 5 6" only the first time.
        lookup = PromptLookup([4, 5, 6, 7, 9, 5, 6, 8, 4, 5, 6])
        assert lookup.draft(1) == [7]

    def test_of_equal_matches_the_latest_wins(self):
        assert PromptLookup([5, 6, 7, 5, 6, 8, 5, 6]).draft(1) == [8]

    def test_last_tokens_do_not_match_themselves(self):
        assert PromptLookup([1, 2, 3, 4, 5, 6]).draft(4) == []

    def test_near_match_goes_on_in_a_circle(self):
        assert PromptLookup([1, 2, 3, 1, 2]).draft(7) == [3, 1, 2, 3, 1, 2, 3]

    def test_nothing_to_look_up_drafts_nothing(self):
        assert PromptLookup().draft(4) == []
        assert PromptLookup([1]).draft(4) == []
        assert PromptLookup([1, 2, 1, 2]).draft(0) == []

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"min_match": 0}, "got 0 and 8"),
            ({"min_match": 3, "max_match": 2}, "got 3 and 2"),
            ({"max_candidates": 0}, "max_candidates >= 1, got 0"),
        ],
    )
    def test_bad_parameters_raise(self, options, message):
        with pytest.raises(ValueError, match=message):
            PromptLookup(**options)
