"""Keys that a replay remembers are those that it would hash."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpool.page_keys import PageKeys
from kvpool.replay.keys import ReplayKeys

TOKENS = st.lists(st.integers(0, 1), max_size=14)


@given(
    prompts=st.lists(st.tuples(TOKENS, st.sampled_from([None, "tenant", 3])), max_size=6),
    answer=TOKENS,
    page_size=st.integers(1, 4),
    run_pages=st.integers(1, 5),
)
def test_remembered_keys_are_those_of_pools(prompts, answer, page_size, run_pages):
    quick = ReplayKeys(page_size)
    plain = PageKeys(quick.fingerprint)
    for prompt, extra_key in prompts:
        tokens = np.array(prompt, np.int32)
        assert quick.of_prompt(tokens, extra_key) == plain.of_tokens(tokens, extra_key)
        # Then a tree is told of it with its answer, run by run; and of other prompts like it.
        for other in (prompt + answer, answer, prompt[: len(prompt) // 2] + answer):
            whole = np.array(other[: len(other) // page_size * page_size], np.int32)
            paged, keys = whole.reshape(-1, page_size), plain.of_tokens(whole, extra_key)
            for begin in range(0, len(paged), run_pages):
                above = keys[begin - 1] if begin else plain.root(extra_key)
                run = slice(begin, begin + run_pages)
                assert quick.below(above, paged[run]) == keys[run]
