"""A pool as one would do it by hand: sequences are lists of tokens, the tree a dict of prefixes.

No pages are chosen here: the model learns which ones a request got, and checks that they were
free. It never evicts; give its pool pages enough.
"""

import numpy as np

from tests.oracles.prints import LAYERS, k_prints

NOTHING = (0.0,) * LAYERS  # what a position reads as that no layer has written


class Sequence:
    """One request. `tokens[p]` is what position p is for; `content[p]` what it holds, per layer.

    `valid` leading positions are written and not taken back; those below `shared` are read-only.
    """

    def __init__(self, prompt, pages, page_size, matched):
        self.prompt = list(prompt)
        self.tokens = list(prompt)
        self.pages = list(pages)
        self.page_size = page_size
        self.matched = self.shared = self.valid = matched
        self.content = self.prints(0, matched) + [NOTHING] * (self.capacity - matched)

    @property
    def capacity(self):
        return len(self.pages) * self.page_size

    def prints(self, start, end):
        """What `[start, end)` must hold once written: a number a layer, of the whole history."""
        return list(map(tuple, k_prints(self.tokens[:end], None, LAYERS)[:, start:].T.tolist()))

    def write(self, start, end):
        """Positions `[start, end)` of `tokens` are written on every layer."""
        self.content[start:end] = self.prints(start, end)
        if start <= self.valid:
            self.valid = max(self.valid, end)

    def seal(self, length):
        self.valid = min(self.valid, length)

    def zero(self, start, end):
        self.content[start:end] = [NOTHING] * (end - start)
        if start < end:
            self.valid = min(self.valid, start)

    def slots(self, start, end):
        size = self.page_size
        return [self.pages[p // size] * size + p % size for p in range(start, end)]


class SequencePool:
    """All sequences, and the cached prefixes: tokens of a page and all before it -> page id."""

    def __init__(self, num_pages, page_size):
        self.num_pages = num_pages
        self.page_size = page_size
        self.sequences = {}
        self.tree = {}

    # ---- pages

    def pages_for(self, length):
        return -(-length // self.page_size)

    @property
    def held(self):
        """Pages of bound requests."""
        return {page for sequence in self.sequences.values() for page in sequence.pages}

    @property
    def cached(self):
        return set(self.tree.values())

    def counts(self):
        """Pages that are free, private and in the tree."""
        return (
            self.num_pages - len(self.held | self.cached),
            len(self.held - self.cached),
            len(self.tree),
        )

    def claim(self, pages):
        """The pool handed these out: nobody may have had them."""
        assert len(set(pages)) == len(pages)
        assert not set(pages) & (self.held | self.cached), "a held page was handed out"

    # ---- the tree

    def whole_pages(self, tokens, length):
        """The prefixes that end with a whole page within `length` tokens."""
        size = self.page_size
        return [tuple(tokens[:end]) for end in range(size, length + 1, size)]

    def path(self, tokens, length):
        """Page ids of the longest cached prefix within `length` tokens."""
        pages = []
        for prefix in self.whole_pages(tokens, length):
            if prefix not in self.tree:
                break
            pages.append(self.tree[prefix])
        return pages

    def publish(self, sequence, tokens):
        """Bring written whole pages of `tokens` into the tree; tokens that are new there."""
        known = min(len(tokens), sequence.valid)
        assert list(tokens[:known]) == sequence.tokens[:known], "the driver mixed up two requests"
        new = 0
        for i, prefix in enumerate(self.whole_pages(tokens, known)):
            if prefix not in self.tree:
                self.tree[prefix] = sequence.pages[i]
                new += self.page_size
        return new

    # ---- a request's life

    def bind(self, request_id, prompt, pages):
        path = self.path(prompt, len(prompt) - 1)
        assert list(pages[: len(path)]) == path
        self.claim(pages[len(path) :])
        matched = len(path) * self.page_size
        sequence = Sequence(prompt, pages, self.page_size, matched)
        self.sequences[request_id] = sequence
        return sequence

    def fork(self, request_id, parent, pages):
        """Whole written pages are shared from now on, the rest is copied."""
        whole = parent.valid // self.page_size
        assert list(pages[:whole]) == parent.pages[:whole]
        self.claim(pages[whole:])
        child = Sequence(parent.prompt, pages, self.page_size, 0)
        child.tokens = parent.tokens[: max(parent.valid, len(parent.prompt))]
        child.content[: parent.valid] = parent.content[: parent.valid]
        child.valid = parent.valid
        parent.shared = max(parent.shared, whole * self.page_size)
        child.shared = whole * self.page_size
        self.sequences[request_id] = child
        return child

    def checkpoint(self, sequence, tokens):
        new = self.publish(sequence, tokens)
        whole = min(len(tokens), sequence.valid) // self.page_size
        sequence.shared = max(sequence.shared, whole * self.page_size)
        return new

    def finish(self, request_id, tokens):
        new = self.publish(self.sequences[request_id], tokens)
        del self.sequences[request_id]
        return new

    # ---- tables

    def table(self, ids, lengths, bucket=None):
        """indptr, indices, last_page_len and the block table, padded up to `bucket` rows."""
        padding = (len(ids) if bucket is None else bucket) - len(ids)
        rows = [
            self.sequences[i].pages[: self.pages_for(n)] for i, n in zip(ids, lengths, strict=True)
        ]
        rows += [[] for _ in range(padding)]
        last = [(n - 1) % self.page_size + 1 if n else 0 for n in [*lengths, *[0] * padding]]
        width = max(map(len, rows))
        return (
            [sum(map(len, rows[:n])) for n in range(len(rows) + 1)],
            [page for row in rows for page in row],
            last,
            [row + [self.num_pages] * (width - len(row)) for row in rows],
        )


def tree_of(radix, page_size):
    """What `radix.nodes()` says, in the form of `SequencePool.tree`."""
    nodes = {node.node: node for node in radix.nodes()}
    found = {}
    for node in nodes.values():
        before, parent = [], nodes.get(node.parent)
        while parent is not None:
            before = parent.tokens.tolist() + before
            parent = nodes.get(parent.parent)
        assert len(before) == node.start
        tokens = before + node.tokens.tolist()
        for i, page in enumerate(node.pages.tolist()):
            prefix = tuple(tokens[: node.start + (i + 1) * page_size])
            assert prefix not in found, "a prefix is cached twice"
            found[prefix] = page
    return found


def keys_of(sequences, length):
    """Keys `[layers, batch, length]` of rows, and `[batch, length]` where there are some."""
    out = np.zeros((LAYERS, len(sequences), length), np.float32)
    known = np.zeros((len(sequences), length), bool)
    for row, sequence in enumerate(sequences):
        n = min(length, sequence.capacity)
        out[:, row, :n] = np.array(sequence.content[:n], np.float32).reshape(n, LAYERS).T
        known[row, :n] = True
    return out, known
