"""PoisonedStep: a step that asks whose pages it writes, and whether what it read was written."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import KVCacheCorruptionError
from kvpool.poison.ledger import PoisonedLedger
from kvpool.poison.reading import can_look, read_of_poison
from kvpool.step import Positions, Step
from kvpool.words import page_owner
from kvpool_ext.windows import StepWindow


class PoisonedStep(Step):
    """`Step` of a poisoned pool; made by the pool."""

    _ledger: PoisonedLedger

    def _enter(self) -> None:
        super()._enter()
        # Asked of the books, not of the step's own memory: that is what may be wrong.
        for request in self._requests:
            if self._ledger.leases.get(request.tag) is not request:
                page = int(request.pages()[0])
                raise KVCacheCorruptionError(
                    f"a step uses request {request.tag} after its end, page {page} first (owner "
                    f"now: {page_owner(self._ledger, page)})",
                    page,
                )

    # ---- writing

    def _slots_of(self, window: StepWindow) -> NDArray[np.int64]:
        self._check_window(window)
        return super()._slots_of(window)

    def _is_own(self, slots: Any, window: StepWindow) -> bool:
        own = super()._is_own(slots, window)
        if not own and can_look(self._ledger):
            found = self._check_slots(slots, window.num_tokens)
            # Foreign arrays may run code when they are read, and this code give pages back: the
            # step notices that by itself.
            if self._seen_losses == self._ledger.num_losses:
                host = self._storage.device.to_host(found)
                pages = [lease.pages()[lease.shared_pages :] for lease in self._requests]
                self._check_pages(host, np.concatenate(pages), "a put writes")
        return own

    def _writable_buffers(self, graph: Any) -> Any:
        buffers = super()._writable_buffers(graph)
        if buffers.filling is not None and buffers.filling.window is not None:
            self._check_window(buffers.filling.window)
        return buffers

    def _positions(
        self, cache_len: Positions, start_pos: Positions, window_len: int
    ) -> tuple[NDArray[np.int64], StepWindow]:
        lengths, window = super()._positions(cache_len, start_pos, window_len)
        self._check_window(window)
        return lengths, window

    def _check_window(self, window: StepWindow) -> None:
        """KVCacheCorruptionError if a page that is to be written is free, or the tree's."""
        size, books = self._table.page_size, self._ledger.books
        for request, (start, end) in zip(self._requests, window.positions(), strict=True):
            if end == start:
                continue
            first = max(start // size, request.shared_pages)
            pages = request.pages()[first : -(-end // size)]
            bad = np.flatnonzero(books.is_free[pages] | books.is_cached[pages])
            if bad.size:
                index = first + int(bad[0])
                page = int(pages[bad[0]])
                raise KVCacheCorruptionError(
                    f"request {request.tag} would write positions [{max(start, index * size)}, "
                    f"{min(end, (index + 1) * size)}) to page {page}, which is not its own "
                    f"(owner: {page_owner(self._ledger, page)})",
                    page,
                )

    def _check_pages(self, slots: NDArray[Any], own: NDArray[np.int32], what: str) -> None:
        """KVCacheCorruptionError if a slot is on a page that is neither `own` nor taken."""
        inside = slots[(slots >= 0) & (slots < self._storage.num_slots)]
        pages = np.unique(inside // self._table.page_size)
        strange = pages[~np.isin(pages, own)]
        if strange.size:
            strange = strange[~np.isin(strange, self._ledger.allocator.taken_pages())]
        if strange.size:
            page = int(strange[0])
            raise KVCacheCorruptionError(
                f"{what} page {page} for requests {self.request_ids}, and it is none of theirs "
                f"(owner: {page_owner(self._ledger, page)})",
                page,
            )

    # ---- reading

    def get(
        self,
        layer: int,
        length: int,
        *,
        padded: bool = False,
        slots: Any = None,
        out: tuple[Any, Any] | None = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """As `Step.get`; KVCacheCorruptionError if a position below a valid length is poison."""
        found = super().get(layer, length, padded=padded, slots=slots, out=out)
        if can_look(self._ledger):
            self._check_read(int(layer), int(length), slots)
        return found

    def _check_read(self, layer: int, length: int, slots: Any) -> None:
        if slots is None:
            host = self._rows.slot_indices(length, True)
        else:
            device = self._storage.device
            host = device.to_host(device.asarray(slots, "slots"))
            own = np.concatenate([lease.pages() for lease in self._requests])
            self._check_pages(host, own, "a get reads")
        lengths = self._ledger.lengths
        valid = np.array([lengths.column(request.row)[layer] for request in self._requests])
        kept = np.flatnonzero((np.arange(length) < valid[:, None]).ravel() & (host >= 0))
        found = self._ledger.books.stored.poisoned_slots(layer, host[kept].astype(np.int64))
        if found.any():
            i = int(kept[np.argmax(found)])
            who = f"request {self._requests[i // length].tag}"
            raise read_of_poison(self._ledger, who, layer, i % length, int(host[i]))
