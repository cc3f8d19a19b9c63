"""Calls that have to do with tiers and are made to fail; each takes a scene with tiers."""

from tests.helpers.fault_scenes import PAGE_SIZE
from tests.helpers.fault_tiers import ALONE, NEW
from tests.helpers.pools import R

TIER_CALLS = {}
# Calls that take what has arrived, or the pages of a prefetch, before they do what they are for.
TAKING = set()


def call(function):
    """Enter a call under its name."""
    TIER_CALLS[function.__name__] = function
    return function


def taking(function):
    """Enter a call that ends prefetches, or publishes what has arrived."""
    TAKING.add(function.__name__)
    return call(function)


@call
def prefetch(at):
    return at.pool.prefetch(NEW)


@call
def prefetch_of_what_is_there(at):
    return at.pool.prefetch(R(1, 12), "lora")


@call
def prefetch_that_waits_for_a_word(at):
    return at.pool.prefetch(NEW, "fresh", publish=False)


@call
def publish(at):
    return at.held.publish()


@call
def publish_some(at):
    return at.held.publish(5)


@call
def cancel(at):
    return at.held.cancel()


@call
def wait(at):
    return at.held.wait(1)


@call
def poll_for_nothing(at):
    return at.pool.poll_tiers()


@taking
def bind_that_takes_the_pages_of_a_prefetch(at):
    return at.pool.bind_request(R(900, 940), at.much)


@taking
def alloc_that_takes_the_pages_of_a_prefetch(at):
    return at.pool.alloc(at.much)


@call
def close_tiers(at):
    return at.tiers.close()


@call
def resume(at):
    return at.tiers.resume()


@taking
def bind_of_what_has_arrived(at):
    return at.pool.bind_request([*ALONE, 5], 20)


@taking
def bind_of_something_else(at):
    return at.pool.bind_request([*R(1, 4), 77], 5 * PAGE_SIZE)


@taking
def bind_alone_of_what_has_arrived(at):
    return at.pool.bind_with_prefix([*ALONE, 5], 20)


@taking
def prefetch_after_an_arrival(at):
    return at.pool.prefetch(NEW)


@taking
def poll(at):
    return at.pool.poll_tiers()
