"""A Mooncake Store of the tests' own: a master, and clients in processes of their own."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
START_S = 20.0
_LEND = """
import sys
from kvpool.tiers.mooncake import MooncakeTier
tier = MooncakeTier(sys.argv[1], sys.argv[2], segment_bytes=int(sys.argv[3]))
print("ready", flush=True)
sys.stdin.read()
tier.close()
"""


def why_no_mooncake():
    """Why tests of Mooncake cannot run here, or None."""
    if find_spec("mooncake") is None:
        return "mooncake is not installed"
    from kvpool.tiers.mooncake_engine import import_store

    try:
        import_store()
    except (ImportError, OSError) as error:
        return f"mooncake cannot be loaded: {error}"
    return None


def skip_without_mooncake():
    """Skip the module that asks where Mooncake, or a library that it needs, is missing."""
    reason = why_no_mooncake()
    if reason:
        pytest.skip(reason, allow_module_level=True)


def free_ports(count):
    """As many ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Master:
    """A running master with its metadata server; a context that ends both, however it is left.

    Parameters
    ----------
    folder : pathlib.Path
        For what it says.
    flags : str
        More flags of ``mooncake_master``.

    Attributes
    ----------
    address, metadata : str
        What clients want to know.
    """

    def __init__(self, folder, *flags):
        self._output = folder / "mooncake_master.log"
        self._flags = flags
        self._ports = free_ports(3)
        rpc, http, _ = self._ports
        self.address = f"127.0.0.1:{rpc}"
        self.metadata = f"http://127.0.0.1:{http}/metadata"
        self._process = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()

    def start(self):
        """Start it, on the same ports if it ran before, and wait until it answers."""
        rpc, http, metrics = self._ports
        program = Path(find_spec("mooncake").submodule_search_locations[0]) / "mooncake_master"
        command = [
            program,
            f"--rpc_port={rpc}",
            "--rpc_address=127.0.0.1",
            "--enable_http_metadata_server=true",
            f"--http_metadata_server_port={http}",
            "--http_metadata_server_host=127.0.0.1",
            f"--metrics_port={metrics}",
            "--metrics_host=127.0.0.1",
            "--logtostderr=true",
            *self._flags,
        ]
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            deadline = time.monotonic() + START_S
            while not all(_answers(port) for port in (rpc, http)):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"mooncake_master did not start:\n{self.output()}")
                time.sleep(0.02)
        except BaseException:
            self.kill()
            raise

    def kill(self):
        """End it as a crash would."""
        _kill(self._process)

    def stop(self):
        """Let it hang: it answers nobody, and its connections stay."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self):
        """Undo `stop`."""
        self._process.send_signal(signal.SIGCONT)

    def output(self):
        """What it said."""
        return self._output.read_text(errors="replace")


class Lender:
    """A process with a tier that lends a segment to the store; a context like `Master`."""

    def __init__(self, master, segment_bytes):
        command = [sys.executable, "-c", _LEND, master.metadata, master.address]
        self._process = subprocess.Popen(
            [*command, str(segment_bytes)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        line = self._process.stdout.readline()  # empty where it ended instead
        if line != "ready\n":
            self.kill()
            raise RuntimeError(f"the lender did not start: {line!r}\n{master.output()}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def kill(self):
        """End it as a crash would."""
        _kill(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()

    def stop(self):
        """Let it hang, with the memory that it lends."""
        self._process.send_signal(signal.SIGSTOP)


def _answers(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
        return True
    return False


def _kill(process):
    if process is not None and process.poll() is None:
        process.kill()
    if process is not None:
        process.wait()
