"""How much fits: from a model's config to weights, K/V budget, tokens, pages and requests.

No device is asked and no second formula is kept: layouts come from `KVCacheLayout.from_config`,
budgets from `compute_static_kv_budget`, and what memory a load needs is found by asking that rule.
"""

from kvpool.sizing.capacity import Capacity, DTypeCapacity, Knob, plan_capacity
from kvpool.sizing.demand import RANKS, Demand, DTypeDemand, GPUFit, plan_demand
from kvpool.sizing.errors import SizingError
from kvpool.sizing.gpus import GPU, GPUS, known_gpu
from kvpool.sizing.model import Model, read_model
from kvpool.sizing.setting import DEFAULT_CONTEXT_BYTES, DEFAULT_MEM_FRACTION, KV_DTYPES, Setting
from kvpool.sizing.shapes import SHAPES

__all__ = [
    "DEFAULT_CONTEXT_BYTES",
    "DEFAULT_MEM_FRACTION",
    "GPU",
    "GPUS",
    "KV_DTYPES",
    "RANKS",
    "SHAPES",
    "Capacity",
    "DTypeCapacity",
    "DTypeDemand",
    "Demand",
    "GPUFit",
    "Knob",
    "Model",
    "Setting",
    "SizingError",
    "known_gpu",
    "plan_capacity",
    "plan_demand",
    "read_model",
]
