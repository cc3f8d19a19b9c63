"""The command line: serve chat requests on a kvpool, with and without reuse or speculation."""

from __future__ import annotations

import time
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.smollm2 import report
from examples.smollm2.generation import Generation
from examples.smollm2.model import Llama
from examples.smollm2.serving import Engine
from examples.smollm2.tokenizer import ChatTokenizer
from examples.smollm2.weights import (
    LlamaConfig,
    ModelNotFoundError,
    load_weights,
    metadata,
    open_gguf,
)
from examples.smollm2.workload import ChatRequest, load_requests, play
from kvpool import KVCachePool

DEFAULT_REQUESTS = Path(__file__).with_name("requests.json")
# Speculation gains where answers quote: here the follow-up turns ask for it.
QUOTING_REQUESTS = Path(__file__).with_name("requests_quoting.json")
# The default pool: enough that no default request ever waits, 360 MiB in float32.
DEFAULT_POOL_TOKENS = 8192
MAX_BATCH_SIZE = 16

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class DType(str, Enum):
    """What K and V are stored as."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float8_e4m3fn = "float8_e4m3fn"
    float8_e5m2 = "float8_e5m2"


def make_pool(
    config: LlamaConfig,
    num_pages: int,
    page_size: int,
    dtype: str = "float32",
    device: str = "cpu",
) -> KVCachePool:
    """Return a pool for the model."""
    return KVCachePool(
        config.num_layers,
        num_pages * page_size,
        config.num_kv_heads,
        config.head_dim,
        page_size=page_size,
        device=device,
        dtype=dtype,
        max_batch_size=MAX_BATCH_SIZE,
    )


def warm_up(model: Llama, pool: KVCachePool) -> None:
    """Run one prefill and one decode, so that no compilation falls into a measured time."""
    request_id = pool.bind_request([1, 2, 3], 4)
    step = pool.activate_step(request_id)
    model.forward(pool, step, [1, 2, 3], [0], [0, 3])
    model.forward(pool, step, [4], [3], [0, 1])
    pool.unbind_request(request_id)


class Display:
    """A progress bar per pass: answers out of requests, and what the engine is doing."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[num_tokens]} tokens {task.fields[latest]}"),
            TimeElapsedColumn(),
            console=console,
        )

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def observer(self, title: str, num_requests: int) -> Any:
        """Return an observer for an engine that drives a bar of its own."""
        task = self._progress.add_task(title, total=num_requests, num_tokens=0, latest="")
        num_tokens = 0

        def observe(event: str, generation: Generation) -> None:
            nonlocal num_tokens
            if event == "token":
                num_tokens += 1
                self._progress.update(task, num_tokens=num_tokens)
                return
            self._progress.update(
                task,
                advance=event == "finished",
                latest=f"{event} {generation.request.name}"[:19].ljust(19),
            )

        return observe


def serve_pass(
    model: Llama,
    tokenizer: ChatTokenizer,
    requests: list[ChatRequest],
    pool: KVCachePool,
    display: Display,
    title: str,
    speculate: int = 0,
) -> report.Pass:
    """Serve all requests on a fresh pool, check it, and return the record."""
    engine = Engine(
        model,
        pool,
        eos_token=tokenizer.eos_token,
        max_batch_size=MAX_BATCH_SIZE,
        speculate=speculate,
        observer=display.observer(title, len(requests)),
    )
    started = time.perf_counter()
    generations = play(engine, tokenizer, requests)
    seconds = time.perf_counter() - started
    pool.check()
    return report.Pass(
        title=title,
        dtype=pool.dtype,
        reuse=pool.prefix_reuse_enabled,
        speculate=speculate,
        num_pages=pool.num_pages,
        peak_pages=engine.peak_pages,
        seconds=seconds,
        num_steps=engine.num_steps,
        generations=generations,
        stats=pool.stats(),
    )


