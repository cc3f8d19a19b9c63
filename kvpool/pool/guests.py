"""PoolGuests: what torch and FlashInfer make of a pool, imported when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool.pool.core import PoolCore

if TYPE_CHECKING:
    from kvpool.interop.flashinfer import FlashInferWorkspace


class PoolGuests(PoolCore):
    """Calls of a pool that need its guests, or what they need before a capture."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # What guests made for this pool and live as long as it: tensors, a workspace.
        self._guests: dict[str, Any] = {}

    def warm_up(self) -> None:
        """Compile all kernels that the pool can need, for rows of every dtype.

        Compiling is forbidden in a graph capture, and takes a second on a first run: call this
        before either matters. Code is kept on disk, so that later processes only load it. If
        torch is loaded, its tensors over the buffers are made as well.
        """
        # Here and not above: a pool must not need its guests.
        from kvpool.interop import torch as tensors

        # Not held: it may take a minute, touches no slot, and another thread may want `stats`.
        self._gate.check()
        self._open_storage().warm_up()
        tensors.warm_up(self)  # type: ignore[arg-type]

    @property
    def flashinfer_workspace(self) -> FlashInferWorkspace | None:
        """What FlashInfer needs to attend here; None where it is absent, and on a CPU pool."""
        if self._device.kind != "cuda":
            return None
        from kvpool.interop.flashinfer import workspace_of

        return workspace_of(self)  # type: ignore[arg-type]
