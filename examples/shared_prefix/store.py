"""The store between the processes: how to reach it, and a master of Mooncake for one run."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

START_S = 20.0
SEGMENT_BYTES = 1 << 30  # what each process lends to the store
DIRECTORY_BYTES = 4 << 30


@dataclass(frozen=True)
class StoreAddress:
    """Where the store is: of a master and its metadata server, or a directory."""

    master: str = ""
    metadata: str = ""
    directory: str = ""

    def arguments(self) -> list[str]:
        """As the arguments of a worker."""
        return [self.master, self.metadata, self.directory]

    def open(self) -> Any:
        """Return a tier of this process."""
        if self.directory:
            from kvpool.tiers.file import FileTier

            return FileTier(self.directory, DIRECTORY_BYTES)
        from kvpool.tiers.mooncake import MooncakeTier

        return MooncakeTier(self.metadata, self.master, segment_bytes=SEGMENT_BYTES)


class MooncakeMaster:
    """A master with its metadata server, on loopback; a context that ends it.

    Raises
    ------
    RuntimeError
        Mooncake is not installed, or the master does not start; says why.
    """

    def __init__(self) -> None:
        spec = find_spec("mooncake")
        if spec is None or not spec.submodule_search_locations:
            raise RuntimeError(
                "Mooncake is not installed: pip install mooncake-transfer-engine-non-cuda, or "
                "share a directory with --directory"
            )
        self._program = Path(spec.submodule_search_locations[0]) / "mooncake_master"
        self._rpc, self._http, self._metrics = free_ports(3)
        self.address = StoreAddress(
            f"127.0.0.1:{self._rpc}", f"http://127.0.0.1:{self._http}/metadata"
        )
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> MooncakeMaster:
        self._log = tempfile.TemporaryFile()
        command = [
            str(self._program),
            f"--rpc_port={self._rpc}",
            "--rpc_address=127.0.0.1",
            "--enable_http_metadata_server=true",
            f"--http_metadata_server_port={self._http}",
            "--http_metadata_server_host=127.0.0.1",
            f"--metrics_port={self._metrics}",
            "--metrics_host=127.0.0.1",
            "--logtostderr=true",
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        try:
            give_up = time.monotonic() + START_S
            while not (answers(self._rpc) and answers(self._http)):
                if self._process.poll() is not None or time.monotonic() > give_up:
                    self._log.seek(0)
                    said = self._log.read().decode(errors="replace")[-2000:]
                    raise RuntimeError(f"the master did not start; it said:\n{said}")
                time.sleep(0.05)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._log.close()

    def kill(self) -> None:
        """End it as a crash would; again does nothing."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def free_ports(count: int) -> list[int]:
    """Return as many ports of loopback that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def answers(port: int) -> bool:
    """Return whether somebody listens on a port of loopback."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
        return True
    return False


def worker_command(address: StoreAddress, model: str) -> list[str]:
    """Return the command of a worker that uses this store."""
    return [sys.executable, "-m", "examples.shared_prefix.worker", model, *address.arguments()]
