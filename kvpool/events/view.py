"""CacheView: what a pool has cached, known from its events alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpool.events.namespaces import namespace_of
from kvpool.events.wire import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    ReceivedBatch,
)
from kvpool.request import ExtraKey
from kvpool_ext.namespaces import as_namespace
from kvpool_ext.tokens import as_tokens

# Where a page hangs: below a page, or first in a namespace of that type.
_Above = BlockHash | tuple[str, ExtraKey]


@dataclass
class _Page:
    above: _Above
    tokens: bytes
    media: set[str | None] = field(default_factory=set)


class CacheView:
    """The cached prefixes of one publisher, rebuilt from the batches of its stream.

    A router keeps one for each pool, and sends a prompt where `matched_len` is largest. Pages are
    found by their tokens, so that it needs to know nothing of how hashes are made.

    After missed batches it forgets all: what is told from then on is right but not all there is,
    and `complete` is False until the publisher tells everything anew. It serves one thread.
    """

    def __init__(self) -> None:
        self._pages: dict[BlockHash, _Page] = {}
        self._below: dict[tuple[_Above, bytes], BlockHash] = {}
        self._page_size: int | None = None
        self._complete = False
        self._unknown_removals = 0

    def __len__(self) -> int:
        """Pages that are cached."""
        return len(self._pages)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._pages

    def __iter__(self) -> Iterator[BlockHash]:
        """The hashes of all cached pages, in no order."""
        return iter(self._pages)

    @property
    def complete(self) -> bool:
        """Whether all that is cached has been told."""
        return self._complete

    @property
    def page_size(self) -> int | None:
        """Tokens per page, None before the first was told."""
        return self._page_size

    @property
    def unknown_removals(self) -> int:
        """Removals of pages that it did not know, as come after missed batches."""
        return self._unknown_removals

    def apply(self, batch: ReceivedBatch) -> None:
        """Take the next batch of the stream.

        Raises
        ------
        ValueError
            Pages of another size than before, or not as many tokens as its pages have.
        """
        if batch.missed or batch.restarted:
            self.clear()
        if batch.sequence == 0 and not batch.missed:
            self._complete = True
        for event in batch.events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self.clear()
                    self._complete = True

    def clear(self) -> None:
        """Forget all pages: for a publisher that is known to be gone."""
        self._pages.clear()
        self._below.clear()
        self._complete = False

    def matched_len(self, prompt: Any, extra_key: ExtraKey = None) -> int:
        """Leading tokens of `prompt` that are cached, whole pages.

        Parameters
        ----------
        prompt : sequence of int
            Token ids.
        extra_key : str, bytes, int or None
            Namespace.

        Raises
        ------
        TypeError, ValueError
            As for a bind: what are no tokens, or no namespace.
        """
        tokens = as_tokens(prompt)
        above: _Above = _root(None if extra_key is None else as_namespace(extra_key))
        size = self._page_size
        if size is None:
            return 0
        for begin in range(0, len(tokens) - size + 1, size):
            found = self._below.get((above, tokens[begin : begin + size].tobytes()))
            if found is None:
                return begin
            above = found
        return len(tokens) // size * size

    def _store(self, event: BlockStored) -> None:
        size, num_pages = event.block_size, len(event.block_hashes)
        if self._page_size is not None and self._page_size != size:
            raise ValueError(
                f"a stream has pages of one size, got {size} tokens after {self._page_size}: give "
                "each publisher a view of its own"
            )
        if size < 1 or len(event.token_ids) != num_pages * size:
            raise ValueError(
                f"{num_pages} pages of {size} tokens have {num_pages * size} tokens, got "
                f"{len(event.token_ids)}"
            )
        self._page_size = size
        tokens = np.array(event.token_ids, "<i4").tobytes()
        above: _Above = _root(_namespace(event))
        if event.parent_block_hash is not None:
            above = event.parent_block_hash
        for number, block_hash in enumerate(event.block_hashes):
            page = self._pages.get(block_hash)
            if page is None:
                mine = tokens[4 * size * number : 4 * size * (number + 1)]
                page = self._pages[block_hash] = _Page(above, mine)
                self._below[above, mine] = block_hash
            page.media.add(event.medium)
            above = block_hash

    def _remove(self, event: BlockRemoved) -> None:
        for block_hash in event.block_hashes:
            page = self._pages.get(block_hash)
            if page is None:
                self._unknown_removals += 1
                continue
            page.media.discard(event.medium)
            if not page.media:
                del self._pages[block_hash]
                if self._below.get((page.above, page.tokens)) == block_hash:
                    del self._below[page.above, page.tokens]


def _root(extra_key: ExtraKey) -> tuple[str, ExtraKey]:
    # Under its type: 1, "1" and b"1" are three namespaces.
    kind = next((kind for kind in (str, bytes, int) if isinstance(extra_key, kind)), None)
    return ("none" if kind is None else kind.__name__, extra_key)


def _namespace(event: BlockStored) -> ExtraKey:
    if event.extra_keys is None and event.cache_salt is not None:
        return event.cache_salt
    first = event.extra_keys[0] if event.extra_keys else None
    return namespace_of(first, event.lora_name)
