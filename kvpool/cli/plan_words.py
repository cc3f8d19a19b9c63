"""What ``kvpool plan`` says in words: which limit binds, and what a reader has to know."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.cli.numbers import show_bytes
from kvpool.sizing import GPU, DTypeCapacity, Model, Setting


def what_binds(row: DTypeCapacity, setting: Setting) -> str:
    """Which limit a pool stops at, with its numbers, and what to change."""
    budget = row.budget
    if row.binds == "max_batch_size":
        fits = budget.kv_budget // budget.bytes_per_token
        return (
            f"max_batch_size x max_seq_len binds; memory has room for {fits:,} tokens. Raise "
            "--max-batch-size or --max-seq-len for more."
        )
    if row.binds == "context":
        return (
            f"the context reserve binds: its {show_bytes(setting.context)} leave "
            f"{show_bytes(budget.kv_budget)} for K and V. Lower --context to what the driver "
            "shows as used before weights are loaded, or raise --mem-fraction."
        )
    return (
        "memory binds: the static region is full. Raise --mem-fraction (activations keep "
        f"{show_bytes(budget.dynamic_reserve)} now), store K and V in FP8, or add ranks (--tp)."
    )


def notes_on(model: Model, lengths: Sequence[int], gpus: Sequence[GPU]) -> list[str]:
    """What the numbers do not show: of the model, of lengths beyond it, of nominal memory."""
    notes = list(model.notes)
    longest = model.max_position_embeddings
    beyond = [length for length in lengths if longest is not None and length > longest]
    if beyond:
        notes.append(f"{max(beyond):,} tokens are beyond the {longest:,} positions of the model")
    if any(gpu.is_nominal for gpu in gpus):
        notes.append(
            "nominal memory is the data sheet's; a driver reports up to 7% less (nvidia-smi "
            "--query-gpu=memory.total --format=csv): give that as --memory"
        )
    return notes
