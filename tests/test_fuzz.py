"""The fuzz target without its fuzzer: its corpus again, and that it finds what is wrong."""

import numpy as np
import pytest

from kvpool import RadixCache
from tests.fuzz import corpus, tree
from tests.fuzz.stream import Stream
from tests.fuzz.target import DRIVEN, run


def replay():
    """The verbs done on each of what is driven."""
    done = {}
    for data in corpus.read():
        name, verbs = run(data)
        done.setdefault(name, set()).update(verbs)
    return done


def test_replay_the_corpus_finds_nothing_and_does_every_verb():
    assert replay() == {driven.__name__: set(driven.VERBS) for driven in DRIVEN}


@pytest.mark.parametrize("seed", range(40))
def test_run_random_bytes_finds_nothing(seed):
    run(np.random.default_rng(seed).integers(0, 256, 200, np.uint8).tobytes())


def test_stream_at_its_end_chooses_what_comes_first():
    stream = Stream(bytes([7]))
    assert stream.integer(0, 3) == 3
    assert stream.ended
    assert stream.item("ab") == "a"
    assert stream.integer(-2, 5) == -2


class ForgetfulCache(RadixCache):
    """Loses the last page of a long match."""

    def match_prefix(self, tokens, extra_key=None):
        found = super().match_prefix(tokens, extra_key)
        return found._replace(pages=found.pages[:2], length=min(found.length, 2 * self.page_size))


class LazyCache(RadixCache):
    """Evicts one page less than it is asked for, where that is many."""

    def evict(self, num_tokens):
        return super().evict(num_tokens if num_tokens < 2 * self.page_size else self.page_size)


class StickyCache(RadixCache):
    """Does not unlock what is locked twice."""

    def dec_lock_ref(self, node):
        if max((n.lock_ref for n in self.nodes()), default=0) < 2:
            super().dec_lock_ref(node)


@pytest.mark.parametrize("wrong", [ForgetfulCache, LazyCache, StickyCache])
def test_replay_the_corpus_on_a_wrong_tree_fails(wrong, monkeypatch):
    monkeypatch.setattr(tree, "RadixCache", wrong)
    with pytest.raises(AssertionError):
        replay()


@pytest.mark.parametrize("handle", [2**31, 2**32 - 1, 2**63 - 1, 2**63, -1])
def test_lock_a_number_that_is_no_handle_is_a_value_error(handle):
    """The target's first finding: a lower half above int32 was an OverflowError."""
    cache = RadixCache(1)
    cache.insert([1], [0])
    for verb in (cache.inc_lock_ref, cache.dec_lock_ref):
        with pytest.raises(ValueError, match=f"{handle}"):
            verb(handle)
    cache.check()
