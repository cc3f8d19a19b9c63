"""A Valkey or Redis server of the tests' own."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from importlib.util import find_spec

from tests.helpers.mooncake import free_ports

START_S = 20.0


def why_no_valkey():
    """Why tests of Valkey cannot run here, or None."""
    if find_spec("valkey") is None:
        return "the client of Valkey is not installed"
    return None if _program() else "neither valkey-server nor redis-server is installed"


class Server:
    """A running server that keeps nothing on the disk; a context that ends it.

    Parameters
    ----------
    folder : pathlib.Path
        Where it runs.
    settings : str
        More of them, ``"--maxmemory", "2mb"`` say.
    """

    def __init__(self, folder, *settings):
        self._folder = folder
        self._settings = settings
        (self._port,) = free_ports(1)
        self.url = f"valkey://127.0.0.1:{self._port}/0"

    def __enter__(self):
        port = str(self._port)
        command = [_program(), "--port", port, "--bind", "127.0.0.1", "--save", ""]
        with (self._folder / "valkey.log").open("wb") as output:
            self._process = subprocess.Popen(
                [*command, *self._settings], cwd=self._folder, stdout=output, stderr=output
            )
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError((self._folder / "valkey.log").read_text())
            time.sleep(0.02)
        return self

    def __exit__(self, *_):
        self.kill()

    def kill(self):
        """End it as a crash would."""
        self._process.kill()
        self._process.wait()

    def _answers(self):
        address = ("127.0.0.1", self._port)
        with contextlib.suppress(OSError), socket.create_connection(address, 0.5):
            return True
        return False


def _program():
    return shutil.which("valkey-server") or shutil.which("redis-server")
