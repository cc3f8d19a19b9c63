"""Tests that poison mode would rightly stop, by file: they run without it.

All others pass in either mode: ``KVPOOL_POISON=1 pytest tests``.
"""

ALL = {"*"}

FILLS_FREE_PAGES = {
    "test_abuse": {"test_put_that_failed_to_zero_a_page_zeroes_it_when_tried_again"},
    "test_attention_door": {"test_bad_arguments_name_both_sides"},
    "test_cases_data": {
        "test_a17_padded_reads_are_finite",
        "test_a17_uninitialised_rest_of_a_page_is_finite",
    },
    # Random bytes in the whole pool, for backends to agree on.
    "test_flashinfer": ALL,
    "test_flashinfer_choice": ALL,
    "test_flashinfer_graphs": ALL,
    "test_flashinfer_plans": ALL,
    "test_flow_corners": {"test_put_far_ahead_then_behind_keeps_both"},
    "test_flow_written": {
        "test_bind_and_page_tables_touch_no_kv_memory",
        "test_get_reads_zeros_where_a_layer_has_not_written",
    },
    "test_fp8_pool": {"test_warm_up_touches_nothing"},
    "test_graphs_writes": {"test_prepare_zeroes_the_rest_of_a_page_that_it_enters"},
}

# `mark_written` without K and V: for tests of the books alone.
PUBLISHES_WHAT_NOBODY_WROTE = {
    "test_abuse_graphs": {"test_reset_while_the_collector_unbinds_requests"},
    "test_bad_input_pages": {"test_radix_insert_of_pages_not_taken_raises"},
    "test_cases_sharing": {
        "test_a26_deep_tree_is_walked_without_recursion",
        "test_a27_eviction_takes_leaves_in_insertion_order_at_any_size",
    },
    "test_bench_events": ALL,
    "test_docs": {"test_blocks_of_the_page_run_in_order"},
    "test_events_content": ALL,
    "test_events_ends": {"test_a_publisher_that_is_killed_and_started_again_is_noticed"},
    "test_events_pool": ALL,
    "test_eviction_order_pool": ALL,
    "test_explain": ALL,
    "test_explain_evicted": ALL,
    "test_flow_pages": {"test_raw_pages_go_into_the_tree_and_come_back"},
    "test_flow_requests": {"test_mark_written_only_raises_valid"},
    "test_inspect_pictures": {"test_svg_merges_pages_of_one_look_and_parts_requests"},
    "test_machine_explain": ALL,
    "test_metrics": ALL,
    "test_page_owners": {"test_page_owners_of_a_fork_name_the_first_holder"},
    # The bytes of all cached pages are set once the traffic is over.
    "test_snapshot": ALL,
    "test_snapshot_damage": ALL,
    "test_snapshot_file": ALL,
    "test_snapshot_kills": ALL,
    "test_snapshot_refusals": ALL,
    "test_token_runs": ALL,
}

LOOKS_AT_BYTES_THAT_NOBODY_WROTE = {
    "test_dlpack_border": {"test_put_of_foreign_byte_order_converts_or_raises"},
}


def is_unpoisoned(file, test):
    """Whether a test function of a file is one of them."""
    groups = (FILLS_FREE_PAGES, PUBLISHES_WHAT_NOBODY_WROTE, LOOKS_AT_BYTES_THAT_NOBODY_WROTE)
    return any(group.get(file, set()) & {test, *ALL} for group in groups)
