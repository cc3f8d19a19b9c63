"""Tensor-parallel ranks, two processes: each stores and fetches its own heads.

A page that one rank misses all must miss, or they would compute different positions: the ranks
exchange one integer a request, and have the same page ids throughout.
"""

import multiprocessing

import pytest

from tests.helpers.pools import R
from tests.helpers.ranks import run_rank

PROMPT = R(1, 41)
OTHER = [*R(1, 12), *R(60, 80)]


@pytest.fixture
def play(tmp_path):
    """A function that runs a script on two ranks, and gives what each answered."""
    context = multiprocessing.get_context("spawn")
    processes = []

    def run(script):
        between = context.Pipe()
        parents = [context.Pipe() for _ in between]
        for rank, (peer, parent) in enumerate(zip(between, parents, strict=True)):
            arguments = (rank, tmp_path, peer, parent[1], script)
            processes.append(context.Process(target=run_rank, args=arguments, daemon=True))
            processes[-1].start()
        answers = []
        for mine, _ in parents:
            assert mine.poll(120), "a rank does not answer"
            answers.append(mine.recv())
            assert not isinstance(answers[-1], str), answers[-1]
        return answers

    yield run
    for process in processes:
        process.join(20)
        if process.is_alive():
            process.kill()
            process.join()


def test_ranks_share_nothing_but_the_number_and_have_the_same_pages(play):
    first, second = play(
        [
            ("serve", None, PROMPT),
            ("serve", None, OTHER),
            ("start_anew", None),
            ("lose", 1, PROMPT, 6),  # of rank 1, the seventh page and all after it
            ("serve", None, OTHER[:20]),
            ("serve", None, PROMPT),
            ("serve", None, OTHER),
        ]
    )
    *served, stats = first
    *also_served, other_stats = second
    assert served == also_served, "the same page ids, matches and local parts"
    lengths = [(matched, local) for _, matched, local in served]
    # Cold; three pages in common with the first; then both start empty. Rank 1 has six pages of
    # the prompt and rank 0 all ten: both match six. What was written anew both have again.
    assert lengths == [(0, 0), (12, 12), (16, 0), (24, 12), (32, 20)]
    # Rank 0 fetched what rank 1 could not, and gave it back.
    assert stats["fetched_pages"] == 4 + 7 + 3
    assert other_stats["fetched_pages"] == 4 + 3 + 3
    assert stats["prefetch_returned_pages"] == other_stats["prefetch_returned_pages"] == 4
