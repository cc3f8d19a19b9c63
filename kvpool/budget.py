"""StaticKVBudget: how many tokens fit. Numbers in, numbers out; no device is asked here.

The rule is SGLang's ``--mem-fraction-static``: a fraction of the total memory is for everything
that stays (weights, pools, K/V), the rest for activations; K/V gets what the fraction leaves after
all that is allocated already.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from kvpool.numbers import whole_number
from kvpool.paging import num_pages_for_length


@dataclass(frozen=True)
class StaticKVBudget:
    """The sizing of a pool, in bytes, tokens (slots) and pages.

    Attributes
    ----------
    total, free, used : int
        Device memory in bytes; ``used = total - free``.
    static_budget, dynamic_reserve : int
        Bytes of the static region, and what is left for activations.
    kv_budget : int
        Bytes for K and V, 0 when the static region is full already.
    bytes_per_token, page_size : int
        Cost of one token, and tokens per page.
    num_slots, num_pages : int
        What fits.
    limited_by : str
        ``"memory"`` (also on a tie) or ``"max_batch_size"``.
    """

    total: int
    free: int
    used: int
    static_budget: int
    dynamic_reserve: int
    kv_budget: int
    bytes_per_token: int
    page_size: int
    num_slots: int
    num_pages: int
    limited_by: str

    def __str__(self) -> str:
        lines = [
            f"{_gib(self.total)} in all, {_gib(self.used)} used before the pool",
            f"static region {_gib(self.static_budget)}, left for activations "
            f"{_gib(self.dynamic_reserve)}",
            f"for K and V {_gib(self.kv_budget)} at {self.bytes_per_token} bytes a token: "
            f"{self.num_slots} tokens in {self.num_pages} pages of {self.page_size}",
        ]
        if self.num_pages == 0:
            short = self.page_size * self.bytes_per_token - (self.static_budget - self.used)
            lines.append(
                f"not one page fits, {_gib(short)} are missing: raise mem_fraction, free memory, "
                "or choose a smaller dtype or page size"
            )
        elif self.limited_by == "memory":
            lines.append(
                "limited by memory: raise mem_fraction or choose a smaller dtype for more"
            )
        else:
            lines.append("limited by max_batch_size x max_seq_len: raise them for more")
        return "\n".join(lines)


def compute_static_kv_budget(
    total: int,
    free: int,
    mem_fraction: float,
    bytes_per_token: int,
    page_size: int,
    max_batch_size: int,
    max_seq_len: int,
) -> StaticKVBudget:
    """Size a pool from memory readings, exactly.

    Parameters
    ----------
    total, free : int
        Bytes of device memory in all, and free now (weights loaded, caches emptied).
    mem_fraction : float
        Static region as a fraction of `total`, in ``(0, 1]``; taken as the decimal that it prints
        as.
    bytes_per_token : int
        Bytes of K and V of one token over all layers.
    page_size : int
        Tokens per page.
    max_batch_size, max_seq_len : int
        Cap: no more than this many requests of this many tokens.

    Raises
    ------
    ValueError
        A fraction outside ``(0, 1]``, ``free`` outside ``0 .. total``, or a size below 1.
    """
    check_mem_fraction(mem_fraction)
    total, free = whole_number(total, "total"), whole_number(free, "free")
    if free > total:
        raise ValueError(f"free must be in 0 .. total = {total} bytes, got {free}")
    bytes_per_token = whole_number(bytes_per_token, "bytes_per_token", 1)
    page_size = whole_number(page_size, "page_size", 1)
    max_batch_size = whole_number(max_batch_size, "max_batch_size", 1)
    max_seq_len = whole_number(max_seq_len, "max_seq_len", 1)
    used = total - free
    static_budget = int(total * Fraction(str(mem_fraction)))
    kv_budget = max(0, static_budget - used)
    by_memory = kv_budget // bytes_per_token // page_size
    by_batch = max_batch_size * num_pages_for_length(max_seq_len, page_size)
    num_pages = min(by_memory, by_batch)
    return StaticKVBudget(
        total=total,
        free=free,
        used=used,
        static_budget=static_budget,
        dynamic_reserve=total - static_budget,
        kv_budget=kv_budget,
        bytes_per_token=bytes_per_token,
        page_size=page_size,
        num_slots=num_pages * page_size,
        num_pages=num_pages,
        limited_by="memory" if by_memory <= by_batch else "max_batch_size",
    )


def check_mem_fraction(mem_fraction: float) -> None:
    """ValueError unless ``0 < mem_fraction <= 1``, TypeError unless it is a real number."""
    is_number = isinstance(mem_fraction, (int, float, Fraction, np.floating))
    if isinstance(mem_fraction, bool) or not is_number:
        raise TypeError(f"mem_fraction must be a number, got {type(mem_fraction).__name__}")
    if not 0 < mem_fraction <= 1:
        raise ValueError(f"mem_fraction must be in (0, 1], got {mem_fraction}")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
