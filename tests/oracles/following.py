"""What a tree holds, rebuilt by those who were only told of its changes: slow, and plain."""

import numpy as np


def told_of(pool):
    """Page -> (tokens from the first of its prefix to its last, namespace), read off the tree."""
    size, whole, found = pool.page_size, {}, {}
    # In arena order a parent may come later than its child.
    views = sorted((view for view in pool.radix.nodes() if not view.detached), key=by_start)
    for view in views:
        prefix = whole.get(view.parent, ())
        tokens = tuple(view.tokens.tolist())
        whole[view.node] = prefix + tokens
        for i, page in enumerate(view.pages.tolist()):
            found[page] = (prefix + tokens[: (i + 1) * size], view.extra_key)
    return found


def by_start(view):
    """Where a node stands on its path."""
    return view.start


class RecordsTwin:
    """Reads the words of a journal, one after the other, by the layout that it documents."""

    def __init__(self, page_size):
        self.page_size = page_size
        self.pages = {}  # page -> (prefix tokens, namespace)
        self.generations = {}  # page -> how often it had left, of those that are there
        self.removed = []

    def read(self, words, names):
        """Apply the records of one `take_changes`."""
        words = words.tolist()
        while words:
            kind, n, above = words[:3]
            del words[:3]
            ids = words[:n]
            del words[:n]
            assert len(set(ids)) == n
            if kind == 0:
                assert n == 0
                self.pages.clear()
                self.generations.clear()
            elif kind == 1:
                generations, size = words[:n], self.page_size
                tokens = tuple(words[n : n + n * size])
                del words[: n + n * size]
                prefix, key = (), None
                if above >= 0:
                    prefix, key = self.pages[above]
                elif above < -1:
                    key = names[-2 - above]
                for i, page in enumerate(ids):
                    assert page not in self.pages
                    self.pages[page] = (prefix + tokens[: (i + 1) * size], key)
                    self.generations[page] = generations[i]
            else:
                assert kind == 2
                self.removed += ids
                for page in ids:
                    del self.pages[page], self.generations[page]


class ToldTwin:
    """A subscriber that believes what it is told, and checks that it adds up."""

    def __init__(self, keys):
        self.keys = keys
        self.pages = {}  # page -> (prefix tokens, namespace, key, generation)
        self.lives = set()  # (page, generation) of all that were ever stored
        self.removed = []
        self.is_behind = False
        self.clears = 0

    def on_stored(self, run):
        """Pages come below what is there, in their order, with the keys of their prefixes."""
        self.is_behind = True
        above = [page for page, told in self.pages.items() if told[2] == run.parent_key]
        prefix = self.pages[above[0]][0] if run.parent_key is not None else ()
        assert run.parent_key is None or self.pages[above[0]][1] == run.extra_key
        rows = run.tokens.tolist()
        assert len(run.page_ids) == len(run.keys) == len(rows) == len(run.generations) > 0
        for page, key, row, generation in zip(
            run.page_ids.tolist(), run.keys, rows, run.generations.tolist(), strict=True
        ):
            assert page not in self.pages
            prefix = (*prefix, *row)
            self.pages[page] = (prefix, run.extra_key, key, generation)
            self.lives.add((page, generation))
        expected = self.keys.of_tokens(np.array(prefix, np.int32), run.extra_key)
        assert expected[-len(run.keys) :] == run.keys

    def on_removed(self, page_ids, keys):
        """Pages go that nothing hangs below."""
        self.is_behind = True
        for page, key in zip(page_ids.tolist(), keys, strict=True):
            prefix, extra_key, known, _ = self.pages.pop(page)
            assert key == known
            size = self.keys.page_size
            assert not any(
                told[1] == extra_key and told[0][: len(prefix)] == prefix and len(told[0]) > size
                for told in self.pages.values()
            )
            self.removed.append(page)

    def on_cleared(self):
        """All goes."""
        self.is_behind = True
        self.clears += 1
        self.pages.clear()

    def on_caught_up(self):
        """As much as there was."""
        self.is_behind = False

    def compare(self, pool, follower):
        """The tree, as it is now, and what was told of it agree."""
        assert not self.is_behind
        assert {page: told[:2] for page, told in self.pages.items()} == told_of(pool)
        kinds = {page: type(told[1]) for page, told in self.pages.items()}
        assert kinds == {page: type(told[1]) for page, told in told_of(pool).items()}
        lives = sorted(self.lives)
        pages = np.array([page for page, _ in lives], np.int32)
        generations = np.array([generation for _, generation in lives], np.uint32)
        stay = follower.still_cached(pages, generations).tolist()
        now = {(page, told[3]) for page, told in self.pages.items()}
        assert {life for life, stays in zip(lives, stay, strict=True) if stays} == now
        everything = np.arange(pool.num_pages, dtype=np.int32)
        keys, tokens, generations = follower.describe(everything)
        for page in range(pool.num_pages):
            told = self.pages.get(page)
            assert keys[page] == (told and told[2])
            if told:
                assert tuple(tokens[page].tolist()) == told[0][-pool.page_size :]
                assert generations[page] == told[3]
