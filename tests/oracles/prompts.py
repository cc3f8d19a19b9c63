"""Prompts that share many whole pages and then part, for machines and drivers alike."""

from hypothesis import strategies as st

from tests.oracles.drawing import ALPHABET, WORDS, word


def prompts(page_size, max_words=5, min_tokens=0):
    """Some pages out of two frequent and one rare word, and a tail that need not fill a page."""
    words = st.lists(st.sampled_from(WORDS), max_size=max_words)
    tail = st.lists(st.sampled_from(ALPHABET), max_size=page_size)
    return st.builds(
        lambda letters, rest: (
            [token for letter in letters for token in word(letter, page_size)] + rest
        ),
        words,
        tail,
    ).map(lambda tokens: tokens + [1] * max(0, min_tokens - len(tokens)))
