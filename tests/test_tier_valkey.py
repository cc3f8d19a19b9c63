"""ValkeyTier on a real server: full, killed, and not there."""

from hashlib import sha256

import numpy as np
import pytest

from kvpool.tiers.valkey import ValkeyTier
from tests.helpers.mooncake import free_ports
from tests.helpers.valkey import Server, why_no_valkey

if why_no_valkey():
    pytest.skip(why_no_valkey(), allow_module_level=True)

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
