"""What a tier's read, write and look-up cost, against a plain copy of as many bytes.

`python -m bench.stores [--json FILE] [--folder DIR]` measures each tier that can be had here:
memory of the process, files, and over loopback a Mooncake Store and a Valkey server, which it
starts. Batches of 32 records; medians. Files are read from and written to the system's cache.
"""

import argparse
import tempfile
from contextlib import ExitStack
from hashlib import sha256
from itertools import product
from pathlib import Path

import numpy as np

from bench.clock import Table, interleave
from kvpool.tiers.file import FileTier
from kvpool.tiers.host import HostTier
from tests.helpers.mooncake import Lender, Master, why_no_mooncake
from tests.helpers.valkey import Server, why_no_valkey

BATCH = 32
SIZES = (64 << 10, 1 << 20)
ROOM = 256 << 20
NAMES = ("host", "file", "mooncake", "mooncake, lent by itself", "valkey")


def open_tier(name, folder, stack):
    """A tier of this name, or None where it cannot be had."""
    if name == "host":
        return HostTier(ROOM)
    if name == "file":
        return FileTier(folder / "files", ROOM)
    if name.startswith("mooncake"):
        if why_no_mooncake():
            return None
        from kvpool.tiers.mooncake import MooncakeTier

        master = stack.enter_context(Master(folder))
        own_bytes = ROOM if "itself" in name else 0
        if not own_bytes:
            stack.enter_context(Lender(master, ROOM))
        return MooncakeTier(master.metadata, master.address, segment_bytes=own_bytes)
    if why_no_valkey():
        return None
    from kvpool.tiers.valkey import ValkeyTier

    return ValkeyTier(stack.enter_context(Server(folder)).url)


def measure(tier, record_bytes, rounds):
    """Seconds of a batch by what was done."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (2 * BATCH, record_bytes), np.uint8)
    sources, targets = rows[:BATCH], rows[BATCH:]
    keys = [sha256(f"{record_bytes} {i}".encode()).digest() for i in range(BATCH)]
    missing = [key[::-1] for key in keys]
    tier.register(rows)
    if not all(tier.write(keys, sources)) or not all(tier.read(keys, targets)):
        raise RuntimeError(f"{tier.name} refuses records of the bench")
    np.testing.assert_array_equal(targets, sources)
    seconds = interleave(
        {
            "copy": lambda: np.copyto(targets, sources),
            # Each time into room that is free: some tiers leave a record that is there.
            "write": (
                lambda: tier.remove(missing),
                lambda _: tier.write(missing, sources),
            ),
            "read": lambda: tier.read(keys, targets),
            "look up": lambda: tier.exists(keys),
        },
        rounds=rounds,
    )
    tier.remove(keys + missing)
    tier.unregister(rows)
    return seconds


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    parser.add_argument("--folder", help="where files go, default the system's temporary folder")
    parser.add_argument("--rounds", type=int, default=20, help="samples a case")
    options = parser.parse_args(argv)
    table = Table(f"batches of {BATCH} records, a record of each, medians")
    for name, record_bytes in product(NAMES, SIZES):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
            tier = open_tier(name, folder, stack)
            if tier is None:
                continue
            stack.callback(tier.close)
            seconds = measure(tier, record_bytes, options.rounds)
        for done, value in seconds.items():
            about = f"{name}, {record_bytes >> 10} KiB: {done}"
            ratio = value / seconds["copy"]
            table.add(about, value / BATCH * 1e6, "us", ratio=ratio, to="copy")
            if done != "look up":
                table.add("  as bandwidth", record_bytes * BATCH / value / 1e6, "MB/s")
    table.show()
    if options.json:
        table.write_json(options.json)


if __name__ == "__main__":
    main()
