"""How much workspace FlashInfer's planner takes, worked out before it is asked.

It has to be known: a graph holds the address of the workspace, so one that turned out too small
cannot grow under it. The rules are those of `scheduler.cuh` in 0.6.7, PrefillPlan and
PrefillSplitQOKVIndptr, through which decode on tensor cores goes as well; later releases take
less.
"""

from __future__ import annotations

from kvpool.interop.plans import Problem, Shape

DEFAULT_WORKSPACE_BYTES = 128 * 2**20
"""What FlashInfer recommends, and the least that is allocated unless the caller says a size."""

# Blocks that the planner expects to run at once on a multiprocessor.
_BLOCKS_PER_SM = 2
_SMALLEST_INT_WORKSPACE = 2**20


def float_workspace_bytes(problem: Problem, shape: Shape, num_sms: int) -> int:
    """Bytes for the partial results of rows whose K and V are split over several blocks.

    Parameters
    ----------
    problem : Problem
        What will be planned.
    shape : Shape
        Of the pool.
    num_sms : int
        Multiprocessors of the device.

    Returns
    -------
    int
        An upper bound for this problem and, on a fixed table, for all that differ in lengths only.
    """
    group = problem.num_q_heads // shape.num_kv_heads
    blocks = _BLOCKS_PER_SM * num_sms // shape.num_kv_heads
    tile = 64 if shape.head_dim >= 256 else 128
    if problem.table.is_fixed:
        # A graph is planned for the worst distribution of its queries: all but one to each row.
        rows, batch = problem.num_queries, problem.table.batch_size
        longest = (rows - batch + 1) * group
        tile = 16 if longest <= 16 else 64 if longest <= 64 else tile
        blocks = max(blocks, -(-rows * group // tile) + batch - 1)
    # A float32 of each element of a partial result, and one of its logarithm of the sum.
    return problem.num_q_heads * blocks * tile * (shape.head_dim + 1) * 4 + 64


def int_workspace_bytes(problem: Problem) -> int:
    """Bytes for the plan itself, where a wrapper serves one fixed table.

    Less than 16 for each tile of 16 query heads, and 8 for each query; 1 MiB is enough for the
    blocks of any device. FlashInfer's own 8 MiB, on the device and pinned on the host, are for any
    batch at all, and there are two wrappers for each bucket.
    """
    tiles = problem.num_queries * problem.num_q_heads // 16 + problem.table.batch_size
    return max(_SMALLEST_INT_WORKSPACE, 32 * (tiles + problem.num_queries))
