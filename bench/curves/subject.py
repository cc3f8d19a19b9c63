"""What a subject is: a title, its axes, who takes part, and how to make samplers."""

from collections.abc import Callable
from dataclasses import dataclass, field

FLOOR, POOL, PARTS = "floor", "kvpool", "kvpool-parts"
SGLANG = ("sglang-rust", "sglang-py")
PEERS = (*SGLANG, "vllm-sha256")
ALL = (FLOOR, POOL, PARTS, *PEERS)
LONG = 131_072  # tokens


@dataclass(frozen=True)
class Panel:
    """What stays the same along a curve."""

    page_size: int
    more: str = ""  # in words, if there is something else
    number: int = 0  # and as a number

    def __str__(self):
        return f"page {self.page_size}" + (f", {self.more}" if self.more else "")


@dataclass(frozen=True)
class Subject:
    """One picture: curves over one size.

    ``make(contender, panel, sizes)`` answers ``{size: sampler}``; a sampler makes ready what it
    needs, times one call, and answers seconds (or bytes).
    """

    name: str
    title: str
    x_label: str
    sizes: tuple
    make: Callable
    contenders: tuple = ALL
    panels: tuple = tuple(Panel(page_size) for page_size in (16, 64, 1))
    reach: dict = field(default_factory=dict)  # contender -> largest size that it is given
    headline: str = "kvpool"  # the curve that the title speaks of
    floor: str = ""  # what the floor does
    floor_is: str = "floor"  # its name, where it is another yardstick
    unit: str = "us"
    notes: tuple = ()
    rounds: int = 9
    one_size_a_process: bool = False

    def sizes_of(self, contender, quick=False):
        """The sizes that a contender is given; quick: the smaller half."""
        sizes = self.sizes[: max(2, len(self.sizes) // 2)] if quick else self.sizes
        return [size for size in sizes if size <= self.reach.get(contender, max(self.sizes))]

    def panels_of(self, quick=False):
        """The panels; quick: the first."""
        return self.panels[:1] if quick else self.panels

    def scale(self):
        """What a sample is multiplied with to be in the unit."""
        return {"us": 1e6, "ns/token": 1e9}.get(self.unit, 1.0)
