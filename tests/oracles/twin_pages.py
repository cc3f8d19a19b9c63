"""The verbs of raw pages and of the tree as a caller sees it."""

import numpy as np

from kvpool import KVCacheExhaustedError
from tests.oracles.drawing import NAMESPACES
from tests.oracles.prints import HEAD_DIM, LAYERS, k_prints, k_rows


class PageVerbs:
    # ---- raw pages and the tree

    def alloc(self, choose):
        num_tokens = choose.integer(1, 4 * self.page_size)
        need = self.model.pages_for(num_tokens)
        if not self.model.fits(need):
            with self.refused(KVCacheExhaustedError):
                self.pool.alloc(num_tokens)
            return
        slots = self.pool.alloc(num_tokens)
        assert slots.dtype == np.int64
        pages = (slots[:: self.page_size] // self.page_size).tolist()
        assert slots.tolist() == self.expand(pages)
        assert len(pages) == need
        self.model.make_room(need)
        self.model.claim(pages)
        self.model.taken |= set(pages)

    def expand(self, pages):
        return [page * self.page_size + i for page in pages for i in range(self.page_size)]

    def draw_taken(self, choose, most):
        taken = sorted(self.model.taken)
        n = min(len(taken), choose.integer(0, most))
        first = choose.integer(0, len(taken) - n)
        return taken[first : first + n]

    def free(self, choose):
        pages = self.draw_taken(choose, 4)
        foreign = choose.integer(-1, self.model.num_pages)
        if foreign not in self.model.taken and choose.integer(0, 3) == 0:
            with self.refused(ValueError):
                self.pool.free(np.array(self.expand([*pages, foreign]), np.int64))
            assert str(foreign) in str(self.caught)
        self.pool.free(np.array(self.expand(pages), np.int64))
        self.model.taken -= set(pages)
        self.model.free |= set(pages)

    def owner(self, choose):
        """Whoever holds a page is named."""
        page = choose.integer(0, self.model.num_pages)
        words = self.pool.page_owner(page)
        if page in self.model.holders:
            assert any(f"request {i}" in words for i in self.model.holders[page])
        else:
            states = {"free": self.model.free, "taken": self.model.taken}
            states["scratch"] = {self.model.num_pages}
            name = next((name for name, pages in states.items() if page in pages), "tree")
            assert name in words, f"page {page} is {name}, got {words!r}"

    def radix_evict(self, choose):
        num_tokens = choose.integer(0, 3 * self.page_size)
        victims = [int(page) for page in self.pool.radix.evict(num_tokens)]
        assert victims == self.model.evict_to_taken(num_tokens)

    def radix_insert(self, choose):
        """Pages that the caller took and filled by itself become the tree's."""
        pages = self.draw_taken(choose, 3)
        size = self.page_size
        key = choose.item((None, "a"))
        tokens = self.draw_prompt(choose)
        tokens = (tokens + self.draw_tokens(choose, len(pages) * size))[: len(pages) * size]
        self.fill(pages, tokens, key)
        result = self.pool.radix.insert(tokens, np.array(pages, np.int32), key)
        num_cached, path = self.model.tree.insert(tokens, pages, key)
        assert result.prefix_len == num_cached * size
        self.model.taken -= {node.page for node in path[num_cached:]}

    def fill(self, pages, tokens, key):
        prints = k_prints(tokens, key, LAYERS)
        self.write_raw(self.expand(pages), prints)

    def write_raw(self, slots, prints):
        for layer in range(LAYERS):
            rows = k_rows(prints[layer], HEAD_DIM)
            self.pool.key_layer(layer)[slots] = rows
            self.pool.value_layer(layer)[slots] = -rows

    def radix_match(self, choose):
        tokens, key = self.draw_prompt(choose), choose.item(NAMESPACES)
        found = self.pool.radix.match_prefix(tokens, key)
        path = self.model.tree.match(tokens, key)
        assert found.length == len(path) * self.page_size
        assert [int(page) for page in found.pages] == [node.page for node in path]
        if path and len(self.locks) < 2:
            self.pool.radix.inc_lock_ref(found.node)
            self.model.tree.lock(path[-1])
            self.locks.append(found.node)
            self.model.external.append(path[-1])

    def radix_unlock(self, choose):
        if self.locks:
            i = choose.integer(0, len(self.locks) - 1)
            self.pool.radix.dec_lock_ref(self.locks.pop(i))
            self.model.unlock(self.model.external.pop(i))

    def reset(self, _choose):
        assert self.pool.reset_prefix_cache() == self.model.reset()

    def radix_reset(self, _choose):
        """The tree's own reset hands the pages to the caller."""
        dropped = self.pool.radix.reset().tolist()
        kept = set(self.model.free)
        assert len(dropped) * self.page_size == self.model.reset()
        assert set(dropped) == self.model.free - kept
        self.model.free = kept
        self.model.taken |= set(dropped)

    def toggle_reuse(self, _choose):
        self.model.reuse = self.pool.prefix_reuse_enabled = not self.model.reuse
