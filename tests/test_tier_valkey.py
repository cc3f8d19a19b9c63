"""ValkeyTier on a real server: full, killed, and not there."""

from hashlib import sha256

import numpy as np
import pytest

from kvpool.tiers.valkey import ValkeyTier
from tests.helpers.mooncake import free_ports
from tests.helpers.valkey import Server, why_no_valkey

if why_no_valkey():
    pytest.skip(why_no_valkey(), allow_module_level=True)

import valkey

KEYS = [sha256(bytes([i])).digest() for i in range(64)]


def test_a_full_server_refuses_records_and_gives_those_it_has(tmp_path):
    with Server(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        tier = ValkeyTier(server.url)
        rows = np.ones((64, 128 << 10), np.uint8)
        answers = tier.write(KEYS, rows)
        assert 0 < sum(answers) < 64
        assert tier.exists(KEYS) == answers
        assert tier.read(KEYS, rows) == answers
        assert tier.stats()["refused_records"] == answers.count(False)
        tier.close()


def test_a_key_that_is_something_else_is_a_miss_and_others_are_read(tmp_path):
    with Server(tmp_path) as server:
        tier = ValkeyTier(server.url)
        rows = np.ones((2, 4096), np.uint8)
        tier.write(KEYS[:2], rows)
        other = valkey.Valkey.from_url(server.url)
        other.delete(b"kvpool-" + KEYS[0])
        other.rpush(b"kvpool-" + KEYS[0], "a list of somebody")
        other.close()
        assert tier.read(KEYS[:2], rows) == [False, True]
        tier.close()


def test_a_server_that_refuses_this_client_is_an_error_and_no_miss(tmp_path):
    with Server(tmp_path) as server:
        admin = valkey.Valkey.from_url(server.url)
        admin.execute_command("ACL", "SETUSER", "reader", "on", ">pw", "~*", "+ping", "+get")
        admin.close()
        tier = ValkeyTier(server.url.replace("//", "//reader:pw@"))
        rows = np.ones((1, 4096), np.uint8)
        assert tier.read(KEYS[:1], rows) == [False]
        with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:\d+ refuses: .*set"):
            tier.write(KEYS[:1], rows)
        with pytest.raises(ConnectionError, match="refuses"):
            tier.exists(KEYS[:1])
        tier.close()
        with pytest.raises(ConnectionError, match="refuses: DB index is out of range"):
            ValkeyTier(server.url.replace("/0", "/99"))
    with pytest.raises(ConnectionError, match="no answer from /missing/socket"):
        ValkeyTier("unix:///missing/socket")


def test_a_killed_server_is_an_error_that_keeps_the_password(tmp_path):
    with Server(tmp_path) as server:
        tier = ValkeyTier(server.url, timeout_s=1)
        rows = np.ones((1, 4096), np.uint8)
        assert tier.write(KEYS[:1], rows) == [True]
        server.kill()
        for call in (
            lambda: tier.exists(KEYS[:1]),
            lambda: tier.read(KEYS[:1], rows),
            lambda: tier.write(KEYS[:1], rows),
        ):
            with pytest.raises(ConnectionError, match=r"no answer from 127\.0\.0\.1:"):
                call()
        tier.close()
    (port,) = free_ports(1)
    with pytest.raises(ConnectionError) as error:
        ValkeyTier(f"valkey://:secret@127.0.0.1:{port}/0", timeout_s=1)
    assert "secret" not in str(error.value)
