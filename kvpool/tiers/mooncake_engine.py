"""The door to Mooncake: its client, set up so that what does not answer is an error in time.

What the engine does by itself, as measured with 0.3.13: ``setup`` tries twenty times, a minute and
a half in all where no master listens, and keeps the GIL, so that no thread of the process runs
meanwhile. So everything is asked for before that by plain sockets, and the engine is told to give
up early. It reads such settings from the environment, where those that are there already hold.
"""

from __future__ import annotations

import math
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

# What the engine's allocator takes at least.
LEAST_SEGMENT_BYTES = 16 << 20
_HIGHEST_PORT = 65535
# Else it tells of each step on stderr. Read where the library is loaded.
_QUIET = {"MC_LOG_LEVEL": "ERROR"}
# One more try, for a port that another client took meanwhile.
_OF_SETUP = {"MC_STORE_CLIENT_SETUP_RETRIES": "2"}
_OF_TRANSFERS = ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC")


def connect(
    metadata: str,
    master: str,
    *,
    local_hostname: str,
    segment_bytes: int,
    buffer_bytes: int,
    protocol: str,
    device: str,
    timeout_s: float,
) -> Any:
    """A client of a Mooncake Store, as its own Python package gives it.

    Raises
    ------
    TypeError, ValueError
        Arguments that are no text, or no addresses.
    ImportError
        The package is missing, or a library that it needs.
    ConnectionError
        No master or metadata server answers, or they refuse this client.
    """
    for name, text in (
        ("metadata", metadata),
        ("master", master),
        ("local_hostname", local_hostname),
        ("protocol", protocol),
        ("device", device),
    ):
        if not isinstance(text, str):
            raise TypeError(f"{name} must be a str, got {type(text).__name__}")
        if not text and name != "device":
            raise ValueError(f"{name} is empty: docs/howto/mooncake.md says what belongs there")
    _check_metadata(metadata)
    host, port = _host_and_port(master)
    store = import_store()
    _ask_master(host, port, timeout_s)
    _ask_metadata(metadata, timeout_s)
    client = store.MooncakeDistributedStore()
    seconds = str(math.ceil(timeout_s))
    for name in _OF_TRANSFERS:
        # Read at the first transfer, so it has to stay.
        os.environ.setdefault(name, seconds)
    with _environment({**_OF_SETUP, "MC_RPC_TIMEOUT_MS": str(math.ceil(1000 * timeout_s))}):
        code = client.setup(
            local_hostname, metadata, segment_bytes, buffer_bytes, protocol, device, master
        )
    if code:
        raise ConnectionError(
            f"Mooncake's client could not be set up (code {code}): master {master}, metadata "
            f"{metadata}, protocol {protocol!r}, {segment_bytes} bytes to share as "
            f"{local_hostname!r}; with MC_LOG_LEVEL=INFO it says more on stderr"
        )
    return client


def import_store() -> Any:
    """The module ``mooncake.store``.

    Raises
    ------
    ImportError
        It is missing, or a library of the system that it needs.
    """
    with _environment(_QUIET):
        try:
            import mooncake.store
        except ImportError as error:
            raise ImportError(
                f"a MooncakeTier needs Mooncake, which cannot be imported ({error}): install "
                "kvpool[mooncake], and the libraries of the system that docs/howto/mooncake.md "
                "names"
            ) from error
    return mooncake.store


def _check_metadata(metadata: str) -> None:
    # The engine would take what has no scheme for an etcd, and wait ten seconds for it, twice.
    if "://" not in metadata and metadata != "P2PHANDSHAKE":
        raise ValueError(
            f"metadata must be a URL such as 'http://host:8080/metadata' or 'etcd://host:2379', "
            f"got {metadata!r}"
        )


def _host_and_port(master: str) -> tuple[str, int]:
    host, _, port = master.rpartition(":")
    is_number = port.isascii() and port.isdigit() and len(port) <= len(str(_HIGHEST_PORT))
    if not host or "/" in host or not is_number or not 0 < int(port) <= _HIGHEST_PORT:
        raise ValueError(
            f"master must be 'host:port' with a port in 1 .. {_HIGHEST_PORT}, got {master!r}"
        )
    return host, int(port)


def _ask_master(host: str, port: int, timeout_s: float) -> None:
    try:
        socket.create_connection((host.strip("[]"), port), timeout_s).close()
    except OSError as error:
        raise ConnectionError(
            f"no Mooncake master answers at {host}:{port} within {timeout_s} s ({error}): start "
            "one with mooncake_master --rpc_port"
        ) from None


def _ask_metadata(metadata: str, timeout_s: float) -> None:
    # Others, etcd say, have clients of their own in the engine.
    if urlsplit(metadata).scheme != "http":
        return
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(f"{metadata}?key=kvpool", timeout=timeout_s).close()
    except urllib.error.HTTPError as error:
        error.close()  # it answers; there is no such key
    except OSError as error:
        raise ConnectionError(
            f"no metadata server answers at {metadata} within {timeout_s} s ({error}): start the "
            "master with --enable_http_metadata_server=true, or name the one that it uses"
        ) from None


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Settings of the environment for a while; those that are there already stay."""
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
