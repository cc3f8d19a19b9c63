"""Page arithmetic, and the examples in the docstrings of the small modules."""

import doctest
from itertools import pairwise

import pytest

from kvpool import KVCachePool, dtypes, layout, paging


@pytest.mark.parametrize("module", [paging, dtypes, layout], ids=lambda module: module.__name__)
def test_docstring_examples_hold(module):
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_buckets_agree_with_counting_pages(page_size):
    pages = [len(range(0, length, page_size)) for length in range(100)]
    for length in range(100):
        assert paging.num_pages_for_length(length, page_size) == pages[length]
        assert paging.round_up_to_page(length, page_size) == pages[length] * page_size
    for length, (now, following) in enumerate(pairwise(pages[:90])):
        # 0 left: the next token enters a new page.
        left = paging.steps_until_page_boundary(length, page_size)
        assert (left == 0) == (following > now)
        assert pages[length + left] == (now if length else 0)
    for num_pages in range(5):
        first = paging.first_cache_len_in_next_page_bucket(num_pages, page_size)
        assert pages[first] == num_pages + 1
        assert pages[first - 1] == num_pages


def test_pool_has_them_for_its_own_page_size():
    with KVCachePool(1, 32, 1, 1, page_size=4) as pool:
        assert pool.num_pages_for_length(9) == 3
        assert pool.steps_until_page_boundary(9) == 3
        assert pool.first_cache_len_in_next_page_bucket(2) == 9


@pytest.mark.parametrize(
    "call",
    [
        lambda: paging.num_pages_for_length(-1, 4),
        lambda: paging.num_pages_for_length(1, 0),
        lambda: paging.steps_until_page_boundary(-1, 4),
        lambda: paging.first_cache_len_in_next_page_bucket(-1, 4),
    ],
)
def test_bad_sizes_raise(call):
    with pytest.raises(ValueError, match=r"got (-1|0)"):
        call()
