"""What a step sends to a page map on a device, against a map in an array.

Leases come from a real ledger. Sending is applying the packed runs; now and then it fails.
"""

import numpy as np
import pytest

from kvpool_ext.ledger import PageLedger
from kvpool_ext.page_map import PageMapRows
from kvpool_ext.tables import StepRows

PAGE_SIZE = 3


class Bench:
    """Leases with rows and tags, and a page map that is filled by what is sent."""

    def __init__(self, num_pages=400, shape=(8, 40)):
        self.ledger = PageLedger(num_pages, PAGE_SIZE)
        self.known = PageMapRows()
        self.known.resize(*shape)
        self.map = np.full(shape, -7, np.int32)

    def bind(self, num_pages):
        return self.ledger.bind_blank(num_pages, None, False)

    def unbind(self, lease):
        self.ledger.release(lease)

    def step(self, *leases):
        return StepRows(leases, self.ledger.lengths, PAGE_SIZE)

    def pack(self, step, lengths=None, starts=None, window_len=1, max_indices=10**6):
        """What `pack` writes and the number of runs."""
        out = np.full(self.known.num_ints(step), -99, np.int32)
        if lengths is None:
            lengths = np.zeros(step.batch_size, np.int64)
        return out, self.known.pack(step, lengths, starts, window_len, max_indices, out)

    def apply(self, step, out, num_runs):
        """Runs into the map, as the kernel does; returns them as (row, first page, count)."""
        start = 1 + 3 * step.batch_size
        runs = out[start : start + 4 * num_runs].reshape(-1, 4).tolist()
        for row, first, count, at in runs:
            assert count > 0
            self.map[row, first : first + count] = out[at : at + count]
        return [tuple(run[:3]) for run in runs]

    def send(self, *leases):
        """Send what a step of these needs, note it, and compare; returns the runs."""
        step = self.step(*leases)
        out, num_runs = self.pack(step)
        runs = self.apply(step, out, num_runs)
        self.known.accept(step)
        self.compare(*leases)
        return runs

    def compare(self, *leases):
        for lease in leases:
            assert self.map[lease.row, : lease.num_pages].tolist() == lease.pages().tolist()


def test_pages_are_sent_once_then_the_tail_that_grew():
    bench = Bench()
    a, b = bench.bind(5), bench.bind(2)
    assert bench.send(a, b) == [(0, 0, 5), (1, 0, 2)]
    assert bench.send(b, a) == []
    assert bench.known.num_ints(bench.step(a, b)) == 1 + 3 * 2
    bench.ledger.extend(b, 6)
    assert bench.send(a) == []
    assert bench.send(b, a) == [(1, 2, 4)]
    assert bench.send(a, b) == []


def test_shrunk_and_grown_again_is_sent_as_a_whole():
    bench = Bench()
    a = bench.bind(5)
    bench.send(a)
    before = a.pages().tolist()
    bench.ledger.shrink(a, 2)
    other = bench.bind(3)  # takes what was given back
    bench.ledger.extend(a, 5)
    assert a.pages().tolist() != before
    assert bench.send(a) == [(0, 0, 5)]
    assert bench.send(other, a) == [(1, 0, 3)]


def test_row_of_another_request_is_sent_again():
    bench = Bench()
    a = bench.bind(4)
    bench.send(a)
    bench.unbind(a)
    b = bench.bind(4)
    assert b.row == 0
    assert bench.send(b) == [(0, 0, 4)]


def test_what_was_not_accepted_is_sent_again():
    bench = Bench()
    a, b = bench.bind(4), bench.bind(1)
    bench.send(a)
    bench.ledger.extend(a, 6)
    step = bench.step(a, b)
    for _ in range(2):
        out, num_runs = bench.pack(step)
        assert bench.apply(step, out, num_runs) == [(0, 4, 2), (1, 0, 1)]
    bench.known.accept(step)
    assert bench.pack(step)[1] == 0


def test_map_must_fit_and_a_resized_one_is_empty():
    bench = Bench(shape=(1, 4))
    a = bench.bind(4)
    assert bench.send(a) == [(0, 0, 4)]
    b = bench.bind(1)
    assert bench.known.num_ints(bench.step(a, b)) == -1
    assert bench.known.shape_for(bench.step(a, b)) == (2, 4)
    bench.ledger.extend(a, 5)
    assert bench.known.num_ints(bench.step(a)) == -1
    assert bench.known.shape_for(bench.step(a)) == (1, 5)
    bench.known.resize(2, 5)
    bench.map = np.full((2, 5), -7, np.int32)
    assert (bench.known.num_rows, bench.known.max_pages) == (2, 5)
    assert bench.send(b, a) == [(1, 0, 1), (0, 0, 5)]


def test_new_map_fits_nothing():
    bench = Bench()
    assert PageMapRows().num_ints(bench.step(bench.bind(1))) == -1


