"""The grid of a picture: which pages a cell stands for, and what is drawn of it."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvpool.inspect.cells import STEPS, cells_of
from kvpool.owners import PageState
from tests.helpers.pictures import random_picture


@given(
    seed=st.integers(0, 2**32 - 1),
    num_pages=st.integers(1, 300),
    columns=st.integers(1, 16),
    max_rows=st.integers(1, 8),
)
def test_cells_count_their_pages_and_name_the_request_that_has_most(
    seed, num_pages, columns, max_rows
):
    owners = random_picture(seed, num_pages).owners
    cells = cells_of(owners, columns, max_rows)
    size = cells.pages_per_cell
    assert cells.num_rows <= max_rows
    assert size in {1, 2, 5, 10, 20, 50, 100, 200, 500}
    assert cells.num_cells == -(-num_pages // size)
    for i in range(cells.num_cells):
        pages = slice(i * size, (i + 1) * size)
        count = Counter(owners.states[pages].tolist())
        assert cells.counts[i].tolist() == [count[state] for state in PageState]
        holders = Counter(each for each in owners.request_ids[pages].tolist() if each)
        most = max(holders.values(), default=0)
        assert cells.request_ids[i] == min((k for k, n in holders.items() if n == most), default=0)


@given(seed=st.integers(0, 2**32 - 1), columns=st.integers(1, 16), max_rows=st.integers(1, 8))
def test_runs_cover_every_page_once_and_are_as_long_as_they_can_be(seed, columns, max_rows):
    owners = random_picture(seed, 200).owners
    cells = cells_of(owners, columns, max_rows)
    page, cell, last = 0, 0, None
    for run in cells.runs():
        assert (run.row, run.column) == divmod(cell, columns)
        assert run.column + run.num_cells <= columns
        assert run.first_page == page
        inside = owners.states[page : run.end_page].tolist()
        assert run.counts == Counter(inside)
        assert run.num_cells == 1 or len(run.counts) == 1
        assert {run.request_id} == set(cells.request_ids[cell : cell + run.num_cells].tolist())
        look = (*run.counts, run.request_id)
        assert run.column == 0 or len(run.counts) > 1 or look != last
        page, cell, last = run.end_page, cell + run.num_cells, look
    assert (cell, page) == (cells.num_cells, 200)


@given(seed=st.integers(0, 2**32 - 1), columns=st.integers(1, 16), max_rows=st.integers(1, 8))
def test_stripes_have_the_areas_of_their_shares(seed, columns, max_rows):
    cells = cells_of(random_picture(seed, 300).owners, columns, max_rows)
    for run in cells.runs():
        stripes = cells.stripes(run)
        drawn = {state: end - start for state, start, end in stripes}
        for state, count in run.counts.items():
            assert abs(drawn.get(state, 0) - count * STEPS / cells.pages_per_cell) <= 1
        assert [start for _, start, _ in stripes] == [0, *(end for _, _, end in stripes[:-1])]
        full = (run.end_page - run.first_page) * STEPS / cells.pages_per_cell
        assert stripes[-1][2] == round(full) <= run.num_cells * STEPS
