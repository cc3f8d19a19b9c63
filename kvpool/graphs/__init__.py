"""DecodeGraph and VerifyGraph: fixed addresses for passes that are captured once and replayed.

A CUDA graph reads the addresses that it was captured over, so page table and write slots must lie
still while their contents follow the step. For every batch bucket a graph keeps one set of
buffers; `prepare` fills them for the active step, before the capture and before every replay. On a
CPU pool the same objects work on NumPy arrays.

Source: the decode and verify graph buffers of the reference class, and the padded batches of
SGLang's and vLLM's CUDA graph runners.
"""

from kvpool.graphs.base import Graph, GraphWiring
from kvpool.graphs.decode import DecodeGraph
from kvpool.graphs.verify import VerifyGraph

__all__ = ["DecodeGraph", "Graph", "GraphWiring", "VerifyGraph"]
