"""Page arithmetic: pure functions of lengths and the page size."""

from __future__ import annotations

from kvpool.numbers import whole_number


def num_pages_for_length(length: int, page_size: int) -> int:
    """Pages spanned by `length` tokens: the bucket key of a captured graph.

    >>> num_pages_for_length(16, 16), num_pages_for_length(17, 16), num_pages_for_length(0, 16)
    (1, 2, 0)
    """
    length, page_size = _checked(length, "length", page_size)
    return -(-length // page_size)


def round_up_to_page(length: int, page_size: int) -> int:
    """`length` rounded up to whole pages, in tokens.

    >>> round_up_to_page(17, 16)
    32
    """
    length, page_size = _checked(length, "length", page_size)
    return -(-length // page_size) * page_size


def steps_until_page_boundary(cache_len: int, page_size: int) -> int:
    """Decode steps that still fit in the last page: 0 when the next step enters a new one.

    Parameters
    ----------
    cache_len : int
        Cached tokens, the current step's included.
    page_size : int
        Tokens per page.

    Examples
    --------
    >>> steps_until_page_boundary(15, 16), steps_until_page_boundary(16, 16)
    (1, 0)
    """
    cache_len, page_size = _checked(cache_len, "cache_len", page_size)
    return -cache_len % page_size


def first_cache_len_in_next_page_bucket(num_pages: int, page_size: int) -> int:
    """Smallest cache length that spans ``num_pages + 1`` pages.

    >>> first_cache_len_in_next_page_bucket(2, 16)
    33
    """
    num_pages, page_size = _checked(num_pages, "num_pages", page_size)
    return num_pages * page_size + 1


def _checked(value: int, name: str, page_size: int) -> tuple[int, int]:
    return whole_number(value, name), whole_number(page_size, "page_size", 1)
