"""The command line: two workers, the same chats, with the store and without it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from examples.shared_prefix import report
from examples.shared_prefix.store import MooncakeMaster, StoreAddress, worker_command
from examples.smollm2.weights import ModelNotFoundError, find_gguf
from examples.smollm2.workload import load_requests

REQUESTS = Path(__file__).parents[1] / "smollm2" / "requests.json"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class WorkerProcess:
    """A worker, as its parent sees it; a context that ends it."""

    def __init__(self, address: StoreAddress, model: str) -> None:
        self._command = worker_command(address, model)

    def __enter__(self) -> WorkerProcess:
        # Mooncake's engine says much when its master is gone; it is shown if the worker fails.
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(30.0)
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
            self._errors.close()

    def wait_until_ready(self) -> None:
        """Wait for its model and its tier."""
        self._read()

    def serve(self, chats: list[list[dict[str, str]]], max_tokens: int) -> dict[str, Any]:
        """Have it answer; what it says of that."""
        assert self._process.stdin is not None
        print(
            json.dumps({"chats": chats, "max_tokens": max_tokens}),
            file=self._process.stdin,
            flush=True,
        )
        found: dict[str, Any] = self._read()
        return found

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace")[-2000:]
            raise RuntimeError(f"a worker ended with {code}; it said:\n{said}")
        return json.loads(line)


def model_name() -> str:
    """Return a name that no other weights have: page keys begin with it."""
    digest = hashlib.sha256()
    with find_gguf().open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return f"smollm2-135m-instruct@{digest.hexdigest()}"


def chats_of(num_chats: int) -> list[list[dict[str, str]]]:
    """Return the first chats of the example's requests: one system prompt, other questions."""
    requests = [each for each in load_requests(REQUESTS) if each.follows is None][:num_chats]
    return [
        [
            {"role": "system", "content": request.system or ""},
            {"role": "user", "content": request.user},
        ]
        for request in requests
    ]


@app.command()
def main(
    start_master: Annotated[
        bool, typer.Option("--start-master", help="Start a Mooncake master for this run.")
    ] = False,
    master: Annotated[str, typer.Option(help="host:port of a master that is there.")] = "",
    metadata: Annotated[
        str, typer.Option(help="Its metadata server, http://host:port/metadata.")
    ] = "",
    directory: Annotated[
        str, typer.Option(help="Share this directory instead; '-' for a temporary one.")
    ] = "",
    chats: Annotated[int, typer.Option(min=1, help="Chats to answer.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 24,
) -> None:
    """Two processes answer the same chats: the second with the pages of the first."""
    console = Console()
    if [start_master, bool(master and metadata), bool(directory)].count(True) != 1:
        raise typer.BadParameter(
            "give one of --start-master, --master with --metadata, or --directory"
        )
    messages = chats_of(chats)
    try:
        name = model_name()
        with ExitStack() as stack:
            own = stack.enter_context(MooncakeMaster()) if start_master else None
            if directory == "-":
                directory = stack.enter_context(tempfile.TemporaryDirectory())
            address = StoreAddress(master, metadata, directory) if own is None else own.address
            with console.status("starting two processes"):
                first, second = (
                    stack.enter_context(WorkerProcess(address, name)) for _ in range(2)
                )
                first.wait_until_ready()
                second.wait_until_ready()
            rounds: dict[str, dict[str, Any]] = {}
            with console.status("answering"):
                rounds["process 1, store empty"] = first.serve(messages, max_tokens)
                rounds["process 2, pages of 1"] = second.serve(messages, max_tokens)
                if own is not None:
                    own.kill()
                    rounds["process 2, master killed"] = second.serve(messages, max_tokens)
    except (ModelNotFoundError, RuntimeError) as error:
        console.print(f"[bold red]{error}[/bold red]", highlight=False)
        raise typer.Exit(1) from error
    if not report.show(console, rounds):
        raise typer.Exit(1)