def small_pool_pages(done: report.Pass, page_size: int) -> int:
    """Return so few pages that the requests of a pass would have to wait and be preempted."""
    longest = max(len(generation.tokens) for generation in done.generations.values())
    return -(-longest // page_size) + 3


@app.command()
def main(
    reuse: Annotated[
        bool | None,
        typer.Option(
            "--reuse/--no-reuse",
            help="Serve only with, or only without, prefix reuse. Default: both, and compare.",
        ),
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(
            help="A JSON file of chat requests. Default: requests.json beside this program, and "
            "requests_quoting.json with --speculate.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    pages: Annotated[
        int | None,
        typer.Option(min=1, help="Pages in the pool; when they run short, requests queue."),
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens a page.")] = 16,
    dtype: Annotated[DType, typer.Option(help="What K and V are stored as.")] = DType.float32,
    device: Annotated[
        str, typer.Option(help="Where the pool lives: cpu, cuda or cuda:1.")
    ] = "cpu",
    speculate: Annotated[
        int,
        typer.Option(
            min=0,
            max=64,
            help="Serve with up to so many draft tokens a row and step, and without; compare.",
        ),
    ] = 0,
    prompt: Annotated[
        str | None, typer.Option(help="Answer this question of yours, and nothing else.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 40,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0: always the most likely token.")
    ] = 0.0,
) -> None:
    """Serve SmolLM2-135M-Instruct with kvpool: shared prefixes are computed once."""
    console = Console()
    if requests is None:
        requests = QUOTING_REQUESTS if speculate else DEFAULT_REQUESTS
    try:
        chat = load_requests(requests, max_tokens=max_tokens, temperature=temperature)
        if prompt is not None:
            chat = [
                ChatRequest(
                    "your question",
                    prompt,
                    chat[0].system,
                    max_tokens=max_tokens,
                    temperature=temperature,
                )
            ]
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    try:
        with console.status("reading the weights"):
            reader = open_gguf()
            weights = load_weights(reader)
            tokenizer = ChatTokenizer(metadata(reader))
    except ModelNotFoundError as error:
        console.print(f"[bold red]{error}[/bold red]", highlight=False)
        raise typer.Exit(1) from error
    config = weights.config

    try:
        small = make_pool(config, 4, page_size, dtype.value, device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with console.status("warming up"), small as pool:
        model = Llama(weights, pool.array_namespace)
        warm_up(model, pool)

    num_pages = pages or -(-DEFAULT_POOL_TOKENS // page_size)
    done: list[report.Pass] = []
    with Display(console) as display:

        def serve(
            title: str,
            with_reuse: bool = reuse is not False,
            in_pages: int = num_pages,
            draft_len: int = speculate,
        ) -> None:
            with make_pool(config, in_pages, page_size, dtype.value, device) as pool:
                pool.prefix_reuse_enabled = with_reuse
                done.append(serve_pass(model, tokenizer, chat, pool, display, title, draft_len))

        compare_reuse = reuse is None and prompt is None
        if speculate:
            serve("with speculation")
            serve("without speculation", draft_len=0)
        else:
            serve("without reuse" if reuse is False else "with reuse")
            if compare_reuse:
                serve("without reuse", with_reuse=False)
        if compare_reuse and pages is None:
            few = small_pool_pages(done[0], page_size)
            serve(f"in a pool of {few} pages", in_pages=few)

    first = done[0]
    console.print()
    console.print(report.requests_table(tokenizer, first, shorten=60 if prompt is None else None))
    for each in done:
        console.print(f"[bold]{each.title[0].upper()}{each.title[1:]}[/bold]")
        report.print_totals(console, each)
    if len(done) == 1:
        return
    if speculate:
        follow_ups = [request.name for request in chat if request.follows is not None]
        report.print_speculation(console, first, done[1], follow_ups)
    else:
        report.print_comparison(console, first, done[1])
    console.print("[bold]Do the answers depend on it?[/bold]")
    equal = [report.print_equality(console, first, other) for other in done[1:]]
    if not all(equal):
        raise typer.Exit(1)
