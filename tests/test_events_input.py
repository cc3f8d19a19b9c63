"""What publish_events, subscribers and views refuse, before anything has changed."""

import errno
import socket
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from kvpool.events import (
    AllBlocksCleared,
    BlockStored,
    CacheView,
    EventSubscriber,
    ReceivedBatch,
)
from kvpool.events.endpoints import check_endpoint
from kvpool.events.wording import Wording
from tests.helpers.events import LOOPBACK
from tests.helpers.pools import case_pool

REMOTE = [
    "tcp://*:5557",
    "tcp://0.0.0.0:5557",
    "tcp://[::]:5557",
    "tcp://192.0.2.1:5557",
    "tcp://host.example:5557",
    "tcp://eth0:5557",
    "tcp://127.0.0.1.example:5557",
]
LOCAL = [
    "tcp://127.0.0.1:5557",
    "tcp://127.8.9.1:0",
    "tcp://localhost:1",
    "tcp://lo:65535",
    "tcp://[::1]:5557",
    "tcp://127.0.0.1:*",
    "ipc://@abstract",
    "ipc:///run/events",
]
NONE = [
    "",
    "5557",
    "127.0.0.1:5557",
    "tcp://127.0.0.1",
    "tcp://:5557",
    "tcp://127.0.0.1:65536",
    "tcp://127.0.0.1:-1",
    "tcp://::1:5557",
    "udp://127.0.0.1:5557",
    "inproc://events",
    "ipc://",
    "tcp://127.0.0.1:5557\n",
]


@pytest.mark.parametrize("endpoint", REMOTE)
def test_endpoints_that_others_reach_need_to_be_allowed(endpoint):
    with pytest.raises(ValueError, match=r"reached from other machines.*allow_remote=True"):
        check_endpoint(endpoint, "endpoint", False)
    assert check_endpoint(endpoint, "endpoint", True) == endpoint


@pytest.mark.parametrize("endpoint", LOCAL)
def test_endpoints_of_this_machine_are_taken(endpoint):
    assert check_endpoint(endpoint, "endpoint", False) == endpoint


@pytest.mark.parametrize("endpoint", NONE)
def test_what_is_no_endpoint_is_refused(endpoint):
    with pytest.raises(ValueError, match=r"endpoint must be tcp://host:port"):
        check_endpoint(endpoint, "endpoint", True)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"endpoint": "tcp://*:0"}, ValueError, "allow_remote"),
        ({"endpoint": 5557}, TypeError, "endpoint must be a str, got int"),
        ({"endpoint": LOOPBACK, "replay_endpoint": "tcp://*:0"}, ValueError, "replay_endpoint"),
        ({"replay_endpoint": "tcp://127.0.0.1:5557"}, ValueError, "must differ"),
        ({"hash_as": "hex"}, ValueError, "hash_as must be one of bytes, int, got 'hex'"),
        ({"topic": b"t"}, TypeError, "topic must be a str, got bytes"),
        ({"topic": "\ud800"}, ValueError, "topic must be text"),
        ({"model": 3}, TypeError, "model"),
        ({"lora_name": "adapter"}, TypeError, "lora_name must be a function"),
        ({"data_parallel_rank": -1}, ValueError, "data_parallel_rank must be at least 0"),
        ({"data_parallel_rank": True}, TypeError, "data_parallel_rank must be an int"),
        ({"replay_batches": 0}, ValueError, "replay_batches must be at least 1"),
        ({"replay_bytes": 0.5}, TypeError, "replay_bytes must be an int"),
        ({"hwm": 0}, ValueError, "hwm must be at least 1, got 0"),
        ({"partition": 3}, TypeError, "partition must be a Partition, got int"),
        ({"announce_interval_s": float("nan")}, ValueError, "announce_interval_s must be"),
    ],
)
def test_a_bad_argument_publishes_nothing(make_pool, options, error, words):
    pool = case_pool(make_pool, 4, 8)
    with pytest.raises(error, match=words):
        pool.publish_events(**options)
    with pool.publish_events(LOOPBACK, model="other"):  # no follower has keys of the first yet
        pass


def test_an_address_in_use_is_said_to_be(make_pool, tmp_path):
    pool = case_pool(make_pool, 4, 8)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port} is in use.*another port") as caught:
            pool.publish_events(f"tcp://127.0.0.1:{port}")
        assert caught.value.errno == errno.EADDRINUSE
    path = tmp_path / "events"
    with pool.publish_events(f"ipc://{path}"), pytest.raises(OSError, match="is in use"):
        pool.publish_events(f"ipc://{path}")
    path.unlink(missing_ok=True)
    path.write_text("a file of somebody")
    with pytest.raises(FileExistsError, match="is no socket"):
        pool.publish_events(f"ipc://{path}")
    assert path.read_text() == "a file of somebody"
    with pytest.raises(OSError, match="cannot be bound to"):
        pool.publish_events(f"ipc://{tmp_path}/missing/events")


