"""The typer application: its commands, and how every one of them ends."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import kvpool
from kvpool.cli import doctor, plan, replay
from kvpool.cli.output import CommandError, error_console, print_error

INTERRUPTED = 130  # 128 + SIGINT
PIPE_CLOSED = 141  # 128 + SIGPIPE


class Commands(TyperGroup):
    """Ends all commands alike: bad input without a traceback, a bug with one."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments; ``--help`` and ``--version`` write, so pipes may close here too."""
        with _orderly_end():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        with _orderly_end():
            result = super().invoke(ctx)
            sys.stdout.flush()  # a closed pipe shows here, not while the interpreter ends
            return result


@contextmanager
def _orderly_end() -> Iterator[None]:
    try:
        yield
    except CommandError as error:
        print_error(str(error))
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        error_console().print("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        _drop_output()
        raise typer.Exit(PIPE_CLOSED) from None
    except SystemExit as error:
        # rich makes this of a closed pipe.
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        raise typer.Exit(PIPE_CLOSED) from None


def _drop_output() -> None:
    """What is left in the buffer of a closed pipe must not fail again when Python ends."""
    # A stdout that a test has replaced has no number.
    with suppress(io.UnsupportedOperation), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


app = typer.Typer(
    name="kvpool",
    cls=Commands,
    help="KV-cache pools for LLM inference: how much fits, what reuse gives, what works here.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvpool {kvpool.__version__}")
        raise typer.Exit


@app.callback()
def _common_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


for _command in (plan, replay, doctor):
    _command.register(app)
