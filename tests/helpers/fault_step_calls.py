"""Calls that run kernels or ask something of a device, and are made to fail."""

import numpy as np

from tests.helpers.pools import window

STEP_CALLS = {}


def step_call(function):
    """Enter a call under its name."""
    STEP_CALLS[function.__name__] = function
    return function


def rows(pool, batch, start, end, base):
    return window(pool, start, end, base, batch=batch)


@step_call
def fork_that_copies_a_page(at):
    return at.pool.fork_request(at.child, 20)


@step_call
def put_on_fresh_pages(at):
    at.step.put(0, at.lengths, *rows(at.pool, 2, 20, 23, 400))


@step_call
def put_over_what_is_there(at):
    at.step.put(1, [16, 6], *rows(at.pool, 2, 16, 18, 500))


@step_call
def put_of_another_dtype(at):
    k, v = rows(at.pool, 2, 20, 23, 400)
    at.step.put(0, at.lengths, k.astype(np.float64), v.astype(np.float64))


@step_call
def get(at):
    return at.step.get(0, 9)


@step_call
def get_padded(at):
    return at.step.get(1, 20, padded=True)


@step_call
def window_slot_indices(at):
    return at.step.window_slot_indices(at.lengths, 2)


@step_call
def page_table(at):
    return at.step.page_table([19, 8])


@step_call
def build_page_table(at):
    return at.step.build_page_table([20, 9])


@step_call
def block_table(at):
    return at.table.block_table()


@step_call
def seal_in_place(at):
    return at.step.seal_length([19, 9])


@step_call
def seal_that_drops_pages(at):
    return at.step.seal_length([16, 4])


@step_call
def truncate_in_place(at):
    return at.step.truncate_to([18, 9], [20, 9])


@step_call
def truncate_that_drops_pages(at):
    return at.step.truncate_to([14, 5], [20, 9])


@step_call
def invalidate_range(at):
    return at.step.invalidate_range([15, 6], [20, 8])


@step_call
def decode_prepare(at):
    return at.pool.decode_graph.prepare([length + 1 for length in at.lengths], at.lengths)


@step_call
def verify_prepare(at):
    return at.pool.verify_graph.prepare([length + 3 for length in at.lengths], at.lengths, 3)


@step_call
def warm_up(at):
    at.pool.warm_up()
