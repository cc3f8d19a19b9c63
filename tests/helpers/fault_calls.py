"""Calls of a pool that are made to fail: each takes a scene and answers what its caller sees."""

from tests.helpers.fault_scenes import OTHER, PAGE_SIZE, TWIN
from tests.helpers.pools import R

CALLS = {}


def call(function):
    """Enter a call under its name."""
    CALLS[function.__name__] = function
    return function


# ---- binds


@call
def bind_that_splits_and_evicts(at):
    return at.pool.bind_request([*R(1, 4), 77], 5 * PAGE_SIZE)


@call
def bind_of_a_whole_node(at):
    return at.pool.bind_request([*R(1, 12), 77], 16, extra_key="lora")


@call
def bind_of_a_list_in_a_new_namespace(at):
    return at.pool.bind_request(R(1, 9), 12, extra_key="fresh", priority=3)


@call
def bind_with_prefix(at):
    return at.pool.bind_with_prefix([*R(1, 4), 77], 10 * PAGE_SIZE)


@call
def bind_with_prefix_of_many_tokens(at):
    return at.pool.bind_with_prefix([*R(300, 315), *R(800, 900)], 10_000)


@call
def bind_requests(at):
    return at.pool.bind_requests(3, 6 * PAGE_SIZE)


@call
def fork_of_whole_pages(at):
    return at.pool.fork_request(at.first, 5 * PAGE_SIZE)


@call
def fork_in_a_lineage(at):
    return at.pool.fork_request(at.child, 6 * PAGE_SIZE)


# ---- while bound


@call
def extend(at):
    return at.pool.extend_request(at.lone, 8 * PAGE_SIZE)


@call
def shrink(at):
    return at.pool.shrink_request(at.second, 13)


@call
def mark_written(at):
    return at.pool.mark_written(at.second, 20)


@call
def checkpoint(at):
    return at.pool.checkpoint_request(at.lone, R(400, 408))


@call
def checkpoint_of_duplicates(at):
    return at.pool.checkpoint_request(at.second, [*TWIN, 7])


@call
def checkpoint_of_a_lineage(at):
    return at.pool.checkpoint_request(at.other, [*OTHER, *R(220, 225)])


@call
def checkpoint_that_only_raises_a_priority(at):
    return at.pool.checkpoint_request(at.riser, R(1, 4))


# ---- the end


@call
def finish(at):
    return at.pool.finish_request(at.lone, R(400, 408))


@call
def finish_of_duplicates(at):
    return at.pool.finish_request(at.second, [*TWIN, 7])


@call
def finish_of_a_lineage(at):
    return at.pool.finish_request(at.other, [*OTHER, *R(220, 225)])


@call
def finish_of_a_matched_lineage(at):
    return at.pool.finish_request(at.parent, [*R(1, 8), *R(60, 71)])


@call
def finish_of_a_child(at):
    return at.pool.finish_request(at.child, [*R(1, 8), *R(60, 65)])


@call
def finish_without_reuse(at):
    at.pool.prefix_reuse_enabled = False
    try:
        return at.pool.finish_request(at.lone, R(400, 408))
    finally:
        at.pool.prefix_reuse_enabled = True


@call
def unbind(at):
    return at.pool.unbind_request(at.grandchild)


@call
def unbind_all(at):
    return at.pool.unbind_requests()


# ---- raw pages and the cache


@call
def alloc(at):
    return at.pool.alloc(3 * PAGE_SIZE)


@call
def free(at):
    return at.pool.free(at.taken)


@call
def reset_prefix_cache(at):
    return at.pool.reset_prefix_cache()


@call
def would_fit(at):
    return at.pool.would_fit([*R(1, 4), 77], 5 * PAGE_SIZE)


@call
def explain(at):
    return str(at.pool.explain(R(1, 17)))[:80]


@call
def stats(at):
    return at.pool.stats()


@call
def page_owners(at):
    return at.pool.page_owners()


@call
def match_that_splits(at):
    return at.pool.radix.match_prefix(R(1, 4))


@call
def match_of_a_whole_node(at):
    return at.pool.radix.match_prefix(R(1, 12), "lora")


@call
def match_of_nothing(at):
    return at.pool.radix.match_prefix(R(5, 12))


@call
def insert_that_splits(at):
    return at.pool.radix.insert([*R(1, 4), *R(70, 73)], [0, int(at.taken[0]) // PAGE_SIZE])


@call
def insert_in_a_new_namespace(at):
    pages = (at.taken[::PAGE_SIZE] // PAGE_SIZE).tolist()
    return at.pool.radix.insert(R(70, 77), pages, "fresh", 5)


@call
def insert_of_what_is_there(at):
    return at.pool.radix.insert(R(1, 4), [0], priority=4)


@call
def evict(at):
    return at.pool.radix.evict(7 * PAGE_SIZE)


@call
def inc_lock_ref(at):
    return at.pool.radix.inc_lock_ref(at.node)


@call
def dec_lock_ref(at):
    return at.pool.radix.dec_lock_ref(at.node)


@call
def radix_reset(at):
    return at.pool.radix.reset()


@call
def activate_step(at):
    return at.pool.activate_step(at.first, at.child)
