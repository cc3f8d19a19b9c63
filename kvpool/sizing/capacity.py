"""Forward: the memory of a GPU to tokens and requests, what binds, and which knob gives more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from kvpool.budget import StaticKVBudget
from kvpool.paging import num_pages_for_length
from kvpool.sizing.errors import SizingError
from kvpool.sizing.model import Model
from kvpool.sizing.setting import KV_DTYPES, Setting, budget_of

# Beyond this fraction hardly a model has room for its activations.
_LARGEST_FRACTION = Fraction("0.97")
_FRACTION_STEP = Fraction("0.05")
_DEFAULT_LENGTHS = (1024, 4096, 32768)


@dataclass(frozen=True)
class DTypeCapacity:
    """What one pool holds, with K and V in one dtype.

    Attributes
    ----------
    dtype : str
        Storage dtype of K and V.
    budget : StaticKVBudget
        Of one rank.
    requests : dict of int to int
        For each length in tokens, how many requests of that length fit at once, if they share no
        prefix.
    binds : str
        ``"memory"``, ``"context"`` (the reserve leaves less than it takes) or
        ``"max_batch_size"``.
    """

    dtype: str
    budget: StaticKVBudget
    requests: dict[int, int]
    binds: str


@dataclass(frozen=True)
class Knob:
    """A change of the setting, by the name of its argument, and the tokens that it would give."""

    option: str
    value: float
    num_slots: dict[str, int]


@dataclass(frozen=True)
class Capacity:
    """How much fits, and what would give more.

    Attributes
    ----------
    model, setting
        What was asked.
    weights_of_rank : int
        Bytes.
    by_dtype : tuple of DTypeCapacity
        One for each KV dtype.
    knobs : tuple of Knob
        What would give more, most useful first.
    """

    model: Model
    setting: Setting
    weights_of_rank: int
    by_dtype: tuple[DTypeCapacity, ...]
    knobs: tuple[Knob, ...]


def plan_capacity(
    model: Model,
    setting: Setting,
    *,
    dtypes: Sequence[str] = KV_DTYPES,
    lengths: Sequence[int] | None = None,
) -> Capacity:
    """Size a pool for each KV dtype.

    Parameters
    ----------
    model : Model
        From `read_model`.
    setting : Setting
        The GPU and what was chosen.
    dtypes : sequence of str
        KV dtypes to compare.
    lengths : sequence of int, optional
        Tokens of requests to count; by default 1,024, 4,096, 32,768 and the model's longest.

    Raises
    ------
    SizingError
        Not one page fits in any dtype, or the model does not divide among the ranks.
    """
    lengths = _default_lengths(model) if lengths is None else list(dict.fromkeys(lengths))
    if any(length < 1 for length in lengths):
        raise SizingError(f"lengths must be at least 1 token, got {min(lengths)}")
    model.layout(setting.tp_size)  # a model that does not divide is no matter of memory
    budgets = {}
    if setting.used(model) <= setting.total:
        budgets = {dtype: budget_of(model, setting, dtype) for dtype in dtypes}
    if not any(budget.num_pages for budget in budgets.values()):
        raise SizingError(_why_nothing_fits(model, setting, dtypes))
    rows = tuple(
        DTypeCapacity(
            dtype,
            budget,
            {
                length: _requests_at_once(budget, length, setting.max_batch_size)
                for length in lengths
            },
            _what_binds(budget, setting),
        )
        for dtype, budget in budgets.items()
    )
    binding = {row.binds for row in rows}
    return Capacity(
        model,
        setting,
        model.weights_of_rank(setting.tp_size),
        rows,
        _knobs(model, setting, dtypes, binding),
    )


def _default_lengths(model: Model) -> list[int]:
    longest = model.max_position_embeddings
    if longest is None:
        return list(_DEFAULT_LENGTHS)
    return [length for length in _DEFAULT_LENGTHS if length < longest] + [longest]


def _requests_at_once(budget: StaticKVBudget, length: int, max_batch_size: int | None) -> int:
    fit = budget.num_pages // num_pages_for_length(length, budget.page_size)
    return fit if max_batch_size is None else min(fit, max_batch_size)


def _what_binds(budget: StaticKVBudget, setting: Setting) -> str:
    if budget.limited_by == "memory" and setting.context > budget.kv_budget:
        return "context"
    return budget.limited_by


def _knobs(
    model: Model, setting: Setting, dtypes: Sequence[str], binding: set[str]
) -> tuple[Knob, ...]:
    changes: list[tuple[str, float, Setting]] = []
    if "max_batch_size" in binding and setting.max_batch_size is not None:
        doubled = 2 * setting.max_batch_size
        changes.append(("max_batch_size", doubled, replace(setting, max_batch_size=doubled)))
    if "context" in binding:
        half = setting.context // 2
        changes.append(("context", half, replace(setting, context=half)))
    if binding - {"max_batch_size"}:
        fraction = Fraction(str(setting.mem_fraction)) + _FRACTION_STEP
        if fraction <= _LARGEST_FRACTION:
            more = float(fraction)
            changes.append(("mem_fraction", more, replace(setting, mem_fraction=more)))
        ranks = 2 * setting.tp_size
        changes.append(("tp", ranks, replace(setting, tp_size=ranks)))
    knobs = []
    for option, value, changed in changes:
        try:
            slots = {dtype: budget_of(model, changed, dtype).num_slots for dtype in dtypes}
        except SizingError:
            continue  # as many ranks do not divide the model, say
        knobs.append(Knob(option, value, slots))
    return tuple(knobs)


def _why_nothing_fits(model: Model, setting: Setting, dtypes: Sequence[str]) -> str:
    """The numbers, and the smallest change that would do."""
    weights = model.weights_of_rank(setting.tp_size)
    found = [
        f"{option} {value}"
        for option, value, changed in _ways_out(setting)
        if _fits(model, changed, dtypes)
    ]
    ways = f"{found[0]} would do; or take" if found else "up to 64 ranks do not help: take"
    return (
        f"not one page of {setting.page_size} tokens fits: weights of {weights:,} bytes and a "
        f"context of {setting.context:,} on each rank, in a static region of "
        f"{setting.static_budget:,} bytes ({setting.mem_fraction} of {setting.total:,}); {ways} a "
        "GPU with more memory, or weights of a smaller dtype"
    )


def _ways_out(setting: Setting) -> list[tuple[str, float, Setting]]:
    fractions = [value for value in (0.9, 0.95) if value > setting.mem_fraction]
    ranks = [value for value in (2, 4, 8, 16, 32, 64) if value > setting.tp_size]
    return [
        *(("mem_fraction", f, replace(setting, mem_fraction=f)) for f in fractions),
        *(("tp", n, replace(setting, tp_size=n)) for n in ranks),
    ]


def _fits(model: Model, setting: Setting, dtypes: Sequence[str]) -> bool:
    try:
        return any(budget_of(model, setting, dtype).num_pages for dtype in dtypes)
    except SizingError:
        return False
