"""What ``kvpool plan --json`` prints; integers are exact, sizes are bytes."""

from __future__ import annotations

from typing import Any

from kvpool.cli.plan_words import notes_on, what_binds
from kvpool.sizing import GPU, Capacity, Demand, Model


def _model_as_dict(model: Model) -> dict[str, Any]:
    layout = model.layout()
    return {
        "name": model.name,
        "model_type": model.config.text.get("model_type"),
        "num_parameters": model.num_parameters,
        "num_layers": layout.num_layers,
        "num_kv_heads": layout.num_kv_heads,
        "head_dim": layout.head_dim,
        "max_position_embeddings": model.max_position_embeddings,
        "weight_bytes": model.weight_bytes,
        "weight_source": model.weight_source,
    }


def capacity_as_dict(capacity: Capacity, gpu: GPU) -> dict[str, Any]:
    """How much fits."""
    setting, model = capacity.setting, capacity.model
    budget = capacity.by_dtype[0].budget
    lengths = list(capacity.by_dtype[0].requests)
    return {
        "model": _model_as_dict(model),
        "gpu": {"name": gpu.name, "memory_bytes": gpu.memory, "nominal": gpu.is_nominal},
        "tp_size": setting.tp_size,
        "mem_fraction": setting.mem_fraction,
        "page_size": setting.page_size,
        "max_batch_size": setting.max_batch_size,
        "max_seq_len": setting.max_seq_len,
        "rank": {
            "num_kv_heads": model.layout(setting.tp_size).num_kv_heads,
            "weight_bytes": capacity.weights_of_rank,
            "context_bytes": setting.context,
            "static_bytes": budget.static_budget,
            "kv_bytes": budget.kv_budget,
            "activation_bytes": budget.dynamic_reserve,
        },
        "kv": [
            {
                "dtype": row.dtype,
                "bytes_per_token": row.budget.bytes_per_token,
                "num_slots": row.budget.num_slots,
                "num_pages": row.budget.num_pages,
                "limited_by": row.budget.limited_by,
                "binds": row.binds,
                "advice": what_binds(row, setting),
                "requests": [
                    {"length": length, "at_once": count} for length, count in row.requests.items()
                ],
            }
            for row in capacity.by_dtype
        ],
        "knobs": [
            {"option": knob.option, "value": knob.value, "num_slots": knob.num_slots}
            for knob in capacity.knobs
        ],
        "notes": notes_on(model, lengths, [gpu]),
    }


def demand_as_dict(demand: Demand) -> dict[str, Any]:
    """What a load needs."""
    setting = demand.setting
    return {
        "model": _model_as_dict(demand.model),
        "num_requests": demand.num_requests,
        "length": demand.length,
        "mem_fraction": setting.mem_fraction,
        "page_size": setting.page_size,
        "context_bytes": setting.context,
        "kv": [
            {
                "dtype": row.dtype,
                "num_pages": row.num_pages,
                "num_slots": row.num_pages * setting.page_size,
                "by_tp": [
                    {"tp_size": n, "kv_bytes": row.kv_bytes[n], "memory_bytes": row.memory[n]}
                    for n in row.memory
                ],
            }
            for row in demand.by_dtype
        ],
        "gpus": [
            {"name": fit.gpu.name, "memory_bytes": fit.gpu.memory, "fewest_ranks": fit.ranks}
            for fit in demand.fits
        ],
        "notes": notes_on(demand.model, [demand.length], [fit.gpu for fit in demand.fits]),
    }
