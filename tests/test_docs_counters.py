"""The page on tiers names every counter that there is, and none that is not."""

import re
from pathlib import Path

from kvpool.tiers import FileTier, HostTier
from kvpool.tiers.mooncake import _COUNTED as MOONCAKE
from kvpool.tiers.valkey import _COUNTED as VALKEY
from tests.helpers.pools import case_pool

PAGE = Path(__file__).resolve().parents[1] / "docs" / "howto" / "tiers.md"
OF_MOONCAKE = {"segment_bytes", "registered_bytes", "copied_records"}


def table_after(words):
    """The names in the first column of the table that follows some words."""
    rows = PAGE.read_text(encoding="utf-8").split(words)[1].split("\n\n")[1].splitlines()
    assert rows[0].startswith("|")
    return set(re.findall(r"`([a-z_]+)`", "\n".join(row.split("|")[1] for row in rows)))


def test_every_counter_is_on_the_page(make_pool, tmp_path):
    pool = case_pool(make_pool, 4, 8)
    tiers = [HostTier(1 << 16), FileTier(tmp_path / "tier", 1 << 16)]
    try:
        attached = pool.attach_tiers(tiers, model="m")
        own = set().union(*(tier.stats() for tier in tiers), MOONCAKE, VALKEY, OF_MOONCAKE)
        by_tier = set().union(*attached.stats_by_tier().values()) - own
        total = set(attached.stats())
    finally:
        pool.close()
        for tier in tiers:
            tier.close()
    text = PAGE.read_text(encoding="utf-8")
    assert total == table_after("Those of `pool.tiers.stats()`")
    assert by_tier == table_after("Those of `pool.tiers.stats_by_tier()`")
    assert not {name for name in own if f"`{name}`" not in text}
