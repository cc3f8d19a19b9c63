"""The peers' own classes read what kvpool publishes, and kvpool reads what they publish."""

import time

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("zmq")

import msgspec
import zmq

from kvpool.events import CacheView, EventSubscriber
from tests.helpers.events import HandFollower, publish, read_up_to, subscribed
from tests.helpers.peer_events import sglang_events, vllm_events

TOKENS = list(range(100, 112))  # three pages of 4
END = (-1).to_bytes(8, "big", signed=True)


@pytest.fixture(scope="module")
def vllm():
    return vllm_events()


@pytest.fixture(scope="module")
def sglang():
    return sglang_events()


def payloads(publisher, start=0):
    """What a replay client of vLLM's kind receives: (topic, sequence, payload) each."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart((b"", start.to_bytes(8, "big")))
        found = []
        while dealer.poll(10_000):
            empty, *message = dealer.recv_multipart()
            assert empty == b""
            if message[1] == END:
                assert message == [b"", END, b""]
                return found
            found.append(message)
    raise AssertionError("no end of the replay")


def events_of(batch_class, publisher):
    """All events, decoded by a peer's class."""
    decode = msgspec.msgpack.Decoder(batch_class).decode
    return [event for *_, payload in payloads(publisher) for event in decode(payload).events]


def test_vllm_decodes_a_stream(vllm):
    follower = HandFollower()
    with publish(follower, topic="kv@pod@model", data_parallel_rank=3) as publisher:
        publisher.flush()
        first = follower.store(TOKENS[:8])
        publisher.flush()
        rest = follower.store(TOKENS)[2:]
        follower.remove(rest)
        publisher.flush()
        follower.clear()
        publisher.flush()
        messages = payloads(publisher)
        assert [topic for topic, *_ in messages] == [b"kv@pod@model"] * 4
        assert [int.from_bytes(number, "big") for _, number, _ in messages] == [0, 1, 2, 3]
        decode = msgspec.msgpack.Decoder(vllm.KVEventBatch).decode
        batches = [decode(payload) for *_, payload in messages]
    assert {batch.data_parallel_rank for batch in batches} == {3}
    assert all(abs(batch.ts - time.time()) < 600 for batch in batches)
    stored = {"block_size": 4, "lora_id": None, "medium": "CPU", "lora_name": None}
    assert [event for batch in batches for event in batch.events] == [
        vllm.AllBlocksCleared(),
        vllm.BlockStored(
            block_hashes=first, parent_block_hash=None, token_ids=TOKENS[:8], **stored
        ),
        vllm.BlockStored(
            block_hashes=rest, parent_block_hash=first[-1], token_ids=TOKENS[8:], **stored
        ),
        vllm.BlockRemoved(block_hashes=rest, medium="CPU"),
        vllm.AllBlocksCleared(),
    ]


def test_vllm_finds_salts_and_adapters_where_its_own_events_have_them(vllm):
    follower = HandFollower()
    lora_name = {"adapter": "adapter", "tenant+adapter": "adapter"}.get
    with publish(follower, lora_name=lora_name) as publisher:
        publisher.flush()
        for extra_key in ("tenant", "adapter", "tenant+adapter"):
            follower.store(TOKENS[:8], extra_key)
        publisher.flush()
        _, salted, adapted, both = events_of(vllm.KVEventBatch, publisher)
    # The salt with the first block, the adapter with each, and before the salt.
    assert (salted.lora_name, salted.extra_keys) == (None, [("tenant",), None])
    assert (adapted.lora_name, adapted.extra_keys) == ("adapter", [("adapter",)] * 2)
    assert both.lora_name == "adapter"
    assert both.extra_keys == [("adapter", "tenant+adapter"), ("adapter",)]


def test_vllm_reads_hashes_as_it_shortens_its_own(vllm):
    follower = HandFollower()
    with publish(follower, hash_as="int") as publisher:
        publisher.flush()
        keys = follower.store(TOKENS)
        publisher.flush()
        _, stored = events_of(vllm.KVEventBatch, publisher)
    # As `maybe_convert_block_hash` does.
    assert stored.block_hashes == [int.from_bytes(key, "big") & ((1 << 64) - 1) for key in keys]


def test_sglang_decodes_a_stream(sglang):
    follower = HandFollower()
    with publish(follower, hash_as="int", data_parallel_rank=1) as publisher:
        publisher.flush()
        keys = follower.store(TOKENS, "tenant")
        follower.remove(keys[2:])
        publisher.flush()
        cleared, stored, removed = events_of(sglang.KVEventBatch, publisher)
    assert isinstance(cleared, sglang.AllBlocksCleared)
    assert (stored.token_ids, stored.cache_salt, stored.medium) == (TOKENS, "tenant", "CPU")
    assert removed.block_hashes == stored.block_hashes[2:]


def test_a_publisher_of_vllm_is_read_with_its_replays(vllm, tmp_path):
    endpoint, replay = (f"ipc://{tmp_path}/{name}" for name in ("events", "replay"))
    peer = vllm.ZmqEventPublisher(0, endpoint, replay, topic="t")
    try:

        def stored(number, parent=None):
            return vllm.BlockStored(
                block_hashes=[bytes([number])],
                parent_block_hash=parent,
                token_ids=[number] * 4,
                block_size=4,
                lora_id=None,
                medium="GPU",
                lora_name=None,
                group_idx=0,
            )

        peer.publish(vllm.KVEventBatch(ts=1.0, events=[stored(1), stored(2, b"\1")]))
        view = CacheView()
        with EventSubscriber(endpoint, replay, topic="t", check_interval_s=0.1) as subscriber:
            # Its publisher looks for requests between two batches or every tenth of a second.
            assert read_up_to(subscriber, 0, view)[0].data_parallel_rank == 0
            assert view.matched_len([1] * 4 + [2] * 4 + [3]) == 8
            removed = vllm.BlockRemoved(block_hashes=[b"\2"], medium="GPU")
            peer.publish(vllm.KVEventBatch(ts=2.0, events=[removed]))
            read_up_to(subscriber, 1, view)
            assert view.matched_len([1] * 4 + [2] * 4) == 4
            assert view.complete
    finally:
        peer.shutdown()


def test_our_subscription_reads_a_live_stream_as_vllm_reads_it(vllm):
    follower = HandFollower()
    with publish(follower) as publisher, subscribed(publisher) as subscriber:
        publisher.flush()
        follower.store(TOKENS)
        publisher.flush()
        ours = [event for batch in read_up_to(subscriber, 1) for event in batch.events]
        theirs = events_of(vllm.KVEventBatch, publisher)
    names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "medium")
    for name in names:
        assert getattr(ours[1], name) == getattr(theirs[1], name)
