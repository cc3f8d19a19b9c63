"""The command line, behind the extra `cli`: ``kvpool`` and ``python -m kvpool``.

`kvpool.cli.app` is the typer application, for tests; it is imported when it is asked for, so that
`main` can say in one line what to install where typer is absent.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.cli.application import app as app

__all__ = ["app", "main"]

_EXTRA = ("typer", "rich")


def main() -> None:
    """Run the command line on ``sys.argv`` and exit with its code."""
    try:
        from kvpool.cli.application import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        sys.exit("the command line needs the extra cli: pip install 'kvpool[cli]'")
    except KeyboardInterrupt:  # while the imports run; later the application sees to it
        sys.exit(130)
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal lacks is a question mark then, not a traceback.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    app(prog_name="kvpool")


def __getattr__(name: str) -> Any:
    if name == "app":
        from kvpool.cli.application import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
