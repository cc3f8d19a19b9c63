"""``kvpool plan``: how many tokens fit on a GPU, or which GPU a load needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from kvpool import DEFAULT_PAGE_SIZE
from kvpool.cli.help import examples, paragraphs
from kvpool.cli.numbers import option_value, parse_bytes, parse_list, parse_tokens
from kvpool.cli.output import CommandError
from kvpool.cli.plan_report import show_capacity, show_demand
from kvpool.sizing import (
    DEFAULT_MEM_FRACTION,
    GPU,
    GPUS,
    KV_DTYPES,
    RANKS,
    SHAPES,
    Setting,
    SizingError,
    known_gpu,
    plan_capacity,
    plan_demand,
    read_model,
)

_HELP = paragraphs(
    """
    How many tokens fit on a GPU; with --requests and --length, which GPU a load needs.

    From the config.json of a model come its parameters, their bytes, and what K and V of a token
    take; from the memory, how many tokens, pages and requests a pool holds, for every KV dtype
    side by side.
    """
)
_EXAMPLES = examples(
    "kvpool plan llama-3-8b --gpu h100",
    "kvpool plan path/to/config.json --memory 79.1GiB --tp 2 --mem-fraction 0.9 --lengths 2k,32k",
    "kvpool plan qwen3-8b --requests 64 --length 8k",
    "kvpool plan path/to/folder --gpu l40s --weights 9.1GB --json",
)
# How engines write them.
_KV_NAMES = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}

T = TypeVar("T")

_MODEL, _MEMORY, _POOL, _QUESTION = "Model", "Memory of a GPU", "Pool", "Question"


def _option(panel: str, help_text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=paragraphs(help_text), rich_help_panel=panel, **settings)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan", help=_HELP, epilog=_EXAMPLES)(plan)


def plan(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help=paragraphs(f"A config.json, a folder with one, or a name: {', '.join(SHAPES)}."),
        ),
    ],
    dtype: Annotated[
        str | None,
        _option(
            _MODEL,
            "Dtype of the weights: float32, float16 or bfloat16. Default: as the files beside the "
            "config have them, else the config's.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        _option(_MODEL, "Bytes of all weights, instead of counting them: 9.1GB."),
    ] = None,
    tp: Annotated[
        int | None, _option(_MODEL, "Tensor-parallel ranks: one GPU each. Default: 1.")
    ] = None,
    gpu: Annotated[
        str | None,
        _option(_MEMORY, f"By name, with its nominal memory: {', '.join(GPUS)}."),
    ] = None,
    memory: Annotated[
        str | None,
        _option(_MEMORY, "Memory that the driver reports: 79.1GiB. Goes before --gpu."),
    ] = None,
    mem_fraction: Annotated[
        float, _option(_MEMORY, "Part for what stays: weights, context and pool.")
    ] = DEFAULT_MEM_FRACTION,
    context: Annotated[
        str,
        _option(_MEMORY, "Taken before the pool besides the weights: CUDA context, libraries."),
    ] = "0.5GiB",
    page_size: Annotated[int, _option(_POOL, "Tokens per page.")] = DEFAULT_PAGE_SIZE,
    kv_dtype: Annotated[
        str, _option(_POOL, f"KV dtypes to compare, of {', '.join(KV_DTYPES)}.")
    ] = "all",
    max_batch_size: Annotated[
        int | None,
        _option(_POOL, "Cap the pool at so many requests of --max-seq-len."),
    ] = None,
    max_seq_len: Annotated[
        str | None, _option(_POOL, "Tokens of the longest request. Default: the model's.")
    ] = None,
    lengths: Annotated[
        str | None,
        _option(_QUESTION, "Count the requests of these lengths that fit at once: 1k,4k,32k."),
    ] = None,
    requests: Annotated[
        int | None, _option(_QUESTION, "Find the memory for so many requests at once ...")
    ] = None,
    length: Annotated[
        str | None, _option(_QUESTION, "... of so many tokens, answers included: 8k.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document, with exact integers.")
    ] = False,
) -> None:
    """Answer one of the two questions."""
    if (requests is None) != (length is None):
        raise CommandError("--requests and --length belong together: give both, or neither")
    beside = (lengths, max_batch_size, max_seq_len)
    if requests is not None and any(option is not None for option in beside):
        raise CommandError(
            "--requests and --length say how large the pool is: --lengths, --max-batch-size and "
            "--max-seq-len have no use beside them"
        )
    if requests is None and gpu is None and memory is None:
        raise CommandError(
            "how much memory? Say --gpu NAME, or --memory with what the driver reports; or ask "
            "the other way round with --requests and --length"
        )
    dtypes = option_value("--kv-dtype", _kv_dtypes, kv_dtype)
    try:
        where = _gpu(gpu, memory)
        setting = Setting(
            total=1 if where is None else where.memory,
            mem_fraction=mem_fraction,
            page_size=page_size,
            context=option_value("--context", parse_bytes, context),
            tp_size=1 if tp is None else tp,
            max_batch_size=max_batch_size,
            max_seq_len=_optional("--max-seq-len", _whole_tokens, max_seq_len),
        )
        model = read_model(
            config, dtype=dtype, weight_bytes=_optional("--weights", parse_bytes, weights)
        )
        if requests is not None:
            demand = plan_demand(
                model,
                setting,
                requests,
                option_value("--length", _whole_tokens, length or ""),
                dtypes=dtypes,
                ranks=RANKS if tp is None else (tp,),
                gpus=None if where is None else [where],
            )
            show_demand(demand, as_json)
        elif where is not None:
            asked = _optional("--lengths", lambda text: parse_list(_whole_tokens, text), lengths)
            capacity = plan_capacity(model, setting, dtypes=dtypes, lengths=asked)
            show_capacity(capacity, where, as_json)
    except SizingError as error:
        remedy = f" (--{error.remedy})" if error.remedy else ""
        raise CommandError(f"{error}{remedy}") from None


def _gpu(name: str | None, memory: str | None) -> GPU | None:
    if memory is not None:
        given = option_value("--memory", parse_bytes, memory)
        return GPU("as given" if name is None else name, given, is_nominal=False)
    return None if name is None else known_gpu(name)


def _optional(option: str, parse: Callable[[str], T], text: str | None) -> T | None:
    return None if text is None else option_value(option, parse, text)


def _whole_tokens(text: str) -> int:
    tokens = parse_tokens(text)
    if tokens is None:
        raise ValueError(f"expected a number of tokens, got {text!r}")
    return tokens


def _kv_dtypes(text: str) -> tuple[str, ...]:
    if text == "all":
        return KV_DTYPES
    names = parse_list(lambda name: _KV_NAMES.get(name.lower(), name.lower()), text)
    for name in names:
        if name not in KV_DTYPES:
            raise ValueError(f"expected some of {', '.join(KV_DTYPES)}, or all, got {name!r}")
    return tuple(dict.fromkeys(names))
