"""Where a stream is published: by default on this machine only, for its events hold prompts."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import stat

from kvpool.events.guests import zmq

_TCP = re.compile(r"tcp://(\[[^\]]*\]|[^:\[\]]*):(\d{1,5}|\*)")
_HIGHEST_PORT = 65535


def check_endpoint(endpoint: str, name: str, allow_remote: bool) -> str:
    """`endpoint`, if a socket may be bound to it.

    Raises
    ------
    TypeError, ValueError
        No endpoint, or one that other machines reach while `allow_remote` is False.
    """
    if not isinstance(endpoint, str):
        raise TypeError(f"{name} must be a str, got {type(endpoint).__name__}")
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return endpoint
    match = _TCP.fullmatch(endpoint)
    port = match and match.group(2)
    if not match or not match.group(1) or (port != "*" and int(match.group(2)) > _HIGHEST_PORT):
        raise ValueError(
            f"{name} must be tcp://host:port, with a port in 0 .. {_HIGHEST_PORT} (0: any free "
            f"one), or ipc://path, got {endpoint!r}"
        )
    host = match.group(1).strip("[]")
    if not allow_remote and not _is_loopback(host):
        raise ValueError(
            f"{name} {endpoint!r} may be reached from other machines, and events hold the tokens "
            "of all prompts: take 127.0.0.1, or pass allow_remote=True on a network that you trust"
        )
    return endpoint


def _is_loopback(host: str) -> bool:
    if host in ("localhost", "lo"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name or an interface: nobody knows where it leads


def bind(bound: zmq.Socket[bytes], endpoint: str, name: str) -> str:
    """Bind a socket; the endpoint that it got, with the port that the system chose.

    Raises
    ------
    OSError
        It is in use, or cannot be bound to; nothing has changed.
    """
    if "[" in endpoint:
        bound.setsockopt(zmq.IPV6, 1)
    if endpoint.startswith("ipc://"):
        _refuse_taken(endpoint, name)
    try:
        bound.bind(endpoint)
    except zmq.ZMQError as error:
        number = error.errno
        if number == errno.EADDRINUSE:
            raise _in_use(endpoint, name) from None
        raise OSError(number, f"{name} {endpoint} cannot be bound to: {error.strerror}") from None
    found = bound.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(found, bytes)
    return found.rstrip(b"\0").decode()


def _refuse_taken(endpoint: str, name: str) -> None:
    """OSError for a path that somebody listens at, or a file: ZeroMQ would delete either."""
    path = endpoint.removeprefix("ipc://")
    if path[0] in "*@":
        return
    try:
        kind = os.stat(path).st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(kind):
        raise FileExistsError(errno.EEXIST, f"{name} {endpoint} is no socket: take another path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return  # left behind
    raise _in_use(endpoint, name)


def _in_use(endpoint: str, name: str) -> OSError:
    return OSError(
        errno.EADDRINUSE,
        f"{name} {endpoint} is in use, by another publisher perhaps: take another port, or 0 for "
        "any free one",
    )
