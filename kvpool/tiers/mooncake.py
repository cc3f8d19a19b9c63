"""MooncakeTier: records in a Mooncake Store, the memory of many machines."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.numbers import INT64_MAX, positive_seconds, whole_number
from kvpool.tiers.contract import Key, check_keys, check_name, check_rows
from kvpool.tiers.mooncake_buffers import MooncakeBuffers
from kvpool.tiers.mooncake_engine import LEAST_SEGMENT_BYTES, connect, import_store
from kvpool.tiers.open_calls import OpenCalls

# From here on down, and -1, it is the master that failed; above, it is the record.
_MASTER_FAILED = -900
# When the engine gives up whatever it does at the latest.
_LONGEST_CALL_S = 60.0


class MooncakeTier:
    """Keeps records in a Mooncake Store, which instances on many machines share.

    A master knows where records are; they lie in segments of memory that clients lend to the
    store, this one too if `segment_bytes` says so, and move from there into the rows of the caller
    without a copy in between where `register` was told of them.

    Parameters
    ----------
    metadata : str
        Of the metadata server, ``"http://host:port/metadata"``.
    master : str
        ``"host:port"``.
    local_hostname : str
        Address by which other clients reach this one.
    segment_bytes : int
        Memory that this process lends to the store for as long as the tier is open: none, or 16
        MiB and more. The records in
        it, of whatever instance, are gone when the process is.
    buffer_bytes : int
        Memory of the engine's own for transfers.
    protocol, device : str
        ``"tcp"``, or ``"rdma"`` and the names of its devices.
    num_replicas : int
        Segments that each record of ours is stored in.
    name : str
        What counters and messages call this tier.
    timeout_s : float
        How long the engine waits for an answer of the master, and for bytes of a transfer.

    Raises
    ------
    ImportError
        Mooncake is not installed: extra ``mooncake``.
    ConnectionError
        No master or metadata server answers, or the engine refuses.
    TypeError, ValueError
        An address that is none, a number out of range.

    Notes
    -----
    A record that was found is under a lease for some seconds, ten unless the master was told
    otherwise: it is not evicted meanwhile, and a full store takes no record that needs its room.
    A key that has a record keeps it, a `write` to it costs one question to the master; `remove` is
    how a damaged one goes.
    """

    def __init__(
        self,
        metadata: str,
        master: str,
        *,
        local_hostname: str = "127.0.0.1",
        segment_bytes: int = 0,
        buffer_bytes: int = 16 << 20,
        protocol: str = "tcp",
        device: str = "",
        num_replicas: int = 1,
        name: str = "mooncake",
        timeout_s: float = 5.0,
    ) -> None:
        whole_number(num_replicas, "num_replicas", 1)
        self.name = check_name(name)
        self.segment_bytes = whole_number(segment_bytes, "segment_bytes", 0, INT64_MAX)
        if 0 < self.segment_bytes < LEAST_SEGMENT_BYTES:
            raise ValueError(
                f"segment_bytes must be at least {LEAST_SEGMENT_BYTES}, which is the least that a "
                f"store borrows, or 0, got {segment_bytes}"
            )
        self._master = master
        self._timeout_s = positive_seconds(timeout_s, "timeout_s")
        self._client = connect(
            metadata,
            master,
            local_hostname=local_hostname,
            segment_bytes=segment_bytes,
            buffer_bytes=whole_number(buffer_bytes, "buffer_bytes", 1, INT64_MAX),
            protocol=protocol,
            device=device,
            timeout_s=timeout_s,
        )
        self._replicas = _replicas(num_replicas)
        self._calls = OpenCalls(f"tier {name!r}")
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._buffers = MooncakeBuffers(self._client)
        self._close_at_exit = _closer(self)
        atexit.register(self._close_at_exit)

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key has a record; that it was asked for gives it a lease.

        Raises
        ------
        ConnectionError
            The master does not answer.
        """
        check_keys(keys)
        with self._calls.call():
            codes = self._client.batch_is_exist(_names(keys))
        self._check(codes)
        return [code == 1 for code in codes]

    def read(self, keys: Sequence[Key], rows: NDArray[np.uint8]) -> list[bool]:
        """Fill ``rows[i]`` with the record of ``keys[i]``.

        A record whose segment is gone is a miss. One whose segment hangs, on a machine that is
        stopped say, is a miss after the time-out; four are waited for at once.

        Raises
        ------
        ConnectionError
            The master does not answer.
        """
        check_rows(keys, rows, fill=True)

        def get(keys: Sequence[Key], places: list[int], lengths: list[int]) -> Sequence[int]:
            codes: list[int] = self._client.batch_get_into(_names(keys), places, lengths)
            return codes

        with self._calls.call():
            codes = self._buffers.move(get, keys, rows, fill=False)
        self._check(codes)
        # The engine gives the length that it found, which may be another one.
        answers = [code == rows.shape[1] for code in codes]
        self._count("read_records", "missed_records", answers)
        return answers

    def write(self, keys: Sequence[Key], rows: NDArray[np.uint8]) -> list[bool]:
        """Store each row whose key has no record yet; False where the store has no room.

        Raises
        ------
        ConnectionError
            The master does not answer.
        """
        check_rows(keys, rows)

        def put(keys: Sequence[Key], places: list[int], lengths: list[int]) -> Sequence[int]:
            codes: list[int] = self._client.batch_put_from(
                _names(keys), places, lengths, self._replicas
            )
            return codes

        with self._calls.call():
            codes = self._buffers.move(put, keys, rows, fill=True)
        self._check(codes)
        answers = [code == 0 for code in codes]
        self._count("written_records", "refused_records", answers)
        return answers

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        """Forget records, under a lease or not; whether each was there.

        Raises
        ------
        ConnectionError
            The master does not answer.
        """
        check_keys(keys)
        with self._calls.call():
            # Forced: a lease would keep a record that did not verify.
            codes = self._client.batch_remove(_names(keys), True)
        self._check(codes)
        return [code == 0 for code in codes]

    def register(self, buffer: NDArray[np.uint8]) -> None:
        """Let the engine move records from and into `buffer` itself.

        Raises
        ------
        ValueError
            It is not contiguous, or overlaps one that is registered already.
        """
        with self._calls.call():
            self._buffers.register(buffer)

    def unregister(self, buffer: NDArray[np.uint8]) -> None:
        """Undo one `register`; no call may use the buffer now."""
        with self._calls.call():
            self._buffers.unregister(buffer)

    def stats(self) -> Mapping[str, int]:
        """What this client did; how full the store is, its master tells on its metrics port."""
        with self._lock:
            return {
                "segment_bytes": self.segment_bytes,
                "registered_bytes": self._buffers.num_bytes,
                "copied_records": self._buffers.num_copied,
                **{name: self._counts[name] for name in _COUNTED},
            }

    def close(self) -> None:
        """Leave the store, with the records in our segment; waits for calls that run.

        The engine takes a second or two, and holds the GIL while it does.

        Raises
        ------
        TimeoutError
            A call is still inside of the engine; a later close will do.
        """
        if not self._calls.refuse(_LONGEST_CALL_S + self._timeout_s):
            raise TimeoutError(f"tier {self.name!r} cannot be closed: a call has not come back")
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            atexit.unregister(self._close_at_exit)
            # A second call, or any other one afterwards, would crash.
            client.close()

    # ---- counting

    def _check(self, codes: Sequence[int]) -> None:
        failed = [code for code in codes if code <= _MASTER_FAILED or code == -1]
        if failed:
            raise ConnectionError(
                f"Mooncake's master at {self._master} does not answer (code {failed[0]} for "
                f"{len(failed)} of {len(codes)} records)"
            )

    def _count(self, done: str, not_done: str, answers: list[bool]) -> None:
        with self._lock:
            self._counts[done] += sum(answers)
            self._counts[not_done] += len(answers) - sum(answers)


_COUNTED = (
    "read_records",
    "missed_records",
    "written_records",
    "refused_records",
)


def _names(keys: Sequence[Key]) -> list[str]:
    return [f"kvpool-{key.hex()}" for key in keys]


def _replicas(num_replicas: int) -> Any:
    config = import_store().ReplicateConfig()
    config.replica_num = num_replicas
    return config


def _closer(tier: MooncakeTier) -> Callable[[], None]:
    """Closes a tier that was left open when the interpreter ends.

    A thread that is inside of the engine then would abort the process when it comes back.
    """
    left = weakref.ref(tier)

    def close() -> None:
        found = left()
        if found is not None:
            with suppress(TimeoutError):
                found.close()

    return close