def test_arrays_of_a_step_come_first():
    bench = Bench()
    a, b, c = bench.bind(2), bench.bind(3), bench.bind(1)
    step = bench.step(c, a, b)
    lengths, starts = np.array([3, 0, 9]), np.array([2, -5, 8])
    out, num_runs = bench.pack(step, lengths, starts)
    assert num_runs == 3
    assert out[:10].tolist() == [3, 2, 0, 1, 3, 0, 9, 2, -1, 8]
    assert bench.pack(step, lengths, None)[0][7:10].tolist() == [-1, -1, -1]


@pytest.mark.parametrize(
    ("lengths", "starts", "window_len", "named"),
    [
        ([7, 1], [0, 0], 1, r"request 1 has 6 slots, got length 7 and writes at \[0, 1\)"),
        ([6, 4], None, 1, r"request 2 has 3 slots, got length 4 and writes at \[-1, 0\)"),
        ([6, -1], None, 1, r"request 2 has 3 slots, got length -1"),
        ([6, 3], [3, 0], 4, r"request 1 has 6 slots, got length 6 and writes at \[3, 7\)"),
        ([6, 3], [2, 2**40], 4, r"request 2 has 3 slots"),
    ],
)
def test_positions_past_the_pages_are_refused(lengths, starts, window_len, named):
    # The device would read and write anywhere.
    bench = Bench()
    step = bench.step(bench.bind(2), bench.bind(1))
    starts = None if starts is None else np.array(starts)
    with pytest.raises(ValueError, match=named):
        bench.pack(step, np.array(lengths), starts, window_len)


def test_more_pages_than_the_table_has_room_for_are_refused():
    bench = Bench()
    step = bench.step(bench.bind(2), bench.bind(2))
    bench.pack(step, np.array([4, 1]), max_indices=3)
    with pytest.raises(ValueError, match="room for 3 pages, the rows have 4"):
        bench.pack(step, np.array([4, 4]), max_indices=3)


def test_out_of_another_size_is_refused():
    bench = Bench()
    step, lengths = bench.step(bench.bind(2), bench.bind(1)), np.zeros(2, np.int64)
    num_ints = bench.known.num_ints(step)
    assert num_ints == 1 + 3 * 2 + 2 * 4 + 3
    for size, named in ((num_ints - 1, "too few"), (num_ints + 2, "2 too many"), (3, "least")):
        with pytest.raises(ValueError, match=named):
            bench.known.pack(step, lengths, None, 1, 9, np.zeros(size, np.int32))


@pytest.mark.parametrize(
    ("name", "wrong", "kind"),
    [
        ("lengths", [0, 0], TypeError),
        ("lengths", np.zeros(2, np.int32), ValueError),
        ("lengths", np.zeros(3, np.int64), ValueError),
        ("starts", np.zeros(4, np.int64)[::2], ValueError),
        ("starts", np.zeros((2, 1), np.int64), ValueError),
        ("out", [0] * 18, TypeError),
        ("out", np.zeros(18, np.int64), ValueError),
    ],
)
def test_arrays_of_another_kind_are_refused(name, wrong, kind):
    bench = Bench()
    step = bench.step(bench.bind(2), bench.bind(1))
    arrays = {
        "lengths": np.zeros(2, np.int64),
        "starts": np.zeros(2, np.int64),
        "out": np.zeros(18, np.int32),
    }
    arrays[name] = wrong
    with pytest.raises(kind, match=f"{name} must be"):
        bench.known.pack(step, arrays["lengths"], arrays["starts"], 1, 9, arrays["out"])


@pytest.mark.parametrize("seed", range(8))
def test_random_lives_leave_the_map_right(seed):
    """Bind, unbind, extend, shrink, steps that fail half-way, larger maps: the map stays right."""
    rng, bench, leases = np.random.default_rng(seed), Bench(shape=(2, 4)), []
    sent_nothing = 0
    for _ in range(400):
        verb = rng.choice(["bind", "unbind", "extend", "shrink", "step", "step", "step"])
        if verb == "bind" and len(leases) < 12:
            leases.append(bench.bind(int(rng.integers(1, 20))))
        if not leases:
            continue
        lease = leases[rng.integers(len(leases))]
        if verb == "unbind":
            leases.remove(lease)
            bench.unbind(lease)
        elif verb == "extend":
            bench.ledger.extend(lease, lease.num_pages + int(rng.integers(1, 6)))
        elif verb == "shrink":
            bench.ledger.shrink(lease, int(rng.integers(1, lease.num_pages + 1)))
        elif verb == "step":
            chosen = rng.permutation(len(leases))[: rng.integers(1, len(leases) + 1)]
            step = bench.step(*(leases[i] for i in chosen))
            if bench.known.num_ints(step) < 0:
                shape = np.maximum(bench.map.shape, bench.known.shape_for(step)).tolist()
                bench.known.resize(*shape)
                bench.map = np.full(shape, -7, np.int32)
            out, num_runs = bench.pack(step)
            if rng.random() < 0.3:  # the upload fails, or the first launch, or the second
                bench.apply(step, out, int(rng.integers(num_runs + 1)))
                continue
            bench.apply(step, out, num_runs)
            bench.known.accept(step)
            bench.compare(*(leases[i] for i in chosen))
            sent_nothing += num_runs == 0
    assert sent_nothing > 10
