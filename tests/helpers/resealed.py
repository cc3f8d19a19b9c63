"""Snapshots that were changed and sealed again, as by a tool with a fault: the seal verifies."""

import json

import numpy as np

from kvpool.snapshot.checksums import DIGEST_BYTES, seal_of


def split(data):
    """Header with its length, what it says, and what follows."""
    end = 8 + int.from_bytes(data[:8], "little")
    return data[:end], json.loads(data[8:end]), data[end:]


def sealed(header, body, kv_begin):
    """A file with the right seal over `header` and the columns of `body`."""
    seal = seal_of(header, body[DIGEST_BYTES:kv_begin])
    return header + seal + body[DIGEST_BYTES:]


def resealed(data, change_entries=None, **columns):
    """`data` with other metadata, by a function, and other bytes of some columns, sealed again.

    Each of `columns` is a function from the bytes of that tensor to others of the same length.
    """
    _, entries, body = split(data)
    kv_begin = entries["kv"]["data_offsets"][0]
    for name, change in columns.items():
        begin, end = entries[name]["data_offsets"]
        new = bytes(change(body[begin:end]))
        assert len(new) == end - begin
        body = body[:begin] + new + body[end:]
    if change_entries is not None:
        change_entries(entries)
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return sealed(len(text).to_bytes(8, "little") + text, body, kv_begin)


def metadata(**changes):
    """A change of the header: other metadata."""
    return lambda entries: entries["__metadata__"].update(changes)


def put(**entries):
    """A change of an int32 column: ``_3=7`` puts 7 at entry 3."""

    def changed(data):
        numbers = np.frombuffer(data, "<i4").copy()
        for name, number in entries.items():
            numbers[int(name[1:])] = number
        return numbers.tobytes()

    return changed
