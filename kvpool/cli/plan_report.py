"""What ``kvpool plan`` prints."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from kvpool.cli.numbers import show_bytes, show_count
from kvpool.cli.output import Cell, console, print_json, print_table
from kvpool.cli.plan_json import capacity_as_dict, demand_as_dict
from kvpool.cli.plan_words import notes_on, what_binds
from kvpool.dtypes import itemsize_of
from kvpool.sizing import GPU, Capacity, Demand, Knob, Model, Setting


def show_capacity(capacity: Capacity, gpu: GPU, as_json: bool) -> None:
    """Print how much fits."""
    if as_json:
        print_json(capacity_as_dict(capacity, gpu))
        return
    model, setting = capacity.model, capacity.setting
    _print_model(model)
    _print_memory(capacity, gpu)
    lengths = list(capacity.by_dtype[0].requests)
    print_table(
        _title("Pool", setting),
        ["KV dtype", "bytes a token", "tokens", "pages", *(f"of {n:,}" for n in lengths)],
        [
            [
                row.dtype,
                row.budget.bytes_per_token,
                row.budget.num_slots,
                row.budget.num_pages,
                *(row.requests[length] for length in lengths),
            ]
            for row in capacity.by_dtype
        ],
    )
    out = console()
    out.print(f"of {lengths[0]:,}: requests of that many tokens at once, that share no prefix.\n")
    _print_binding(capacity)
    _print_knobs(capacity)
    _print_notes(notes_on(model, lengths, [gpu]))


def show_demand(demand: Demand, as_json: bool) -> None:
    """Print what a load needs, and which GPUs have it."""
    if as_json:
        print_json(demand_as_dict(demand))
        return
    setting, first = demand.setting, demand.by_dtype[0]
    ranks = list(first.memory)
    _print_model(demand.model)
    num_tokens = first.num_pages * setting.page_size
    console().print(
        f"{demand.num_requests:,} requests of {demand.length:,} tokens: {num_tokens:,} tokens in "
        f"{first.num_pages:,} pages of {setting.page_size}\n"
    )
    print_table(
        f"Least memory of each GPU, by ranks (--mem-fraction {setting.mem_fraction})",
        ["KV dtype", f"K and V, tp {ranks[0]}", *(f"tp {n}" for n in ranks)],
        [
            [row.dtype, show_bytes(row.kv_bytes[ranks[0]]), *map(show_bytes, row.memory.values())]
            for row in demand.by_dtype
        ],
    )
    console().print()
    # Dtypes of one size need the same.
    by_size = {itemsize_of(row.dtype): row.dtype for row in reversed(demand.by_dtype)}
    shown = [row.dtype for row in demand.by_dtype if row.dtype in by_size.values()]
    print_table(
        f"Fewest ranks that hold it, of {', '.join(map(str, ranks))}",
        ["GPU", "memory", *(_same_size(demand, dtype) for dtype in shown)],
        [
            [fit.gpu.name, show_bytes(fit.gpu.memory), *(fit.ranks[dtype] for dtype in shown)]
            for fit in demand.fits
        ],
    )
    _print_notes(notes_on(demand.model, [demand.length], [fit.gpu for fit in demand.fits]))


def _print_model(model: Model) -> None:
    layout = model.layout()
    parameters = model.num_parameters
    counted = "parameters not counted" if parameters is None else f"{parameters:,} parameters"
    console().print(
        Text.assemble(
            (model.name, "bold"),
            f": {counted}, {layout.num_layers} layers, {layout.num_kv_heads} KV heads of "
            f"{layout.head_dim}\n",
        )
    )


def _print_memory(capacity: Capacity, gpu: GPU) -> None:
    setting, model = capacity.setting, capacity.model
    budget = capacity.by_dtype[0].budget
    origin = f"{gpu.name}, nominal" if gpu.is_nominal else "as given: --memory"
    weights = f"{capacity.weights_of_rank:,} bytes: {model.weight_source}"
    if setting.tp_size > 1:
        weights += f", the share of one of {setting.tp_size} ranks"
    out = console()
    out.print(Text("Memory of each GPU" if setting.tp_size > 1 else "Memory", style="bold"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, num_bytes, words in (
        ("in all", budget.total, origin),
        ("static region", budget.static_budget, f"--mem-fraction {setting.mem_fraction}"),
        ("  weights", capacity.weights_of_rank, weights),
        ("  context", setting.context, "CUDA context, libraries: --context"),
        ("  K and V", budget.kv_budget, "the rest of the static region"),
        ("activations", budget.dynamic_reserve, "what the fraction leaves"),
    ):
        grid.add_row(Text(name), show_bytes(num_bytes), Text(words))
    out.print(grid)
    out.print()


def _print_binding(capacity: Capacity) -> None:
    """One sentence for all dtypes, or one for each group of them that has the same."""
    groups: dict[str, list[str]] = {}
    for row in capacity.by_dtype:
        groups.setdefault(what_binds(row, capacity.setting), []).append(row.dtype)
    for words, dtypes in groups.items():
        who = "" if len(groups) == 1 else f"{', '.join(dtypes)}: "
        console().print(Text(f"{who}{words}"))


def _print_knobs(capacity: Capacity) -> None:
    if not capacity.knobs:
        return
    console().print()
    rows: list[list[Cell]] = [
        [row.dtype, row.budget.num_slots, *(knob.num_slots[row.dtype] for knob in capacity.knobs)]
        for row in capacity.by_dtype
    ]
    print_table("Tokens after a change", ["KV dtype", "now", *map(_flag, capacity.knobs)], rows)


def _flag(knob: Knob) -> str:
    value = str(knob.value)
    if knob.option == "context":
        value = show_bytes(int(knob.value)).replace(" ", "")
    return f"--{knob.option.replace('_', '-')} {value}"


def _title(what: str, setting: Setting) -> str:
    ranks = f" on each of {setting.tp_size} ranks" if setting.tp_size > 1 else ""
    return f"{what}{ranks}, pages of {show_count(setting.page_size)}"


def _same_size(demand: Demand, dtype: str) -> str:
    size = itemsize_of(dtype)
    return ", ".join(row.dtype for row in demand.by_dtype if itemsize_of(row.dtype) == size)


def _print_notes(notes: list[str]) -> None:
    if notes:
        console().print()
    for note in notes:
        console().print(Text(f"note: {note}", style="dim"))
