"""CacheView beside a slow twin, on streams that no tree would write; namespaces there and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

import msgspec

from kvpool.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheView,
    EventBatch,
    ReceivedBatch,
)
from kvpool.events.namespaces import Namespace, namespace_of, salt_text
from kvpool.events.wording import Wording

PAGE = 2
MEDIA = ("GPU", "CPU")
EXTRA_KEYS = st.one_of(
    st.none(), st.text(max_size=4), st.binary(max_size=4), st.integers(), st.integers(-3, 3)
)


class SlowView:
    """Each page by itself: above, tokens, media; a prompt is matched by looking at all of them."""

    def __init__(self):
        self.pages = {}

    def store(self, event):
        above = event.parent_block_hash
        for i, name in enumerate(event.block_hashes):
            tokens = event.token_ids[i * PAGE : (i + 1) * PAGE]
            self.pages.setdefault(name, (above, tokens, set()))[2].add(event.medium)
            above = name

    def remove(self, event):
        for name in event.block_hashes:
            if name in self.pages:
                self.pages[name][2].discard(event.medium)
                if not self.pages[name][2]:
                    del self.pages[name]

    def matched_len(self, prompt):
        above, length = None, 0
        while len(prompt) >= length + PAGE:
            tokens = prompt[length : length + PAGE]
            found = [
                name
                for name, (parent, held, _) in self.pages.items()
                if parent == above and held == tokens
            ]
            if not found:
                break
            (above,) = found
            length += PAGE
        return length


def name_of(prefix):
    """A hash of a prefix: two bits a token."""
    return bytes([len(prefix), *prefix])


@st.composite
def event(draw):
    kind = draw(st.sampled_from(("stored", "stored", "removed", "cleared")))
    medium = draw(st.sampled_from(MEDIA))
    if kind == "cleared" and draw(st.booleans()):
        return AllBlocksCleared()
    tokens = draw(st.lists(st.integers(0, 1), min_size=PAGE, max_size=5 * PAGE))
    tokens = tokens[: len(tokens) // PAGE * PAGE]
    names = [name_of(tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE)]
    begin = draw(st.integers(0, len(names) - 1))
    if kind == "removed":
        return BlockRemoved(names[begin:], medium)
    parent = names[begin - 1] if begin else None
    return BlockStored(names[begin:], parent, tokens[begin * PAGE :], PAGE, medium=medium)


@given(st.lists(event(), max_size=30), st.lists(st.integers(0, 1), max_size=12))
def test_a_view_is_what_the_events_say(events, prompt):
    view, slow = CacheView(), SlowView()
    for i, each in enumerate(events):
        view.apply(ReceivedBatch(i, 0, False, 0.0, [each], None))
        match each:
            case BlockStored():
                slow.store(each)
            case BlockRemoved():
                slow.remove(each)
            case _:
                slow.pages.clear()
        assert set(view) == set(slow.pages)
        assert all(name in view for name in slow.pages)
        assert len(view) == len(slow.pages)
        assert view.matched_len(prompt) == slow.matched_len(prompt)


def test_missed_batches_leave_nothing_that_may_have_gone():
    view = CacheView()
    assert view.matched_len([1, 2]) == 0
    stored = BlockStored([b"a", b"b"], None, [1, 2, 3, 4], PAGE)
    view.apply(ReceivedBatch(0, 0, False, 0.0, [stored], None))
    assert view.complete
    removed = BlockRemoved([b"b"])
    view.apply(ReceivedBatch(4, 3, False, 0.0, [removed], None))
    assert (len(view), view.complete, view.unknown_removals) == (0, False, 1)
    view.apply(ReceivedBatch(5, 0, False, 0.0, [AllBlocksCleared(), stored], None))
    assert (view.matched_len([1, 2, 3, 4, 5]), view.complete) == (4, True)
    view.apply(ReceivedBatch(0, 0, True, 0.0, [], None))
    assert (len(view), view.complete) == (0, True)


@given(EXTRA_KEYS, st.one_of(st.none(), st.just("a"), st.text(max_size=3)), st.integers(1, 3))
def test_a_namespace_comes_back_as_what_it_was(extra_key, lora_name, num_pages):
    wording = Wording.of("", "cpu", "bytes", lambda key: lora_name, None)
    namespace = Namespace(extra_key, wording.adapter_of(extra_key))
    tokens = [*range(PAGE * num_pages)]
    stored = BlockStored(
        [bytes([i]) for i in range(num_pages)],
        None,
        tokens,
        PAGE,
        lora_name=namespace.lora_name,
        extra_keys=namespace.extra_keys(num_pages, begins=True),
        cache_salt=namespace.cache_salt,
    )
    payload = msgspec.msgpack.encode(EventBatch(0.0, [stored]))
    (found,) = msgspec.msgpack.decode(payload, type=EventBatch).events
    view = CacheView()
    view.apply(ReceivedBatch(0, 0, False, 0.0, [found], None))
    assert view.matched_len(tokens, extra_key) == len(tokens)
    again = namespace_of(found.extra_keys and found.extra_keys[0], found.lora_name)
    assert (type(again), again) == (type(extra_key), extra_key)
    assert view.matched_len(tokens, "another") == 0 or extra_key == "another"


def test_namespaces_of_one_print_stay_apart():
    view = CacheView()
    keys = ("1", b"1", 1, 2**70, format(2**70, "x"), None, "")
    for number, key in enumerate(keys):
        namespace = Namespace(key, None)
        stored = BlockStored(
            [bytes([number])],
            None,
            [number, number],
            PAGE,
            extra_keys=namespace.extra_keys(1, begins=True),
            cache_salt=namespace.cache_salt,
        )
        view.apply(ReceivedBatch(number, 0, False, 0.0, [stored], None))
    for number, key in enumerate(keys):
        found = [view.matched_len([other, other], key) for other in range(len(keys))]
        assert found == [PAGE if other == number else 0 for other in range(len(keys))]


def test_salts_as_text_say_their_type_where_they_are_none():
    assert salt_text(None) is None
    assert [salt_text(key) for key in ("a", b"a", 255, -1)] == [
        "a",
        "bytes:61",
        "int:ff",
        "int:-1",
    ]
    assert salt_text("\ud800") == "str:eda080"
