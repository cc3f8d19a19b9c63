"""All public calls of a pool and of what it hands out, to be tried from another thread."""

import os
import threading

import numpy as np

from tests.helpers.pools import R, cache_prompt, case_pool, write


class TokensThatCall:
    """A prompt that runs code of the caller while a call reads it."""

    def __init__(self, tokens, call):
        self.tokens, self.call = tokens, call

    def __array__(self, dtype=None, copy=None):
        self.call()
        return np.asarray(self.tokens, np.int32)


class Watcher:
    """Calls `call` whenever it is told of a bind."""

    def __init__(self, call=lambda: None):
        self.call = call

    def on_bind(self, request):
        """Run the caller's code inside of a call."""
        self.call()

    def on_publish(self, request):
        """Not of interest."""


def in_thread(call):
    """What `call` gives or raises in another thread."""
    found = []

    def run():
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return found[0]


def during_a_call(pool, call):
    """What `call` gives in another thread while this one is inside of `bind_request`."""
    found = []
    prompt = TokensThatCall([7, 8], lambda: found.append(in_thread(call)))
    pool.unbind_request(pool.bind_request(prompt, 4))
    return found[0]


def guarded_calls(make_pool):
    """A pool with something of everything; name -> every call that a second thread may not."""
    pool = case_pool(make_pool, 4, 32)
    cache_prompt(pool, R(1, 8))
    a = pool.bind_request(R(1, 9), 16)
    step = write(pool, a, 8, 9)
    taken = pool.alloc(4)
    page = np.array([int(taken[0]) // 4], np.int32)
    radix, decode, verify = pool.radix, pool.decode_graph, pool.verify_graph
    node = radix.match_prefix(R(1, 8)).node
    radix.inc_lock_ref(node)
    stop_watching = pool.watch(Watcher())
    decode.prepare(9, 8)
    table = verify.prepare(9, 8, 1)
    k = np.zeros((1, 1, 2, 8), np.float32)

    def enter(block):
        with block:
            pass

    calls = {
        "pool.bind_request": lambda: pool.bind_request(R(1, 5), 8),
        "pool.bind_with_prefix": lambda: pool.bind_with_prefix(R(1, 5), 8),
        "pool.bind_requests": lambda: pool.bind_requests(1, 8),
        "pool.would_fit": lambda: pool.would_fit(R(1, 5), 8),
        "pool.fork_request": lambda: pool.fork_request(a, 16),
        "pool.finish_request": lambda: pool.finish_request(a, R(1, 9)),
        "pool.finish_active": lambda: pool.finish_active(R(1, 9)),
        "pool.unbind_request": lambda: pool.unbind_request(a),
        "pool.unbind_requests": pool.unbind_requests,
        "pool.extend_request": lambda: pool.extend_request(a, 20),
        "pool.shrink_request": lambda: pool.shrink_request(a, 9),
        "pool.mark_written": lambda: pool.mark_written(a, 9),
        "pool.checkpoint_request": lambda: pool.checkpoint_request(a, R(1, 9)),
        "pool.valid_len": lambda: pool.valid_len(a),
        "pool.request": lambda: pool.request(a),
        "pool.request_capacity": lambda: pool.request_capacity,
        "pool.activate_step": lambda: pool.activate_step(a),
        "pool.step": lambda: pool.step,
        "pool.alloc": lambda: pool.alloc(1),
        "pool.free": lambda: pool.free(taken),
        "pool.prefix_reuse_enabled": lambda: setattr(pool, "prefix_reuse_enabled", False),
        "pool.reset_prefix_cache": pool.reset_prefix_cache,
        "pool.page_owner": lambda: pool.page_owner(0),
        "pool.page_owners": pool.page_owners,
        "pool.watch": lambda: pool.watch(Watcher()),
        "the stop of pool.watch": stop_watching,
        "pool.explain": lambda: pool.explain(R(1, 5)),
        "pool.attach_tiers": lambda: pool.attach_tiers([], model="m"),
        "pool.prefetch": lambda: pool.prefetch(R(1, 5)),
        "pool.poll_tiers": pool.poll_tiers,
        "pool.check": pool.check,
        "pool.close": pool.close,
        "pool.warm_up": pool.warm_up,
        "pool.publish_events": lambda: pool.publish_events("tcp://127.0.0.1:0"),
        "pool.save": lambda: pool.save(os.devnull),
        "pool.decode_graph": lambda: pool.decode_graph,
        "pool.verify_graph": lambda: pool.verify_graph,
        "radix.match_prefix": lambda: radix.match_prefix(R(1, 5)),
        "radix.insert": lambda: radix.insert(R(50, 53), page),
        "radix.evict": lambda: radix.evict(4),
        "radix.inc_lock_ref": lambda: radix.inc_lock_ref(node),
        "radix.dec_lock_ref": lambda: radix.dec_lock_ref(node),
        "radix.reset": radix.reset,
        "radix.nodes": lambda: list(radix.nodes()),
        "radix.survey": radix.survey,
        "radix.format_tree": radix.format_tree,
        "radix.check": radix.check,
        "step.put": lambda: step.put(0, 8, k, k),
        "step.get": lambda: step.get(0, 9),
        "step.capacities": lambda: step.capacities,
        "step.capacity": lambda: step.capacity,
        "step.require": lambda: step.require(9),
        "step.slot_indices": lambda: step.slot_indices(9),
        "step.window_slot_indices": lambda: step.window_slot_indices(8, 1),
        "step.page_table": lambda: step.page_table(9),
        "step.build_page_table": lambda: step.build_page_table(9),
        "step.current_page_table": lambda: step.current_page_table,
        "step.clear_page_table": step.clear_page_table,
        "step.seal_length": lambda: step.seal_length(9),
        "step.invalidate_range": lambda: step.invalidate_range(8, 9),
        "step.truncate_to": lambda: step.truncate_to(8, 9),
        "step.verify_window": lambda: enter(step.verify_window()),
        "step.fill_graph": lambda: step.fill_graph(decode, 9, 8, 1),
        "step.prefetch_graph": lambda: step.prefetch_graph(decode, 9, 8, 1),
        "step.install_graph": lambda: step.install_graph(verify, table, 9),
        "decode_graph.prepare": lambda: decode.prepare(9, 8),
        "decode_graph.page_table": lambda: decode.page_table(1),
        "decode_graph.write_slots": lambda: decode.write_slots(1),
        "decode_graph.prefetch": lambda: enter(decode.prefetch(9, 8, 1)),
        "decode_graph.install": lambda: decode.install(decode.page_table(1), 9),
        "decode_graph.batch_buckets": lambda: setattr(decode, "batch_buckets", (1,)),
        "with decode_graph": lambda: enter(decode),
        "verify_graph.prepare": lambda: verify.prepare(9, 8, 1),
        "verify_graph.page_table": verify.page_table,
        "verify_graph.write_slots": verify.write_slots,
        "verify_graph.take_reallocated": verify.take_reallocated,
        "verify_graph.qo_indptr": lambda: verify.qo_indptr(1, 1),
    }
    return pool, calls


# What another thread may read while a call runs: values that never change, one gauge at a time,
# and `stats`, which waits for the end of the call.
OPEN = {
    part: names.split()
    for part, names in {
        "pool": """
            allocate array_namespace bound_request_count closed compute_dtype
            compute_static_kv_budget device dtype eviction first_cache_len_in_next_page_bucket
            flashinfer_workspace for_mtp for_mtp_history for_testing fp8_format free_pages
            free_slots head_dim is_bound k_scale key_cache key_layer kv_is_compute_dtype
            layer_scales layer_with_scratch layout load load_report matched_prefix_len
            num_kv_heads num_layers num_pages num_pages_for_length num_slots page_size
            poison prefix_insert_tokens prefix_match_tokens prefix_prompt_tokens radix read_guard
            stats StaticKVBudget tiers
            steps_until_page_boundary v_scale value_cache value_layer zero_rejected_kv
        """,
        "radix": """
            evictable_size protected_size total_size num_nodes namespaces memory page_size
            eviction evicted_pages history gate journal epoch
        """,
        "step": "request_ids batch_size is_alive in_verify_window",
        "decode_graph": "name enabled bucket buffers holds buffers_for",
        "verify_graph": "name enabled bucket buffers holds buffers_for batch_buckets",
    }.items()
}