def test_a_socket_that_a_dead_process_left_is_taken_over(make_pool, tmp_path):
    path = tmp_path / "events"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with case_pool(make_pool, 4, 8).publish_events(f"ipc://{path}") as publisher:
        assert publisher.endpoint == f"ipc://{path}"


def test_the_medium_is_that_of_the_device():
    kinds = {"cpu": "CPU", "cuda": "GPU"}
    for kind, medium in kinds.items():
        assert Wording.of("", kind, "bytes", None, None).medium == medium


@pytest.mark.parametrize("linger_s", [-1, float("inf"), float("nan")])
def test_a_linger_out_of_range_closes_nothing(make_pool, linger_s):
    with case_pool(make_pool, 4, 8).publish_events(LOOPBACK) as publisher:
        with pytest.raises(ValueError, match="linger_s must be finite"):
            publisher.close(linger_s)
        assert not publisher.closed


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("nowhere",), {}, "expected endpoints as tcp://host:port"),
        ((LOOPBACK[:-2], "tcp://127.0.0.1:x"), {}, "expected endpoints"),
        (("tcp://127.0.0.1:1",), {"hwm": 0}, "hwm"),
        (("tcp://127.0.0.1:1",), {"replay_timeout_s": 0}, "replay_timeout_s must be finite"),
        (("tcp://127.0.0.1:1",), {"check_interval_s": float("inf")}, "check_interval_s"),
        (("tcp://127.0.0.1:1",), {"hwm": 1 << 40}, "hwm must be in 1 .."),
        (("tcp://127.0.0.1:1",), {"topic": "\ud800"}, "topic must be text"),
        ((LOOPBACK,), {}, "has port 0.*what its `endpoint` says"),
        (("tcp://127.0.0.1:1", LOOPBACK), {}, "has port 0.*what its `replay_endpoint` says"),
    ],
)
def test_a_subscriber_refuses_what_it_cannot_use(arguments, options, words):
    with pytest.raises(ValueError, match=words):
        EventSubscriber(*arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((None,), {}, "endpoint must be a str, got NoneType"),
        (("tcp://127.0.0.1:1", 5557), {}, "replay_endpoint must be a str, got int"),
        (("tcp://127.0.0.1:1",), {"topic": b"t"}, "topic must be a str, got bytes"),
        (("tcp://127.0.0.1:1",), {"replay_timeout_s": "1"}, "replay_timeout_s must be a number"),
        (("tcp://127.0.0.1:1",), {"check_interval_s": True}, "check_interval_s must be a number"),
    ],
)
def test_a_subscriber_refuses_other_types(arguments, options, words):
    with pytest.raises(TypeError, match=words):
        EventSubscriber(*arguments, **options)


def batch(*events, sequence=0, missed=0):
    return ReceivedBatch(sequence, missed, False, 0.0, list(events), None)


def test_a_view_refuses_pages_that_cannot_be_of_one_pool():
    view = CacheView()
    view.apply(batch(BlockStored([b"a"], None, [1, 2], 2)))
    with pytest.raises(ValueError, match="pages of one size, got 3 tokens after 2"):
        view.apply(batch(BlockStored([b"b"], None, [1, 2, 3], 3), sequence=1))
    with pytest.raises(ValueError, match="2 pages of 2 tokens have 4 tokens, got 3"):
        view.apply(batch(BlockStored([b"b", b"c"], None, [1, 2, 3], 2), sequence=1))
    assert view.matched_len([1, 2, 3]) == 2
    view.apply(batch(AllBlocksCleared(), sequence=1))
    assert len(view) == 0


@pytest.mark.parametrize(
    ("prompt", "extra_key", "error"),
    [
        ([1.0, 2.0], None, TypeError),
        ("12", None, TypeError),
        (None, None, TypeError),
        ([[1, 2]], None, TypeError),
        ([1 << 32 | 1, 2], None, ValueError),
        (np.array([1 << 32 | 1, 2]), None, ValueError),  # a cast would make 1 of it
        ([1, 2], 1.5, TypeError),
        ([1, 2], [1], TypeError),
    ],
)
def test_a_view_matches_no_other_prompts_than_a_bind(make_pool, prompt, extra_key, error):
    view = CacheView()
    view.apply(batch(BlockStored([b"a"], None, [1, 2], 2)))
    with pytest.raises(error):
        view.matched_len(prompt, extra_key)
    with pytest.raises(error):
        case_pool(make_pool, 4, 8).bind_request(prompt, 16, extra_key=extra_key)


@pytest.mark.parametrize("missing", ["zmq", "msgspec"])
def test_a_missing_guest_names_the_extra(missing):
    code = f"""
import sys
sys.modules[{missing!r}] = None
from kvpool import KVCachePool
pool = KVCachePool(1, 64, 1, 8)
try:
    pool.publish_events("tcp://127.0.0.1:0")
except ImportError as error:
    print(error)
pool.check()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "pip install 'kvpool[events]'" in run.stdout
