"""``kvpool replay``: what prefix reuse gives on a trace."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kvpool.cli.help import examples, paragraphs
from kvpool.cli.output import CommandError, error_console, print_json
from kvpool.cli.replay_cells import Costs, make_cells, make_fleets
from kvpool.cli.replay_output import progress_bar, show_report
from kvpool.numbers import counted
from kvpool.replay import Cell, Replay, ReplayOptions, ReplayReport, TraceError
from kvpool.replay.fleet import ROUTES, WRITES
from kvpool.replay.plot import plot as draw
from kvpool_ext.eviction import EVICTION_POLICIES

INTERRUPTED = 130  # 128 + SIGINT
MALFORMED = 3
PICTURES = (".png", ".svg", ".pdf")


def replay(
    trace: Annotated[Path, typer.Argument(help="File of JSON lines, also through gzip.")],
    capacity: Annotated[
        str | None,
        typer.Option(
            help="Tokens that each pool holds, a list: 1M,3M,unbounded. Default: unbounded."
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Instead: bytes for K and V, a list: 20GiB,40GiB.")
    ] = None,
    bytes_per_token: Annotated[
        str | None,
        typer.Option(help="Bytes of K and V of one token: 128KiB; with --memory or tiers."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Instead: the config.json of a model, which says what a token costs."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of K and V, with --config.")] = "bfloat16",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks, with --config.")] = 1,
    page_size: Annotated[str, typer.Option(help="Tokens per page, a list: 1,16,64.")] = "16",
    policy: Annotated[
        str,
        typer.Option(help=f"What is evicted first, a list of: {', '.join(EVICTION_POLICIES)}."),
    ] = EVICTION_POLICIES[0],
    instances: Annotated[
        str, typer.Option(help="Instances with such a pool each, a list: 1,4.")
    ] = "1",
    route: Annotated[
        str,
        typer.Option(
            help="Who serves a request: each in turn, or who has most of its prompt; a list of: "
            f"{', '.join(ROUTES)}."
        ),
    ] = ROUTES[0],
    host_tier: Annotated[
        str,
        typer.Option(help="Tokens of host memory below each instance, a list: none,8M,unbounded."),
    ] = "none",
    remote_tier: Annotated[
        str,
        typer.Option(help="Tokens of one store below all instances, a list: none,64M,unbounded."),
    ] = "none",
    write: Annotated[
        str,
        typer.Option(
            help="A page goes to the tiers when it comes to the tree, or when it is evicted; a "
            f"list of: {', '.join(WRITES)}."
        ),
    ] = WRITES[0],
    window: Annotated[
        int,
        typer.Option(
            help="Requests in flight at most, for each instance; the oldest of all ends first."
        ),
    ] = 32,
    prompts_only: Annotated[
        bool, typer.Option("--prompts-only", help="Leave the outputs out.")
    ] = False,
    checkpoint: Annotated[
        bool,
        typer.Option(help="Share a prompt once it is computed, or only when its request ends."),
    ] = True,
    block_size: Annotated[int, typer.Option(help="Prompt tokens of one hash id.")] = 512,
    limit: Annotated[int | None, typer.Option(help="Only the first so many requests.")] = None,
    bound: Annotated[
        bool,
        typer.Option(help="Replay each page size without bound too: what nothing can exceed."),
    ] = True,
    explain: Annotated[
        int, typer.Option(help="Say of so many requests, those that lost most, why they did.")
    ] = 0,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Picture of hit rate against capacity, or against the tier's where only that "
            "varies: .png, .svg, .pdf."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail at the first malformed line.")
    ] = False,
) -> None:
    """Replay a trace; the help text is in `register`."""
    fleets = make_fleets(instances, route, host_tier, remote_tier, write)
    costs = Costs(bytes_per_token, config, dtype, tp)
    has_tiers = any(fleet.has_tiers for fleet in fleets)
    capacities, token_bytes = costs.capacities(capacity, memory, has_tiers)
    cells = make_cells(capacities, page_size, policy, fleets)
    if plot is not None:
        _check_plot(plot, cells)
    try:
        options = ReplayOptions(
            window=window,
            checkpoint=checkpoint,
            prompts_only=prompts_only,
            block_size=block_size,
            limit=limit,
            strict=strict,
            bound=bound,
            explain=explain,
            bytes_per_token=token_bytes,
        )
        running = Replay(trace, cells, options)
    except ValueError as error:
        raise CommandError(str(error)) from None
    interrupted = False
    try:
        with progress_bar() as on_progress:
            running.run(on_progress)
    except (TraceError, MemoryError) as error:
        raise CommandError(str(error) or "out of memory") from None
    except KeyboardInterrupt:
        interrupted = True
    report = running.report()
    if json:
        print_json(report.as_dict())
    else:
        show_report(report)
    say = error_console()
    for line, reason in report.malformed:
        say.print(f"line {line}: {reason}", markup=False, soft_wrap=True)
    if report.num_malformed:
        number = counted(report.num_malformed, "malformed line")
        say.print(f"skipped {number}", soft_wrap=True)
    if interrupted:
        say.print("interrupted: these are the figures until then", soft_wrap=True)
        raise typer.Exit(INTERRUPTED)
    _check_that_some_fit(report)
    if plot is not None:
        _draw(report, plot)
    if report.num_malformed:
        raise typer.Exit(MALFORMED)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "replay",
        help=paragraphs(
            """
            Replay a trace through kvpool's own bookkeeping, and say what prefix reuse gives.

            The trace has one JSON object a line, in one of two formats. Mooncake's:
            {"timestamp": 0, "input_length": 700, "output_length": 50, "hash_ids": [7, 9]}, one id
            for each 512 prompt tokens. Plain tokens: {"tokens": [5, 17, 3], "output_length": 50},
            or "output_tokens" where they are known. Both may have an "extra_key", the namespace.

            Requests come in the order of the lines; their times are ignored. Nothing is computed
            and no GPU is needed: pages, tree and eviction are those of a real pool.

            With --instances requests are spread over so many pools; --host-tier and --remote-tier
            are memory below them, in which pages are found that the pool had to evict, or that
            another instance computed. All combinations are replayed.

            Exit codes: 0, done; 1, bad input, or no request fits a pool; 3, done, but malformed
            lines were skipped (with --strict the first one is bad input); 130, interrupted, with
            the figures until then and no picture.
            """
        ),
        epilog=examples(
            "kvpool replay trace.jsonl",
            "kvpool replay trace.jsonl --capacity 500k,1M,3M --page-size 16,64 --plot rates.png",
            "kvpool replay trace.jsonl --capacity 1M --instances 1,4 --route round-robin,prefix",
            "kvpool replay trace.jsonl --capacity 1M --instances 4 --remote-tier 16M,64M",
            "kvpool replay trace.jsonl --memory 40GiB --config config.json --explain 5",
            "kvpool replay trace.jsonl.gz --prompts-only --page-size 512 --json",
        ),
    )(replay)


def _check_plot(path: Path, cells: list[Cell]) -> None:
    """Before a long replay: what would fail after it."""
    if all(cell.capacity is None for cell in cells):
        raise CommandError("--plot needs capacities to plot against: --capacity 1M,3M,10M")
    if path.suffix.lower() not in PICTURES:
        raise CommandError(f"--plot writes {', '.join(PICTURES)}, got {path}")
    if not path.absolute().parent.is_dir():
        raise CommandError(f"--plot: no such directory: {path.absolute().parent}")
    if find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib: pip install 'kvpool[cli]'")


def _check_that_some_fit(report: ReplayReport) -> None:
    """After the figures, which are all empty."""
    if not any(result.num_requests for result in report.results):
        largest = max(result.num_pages * result.cell.page_size for result in report.results)
        raise CommandError(
            f"no request fits: the largest pool has {counted(largest, 'token')}, and the longest "
            f"request {report.longest_request:,}: take a larger --capacity"
        )


def _draw(report: ReplayReport, path: Path) -> None:
    try:
        draw(report, path)
    except OSError as error:
        raise CommandError(f"--plot: cannot write {path}: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(f"--plot: {error}") from None
