"""PoolRestarts: cached prefixes that outlive the process."""

from __future__ import annotations

import inspect
import os
from functools import partial
from typing import Any, TypeVar

from kvpool.device import Device, device_of
from kvpool.errors import SnapshotError
from kvpool.numbers import whole_number
from kvpool.poison import PoisonedTable
from kvpool.pool.core import PoolCore
from kvpool.snapshot import (
    Fingerprint,
    LoadReport,
    SaveReport,
    Snapshot,
    check_model,
    fill_pool,
    save_snapshot,
)

Pool = TypeVar("Pool", bound="PoolRestarts")

# Arguments of a pool that a snapshot decides; a caller who gives one says what to expect.
_DECIDED = (
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "page_size",
    "dtype",
    "compute_dtype",
    "k_scale",
    "v_scale",
)

_HOST_BYTES = 8  # a slot's share of tokens and page ids, on the host


class PoolRestarts(PoolCore):
    """Calls of a pool that save it and bring it back."""

    _load_report: LoadReport | None = None

    def save(self, path: str | os.PathLike[str], *, model: str = "") -> SaveReport:
        """Write all cached pages to one file: tokens, namespaces, priorities, K and V.

        The pool does not change, and requests may be bound: what they share with the tree is
        saved, what is private to them is not. The file is written beside `path`, brought to the
        disk and renamed: killed at any moment, a save leaves the old file or the new one. It takes
        the scheduler thread for as long as the disk and the checksums do.

        Parameters
        ----------
        path : path
            Where to. A file that is there is replaced and its mode kept, and where permitted its
            owner and group; where the group is not, another group gets no rights. A new file has
            the mode that the umask says: the prompts of all users are in it.
        model : str
            What tells this model's K and V from any other's: a hash of the weights, or a name and
            a revision. `load` must give the same. Give it: without it, here and there, any model
            of this shape is taken for yours, and its K and V are served.

        Raises
        ------
        OSError
            A missing directory, no permission, a full disk; what was at `path` is as before.
        TypeError
            `model` is no str.
        SnapshotError
            `path` is a device or the like, or `model` is too long or no text.
        KVCacheCorruptionError
            In poison mode: a page that would be saved is not what was cached. Nothing is written.
        """
        try:
            self._gate.enter()
            storage = self._open_storage()
            fingerprint = Fingerprint.of(
                model,
                self._layout,
                self._page_size,
                self._dtype,
                self._k_scale,
                self._v_scale,
            )
            requests, confirm = self._requests, None
            if isinstance(requests, PoisonedTable):
                confirm = partial(requests.ledger.check_cached, what="a save")
            return save_snapshot(os.fsdecode(path), self.radix, storage, fingerprint, confirm)
        finally:
            self._gate.leave()

    @classmethod
    def load(
        cls: type[Pool],
        path: str | os.PathLike[str],
        *,
        model: str = "",
        device: Any = "cpu",
        num_slots: int | None = None,
        **pool_options: Any,
    ) -> Pool:
        """A new pool with the cached pages of a file that `save` wrote.

        Only pages that verify are loaded, with all pages above them; `load_report` says which were
        not. Eviction takes them in the order in which it would have taken them in the saved pool;
        counts of uses (lfu) start again. A smaller pool gets those that eviction would take last.

        Parameters
        ----------
        path : path
            The file.
        model : str
            As it was given to `save`. Give it: without it, here and there, any model of this
            shape is taken for yours, and its K and V are served.
        device : str or Device
            Where the pool shall live; the saved one may have lived elsewhere.
        num_slots : int, optional
            Slots of the pool; default as saved.
        pool_options
            As the constructor. Shape, dtypes and scales come from the file: to give one is to say
            what it must be. `eviction` is by default the saved policy.

        Raises
        ------
        SnapshotError
            Not a snapshot, a newer format, header or tree do not verify, or a difference of model,
            shape, dtypes or scales, each of them listed, or a pool larger than the machine.
        OSError
            No such file, no permission, a directory.
        TypeError
            `model` is no str, or an option that there is not.
        """
        check_model(model)
        place = device_of(device)
        with Snapshot(os.fsdecode(path)) as snapshot:
            contents = snapshot.contents
            fingerprint = contents.fingerprint
            given = {name: pool_options.pop(name) for name in _DECIDED if name in pool_options}
            fingerprint.require({"model": model} | given)
            slots = contents.num_slots if num_slots is None else num_slots
            slots = whole_number(slots, "num_slots", at_least=1)
            _check_fits(slots, fingerprint, place)
            try:
                pool = cls(
                    fingerprint.num_layers,
                    slots,
                    fingerprint.num_kv_heads,
                    fingerprint.head_dim,
                    page_size=fingerprint.page_size,
                    device=place,
                    dtype=fingerprint.dtype,
                    compute_dtype=fingerprint.compute_dtype,
                    k_scale=fingerprint.k_scale,
                    v_scale=fingerprint.v_scale,
                    **({"eviction": contents.eviction} | pool_options),
                )
            except TypeError:
                known = inspect.signature(PoolCore.__init__).parameters
                if strange := sorted(pool_options.keys() - known.keys()):
                    raise TypeError(f"load takes no option {', '.join(strange)}") from None
                raise
            except MemoryError as error:
                raise _too_large(slots, f"there is no memory for it ({error})") from error
            storage = pool._open_storage()
            pool._load_report = fill_pool(snapshot, pool._requests.ledger, storage)
            return pool

    @property
    def load_report(self) -> LoadReport | None:
        """What `load` brought back and what it dropped; None for a pool that was not loaded."""
        return self._load_report


def _check_fits(num_slots: int, fingerprint: Fingerprint, device: Device) -> None:
    """Refuse what the whole machine could not hold before it is asked to: the file said so."""
    found = device.read_memory()
    total = found[0] if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    slot_bytes = fingerprint.page_bytes // fingerprint.page_size + _HOST_BYTES
    needed = num_slots * slot_bytes
    if needed > total:
        raise _too_large(num_slots, f"that takes {needed} bytes, {device} has {total}")


def _too_large(num_slots: int, why: str) -> SnapshotError:
    return SnapshotError(
        f"a pool of {num_slots} slots was to be made of the snapshot, and {why}: pass a smaller "
        "num_slots"
    )
