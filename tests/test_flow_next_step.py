"""From one step to the next: ids as an array, and page tables that list the same pages again."""

import numpy as np
import pytest

from tests.helpers.pools import R, case_pool
from tests.test_flow_tables import arrays, expected_table


def test_tables_of_unchanged_pages_share_them_and_differ_in_their_ends(make_pool):
    pool = case_pool(make_pool, 4, 40)
    rows = [pool.bind_request(R(1, 5), 24) for _ in range(2)]
    first = pool.activate_step(*rows).page_table([9, 6])
    second = pool.activate_step(*rows).page_table([12, 5])  # 3 and 2 pages, as before
    assert second is not first
    assert second.indices is first.indices
    assert arrays(first) == expected_table(pool, rows, [9, 6])
    assert arrays(second) == expected_table(pool, rows, [12, 5])
    # In place in one of them: the other keeps its own last_page_len.
    assert pool.step.seal_length([10, 5]) is True
    assert arrays(first) == expected_table(pool, rows, [9, 6])
    assert arrays(second) == expected_table(pool, rows, [10, 5])


@pytest.mark.parametrize("other_rows", ["swapped", "ended", "regrown"])
def test_tables_of_other_pages_are_listed_anew(make_pool, other_rows):
    pool = case_pool(make_pool, 4, 40)
    rows = [pool.bind_request(R(1, 5), 24) for _ in range(2)]
    lengths = [9, 9]
    first = pool.activate_step(*rows).page_table(lengths)
    before = arrays(first)
    if other_rows == "swapped":
        rows.reverse()
    elif other_rows == "ended":  # the next request may well get the same memory for its lease
        pool.unbind_request(rows[1])
        pool.alloc(4)
        rows[1] = pool.bind_request(R(1, 5), 24)
    else:
        pool.shrink_request(rows[1], 4)
        pool.alloc(4)
        pool.extend_request(rows[1], 24)
    second = pool.activate_step(*rows).page_table(lengths)
    assert second.indices is not first.indices
    assert arrays(second) == expected_table(pool, rows, lengths)
    assert arrays(first) == before


def test_activate_step_takes_ids_as_one_array(make_pool):
    pool = case_pool(make_pool, 4, 40)
    rows = [pool.bind_request(R(1, 5), 8) for _ in range(3)]
    for ids in (rows, tuple(rows), np.array(rows, np.int32), np.array(rows, np.int64)):
        assert pool.activate_step(ids).request_ids == rows
    for bad in ([], np.zeros(0, np.int32), [rows[0], rows[0]]):
        with pytest.raises(ValueError, match=r"at least one|each request once"):
            pool.activate_step(bad)
