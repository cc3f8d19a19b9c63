"""``kvpool doctor``: what is here, whether it works, and what to install."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvpool.cli.help import examples, paragraphs
from kvpool.cli.numbers import option_value
from kvpool.cli.output import console, error_console, print_json, print_table
from kvpool.doctor import DONE, Finding, Report, examine
from kvpool.kernels.capabilities import OLDEST

# What a person reads, and how it looks.
_WORDS = {
    "ok": ("ok", "green"),
    "absent": ("absent", "dim"),
    "note": ("note", "yellow"),
    "unfit": ("does not fit", "bold red"),
    "broken": ("broken", "bold red"),
}
_NARROW = 70  # columns: below, a finding is two lines

_WORKS = {**_WORDS, "ok": ("yes", "green"), "absent": ("no", "dim")}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "doctor",
        help=paragraphs(
            """Say what is installed here, whether it works and fits together, and what to install.

            Looks at kvpool, its compiled part and the packages that it works with, at the driver
            and the GPU; compiles the CUDA kernels to machine code, for which no GPU is needed;
            tries pools, on the CPU and on the GPU where there is one. Nothing is changed but
            caches of compiled kernels.

            Exit code 0: all that is installed works. 3: something that is installed does not
            work, or does not fit the rest; what is absent is no failure."""
        ),
        epilog=examples(
            "kvpool doctor",
            "kvpool doctor --no-compile",
            "kvpool doctor --capability 8.0",
            "kvpool doctor --json",
        ),
    )(doctor)


def doctor(
    capability: Annotated[
        str | None,
        typer.Option(
            metavar="X.Y",
            help="Compute capability to compile the CUDA kernels for: 8.0 (A100), 9.0 (H100, "
            "H200), 10.0 (B200). Default: that of the first GPU, else 9.0.",
        ),
    ] = None,
    compile_kernels: Annotated[
        bool,
        typer.Option(
            "--compile/--no-compile",
            help="Compile the CUDA kernels, and FlashInfer's where there is a GPU: some 20 "
            "seconds, the first time a minute or more.",
        ),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Examine this machine, tell, and exit with 0 or 3."""
    wanted = None
    if capability is not None:
        wanted = option_value("--capability", parse_capability, capability)
    with error_console().status("") as status:
        report = examine(wanted, compile_kernels, lambda doing: status.update(f"{doing} ..."))
    if as_json:
        print_json(report.as_dict())
    else:
        _print_report(report)
    raise typer.Exit(report.exit_code)


def parse_capability(text: str) -> tuple[int, int]:
    """Compute capability behind ``9.0``, ``90`` or ``sm_90``.

    Raises
    ------
    ValueError
        Something else, or older than kernels need.

    >>> parse_capability("9.0"), parse_capability("sm_120")
    ((9, 0), (12, 0))
    """
    found = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)", text.strip(), re.ASCII)
    if found is None:
        raise ValueError(f"expected a compute capability such as 9.0, got {text!r}")
    capability = int(found[1]), int(found[2])
    if capability < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ValueError(f"kernels are compiled for {oldest} and later, got {text}")
    return capability


def _print_report(report: Report) -> None:
    out = console()
    for section in report.sections:
        _print_findings(out, section.title, section.findings, _WORDS)
    kernels = report.kernels.get("kernels", [])
    if kernels and not any(kernel["error"] for kernel in kernels):
        print_table(*kernel_table(kernels))
        out.print()
    _print_findings(out, "What works", report.works, _WORKS)
    advised = [finding for finding in report if finding.advice]
    if advised:
        out.print(Text("What to do", style="bold"))
    for finding in advised:
        out.print(Text(f"  {finding.name}:", style=_WORDS[finding.state][1]))
        # Not broken at the width of the terminal: commands are copied.
        out.print(Text(f"    {finding.advice}"), soft_wrap=True)
    if advised:
        out.print()
    if report.exit_code == DONE:
        out.print("All that is installed works.")
    else:
        failed = dict.fromkeys(finding.name for finding in report if finding.failed)
        out.print(Text(f"Not everything works: {', '.join(failed)}.", style="bold red"))


def _print_findings(
    out: Console, title: str, findings: Sequence[Finding], words: Mapping[str, tuple[str, str]]
) -> None:
    out.print(Text(title, style="bold"))
    if out.width < _NARROW:
        for finding in findings:
            word, style = words[finding.state]
            out.print(Text.assemble(f"  {finding.name}: ", (word, style)))
            out.print(Padding(Text(finding.value, overflow="fold"), (0, 0, 0, 4), expand=False))
    else:
        # No frame: the text is what counts.
        grid = Table.grid(padding=(0, 2))
        for finding in findings:
            word, style = words[finding.state]
            cells = Text(f"  {finding.name}"), Text(word, style=style), Text(finding.value)
            grid.add_row(*cells)
        for column in grid.columns[:2]:
            column.no_wrap = True
        grid.columns[2].overflow = "fold"
        out.print(grid)
    out.print()


def kernel_table(
    kernels: Sequence[Mapping[str, Any]],
) -> tuple[str, Sequence[str], list[tuple[str | int, ...]]]:
    """Title, columns and rows: one row a kernel, over its variants."""
    by_kernel: dict[str, list[Mapping[str, Any]]] = {}
    for variant in kernels:
        by_kernel.setdefault(variant["kernel"], []).append(variant)
    rows: list[tuple[str | int, ...]] = [
        (
            name,
            len(variants),
            max(variant["registers"] for variant in variants),
            sum(variant["spills"] for variant in variants),
            sum(variant["bytes"] for variant in variants),
            f"{sum(variant['seconds'] for variant in variants):.1f}",
        )
        for name, variants in by_kernel.items()
    ]
    columns = ("kernel", "variants", "registers", "spilled bytes", "bytes", "seconds")
    return "CUDA kernels", columns, rows
