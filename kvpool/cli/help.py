"""Help texts: typer breaks their lines at the width of the terminal, so ours come unbroken."""

from __future__ import annotations

import inspect

from rich.markup import escape


def paragraphs(text: str) -> str:
    """A help text as it stands in a source file, each paragraph on one line; markup is escaped."""
    parts = inspect.cleandoc(text).split("\n\n")
    return escape("\n\n".join(" ".join(part.split()) for part in parts))


def examples(*commands: str) -> str:
    """The epilog of a command: what to type, one command a paragraph."""
    return escape("\n\n".join(("Examples:", *commands)))
