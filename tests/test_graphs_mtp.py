"""The decoder of `tests/test_flow_mtp.py` with captured windows, in all three pools."""

import numpy as np
import pytest

from tests.helpers.mtp import Decoder, Pools
from tests.helpers.pools import R, assert_ledger
from tests.helpers.speculation import addresses, cached_tokens, table_addresses

WINDOW, NUM_ROUNDS, CAPACITY = 4, 30, 150


class CapturedDecoder(Decoder):
    """Every forward pass of the main model goes through the fixed buffers of a graph."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen = set()

    def prepare(self, step, starts, window):
        main = self.pools.main
        if window == 1:
            table = main.decode_graph.prepare([n + 1 for n in starts], starts)
            slots = main.decode_graph.write_slots(len(starts))
        else:
            table = main.verify_graph.prepare([n + window for n in starts], starts, window)
            slots = main.verify_graph.write_slots()
        self.seen.add((window, *table_addresses(table), *addresses(slots)))
        return table

    def write(self, step, layer, starts, k):
        step.put(layer, starts, k, -k)

    def step(self):
        with self.pools.main.decode_graph:
            super().step()

    def round(self, window):
        with self.pools.main.verify_graph:
            super().round(window)


def decoder_of(make_pool, kind, page_size, dtype, num_prompts):
    common = R(1, 2 * page_size)
    prompts = [[*common, 7, 8], [*common, 9], R(100, 100 + page_size), [3]][:num_prompts]
    capacity = CAPACITY + 2 * page_size
    pools = Pools.of(
        make_pool, page_size, dtype, batch_size=num_prompts, capacity=capacity, window=WINDOW
    )
    return kind(pools, prompts, capacity)


@pytest.mark.parametrize("num_prompts", [1, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_captured_speculation_gives_the_tokens_of_a_plain_eager_run(
    make_pool, page_size, dtype, num_prompts
):
    plain = decoder_of(make_pool, Decoder, page_size, dtype, num_prompts)
    captured = decoder_of(make_pool, CapturedDecoder, page_size, dtype, num_prompts)
    for round_ in range(NUM_ROUNDS):
        if round_ % 3 == 2:  # a plain step now and then: both graphs take turns
            captured.step()
        else:
            captured.round(WINDOW)
    longest = max(len(row.tokens) for row in captured.rows)
    while min(len(row.tokens) for row in plain.rows) < longest:
        plain.step()
    for row, other in zip(captured.rows, plain.rows, strict=True):
        assert row.tokens == other.tokens[: len(row.tokens)]
    assert len(captured.seen) == 2  # the addresses of one bucket of each graph
    written = {i: row.written for i, row in enumerate(captured.rows)}
    captured.finish(NUM_ROUNDS, rejected=[999] * WINDOW)
    found = cached_tokens(captured.pools.main)
    assert 999 not in found
    if num_prompts == 1:  # nothing shared: what is cached is what was written
        assert len(found) == written[0] // page_size * page_size
    main = captured.pools.main
    assert main.poison or np.isfinite(main.key_cache.astype(np.float32)).all()
    assert_ledger(captured.pools.main)
