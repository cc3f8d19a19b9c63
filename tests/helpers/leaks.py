"""What a repeated call leaves behind: Python's blocks and objects, malloc's bytes, references."""

import ctypes
import gc
import sys


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def malloc_reader():
    """A function for the bytes that malloc has handed out, where the C library says it (glibc)."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return lambda: 0
    mallinfo2.restype = _Mallinfo2

    def read():
        info = mallinfo2()
        return info.uordblks + info.hblkhd

    return read


malloc_bytes = malloc_reader()


def left_by(call, loops, watched=(), rounds=3):
    """What `loops` calls leave, the least of some rounds: a leak is in each, a cache is not.

    Returns
    -------
    dict
        ``objects`` that the collector knows, ``blocks`` of Python's allocator, ``bytes`` that
        malloc has handed out, and ``references`` to that one of `watched` that gained most.
    """
    for _ in range(max(8, loops // 8)):
        call()
    gc.collect()
    gc.freeze()  # what is there stays out of each collection from here on
    try:
        return _least_of_rounds(call, loops, watched, rounds)
    finally:
        gc.unfreeze()


def _least_of_rounds(call, loops, watched, rounds):
    least = None
    for _ in range(rounds):
        gc.collect()
        references = [sys.getrefcount(each) for each in watched]
        before = len(gc.get_objects()), sys.getallocatedblocks(), malloc_bytes()
        for _ in range(loops):
            call()
        gc.collect()
        after = len(gc.get_objects()), sys.getallocatedblocks(), malloc_bytes()
        gained = [
            sys.getrefcount(each) - count for each, count in zip(watched, references, strict=True)
        ]
        found = [now - then for now, then in zip(after, before, strict=True)]
        found.append(max(gained, key=abs, default=0))
        least = found if least is None else [min(a, b) for a, b in zip(least, found, strict=True)]
    return dict(zip(("objects", "blocks", "bytes", "references"), least, strict=True))
