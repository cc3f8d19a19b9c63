"""What a save and a load tell."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.snapshot.namespaces import ExtraKey

MOST_LISTED = 100  # dropped pages that a report names
_MOST_SHOWN = 60  # characters of a namespace


@dataclass(frozen=True)
class SaveReport:
    """What a save wrote.

    Attributes
    ----------
    path : str
        The file, links resolved.
    pages, tokens : int
        Cached pages in it, and their tokens.
    namespaces : int
        Namespaces that have pages.
    file_bytes : int
        Its size.
    """

    path: str
    pages: int
    tokens: int
    namespaces: int
    file_bytes: int

    def __str__(self) -> str:
        return (
            f"saved {self.pages:,} pages ({self.tokens:,} tokens) of {self.namespaces:,} "
            f"namespaces in {self.file_bytes:,} bytes to {self.path}"
        )


@dataclass(frozen=True)
class DroppedPage:
    """A page that was saved and not loaded.

    Attributes
    ----------
    extra_key : str, bytes, int or None
        Its namespace.
    start : int
        Position of its first token.
    reason : str
        ``"checksum"``, ``"cut off"`` (the file ends before or inside it), ``"below"`` (a page
        above it was dropped) or ``"room"``.
    """

    extra_key: ExtraKey
    start: int
    reason: str


@dataclass
class LoadReport:
    """What a load brought back; ``pages_saved`` is the sum of the three counts after it.

    Attributes
    ----------
    path : str
        The file.
    pages_saved, pages_loaded : int
        Pages of the file, and those in the pool now.
    pages_dropped_corrupt : int
        Pages that did not verify, were cut off, or stood below such a page.
    pages_dropped_room : int
        Pages for which the pool was too small: the first that eviction would have taken.
    dropped : list of DroppedPage
        The first hundred of them, the most valuable first.
    file_bytes, expected_bytes : int
        Size of the file, and what it was when it was saved.
    """

    path: str
    pages_saved: int = 0
    pages_loaded: int = 0
    pages_dropped_corrupt: int = 0
    pages_dropped_room: int = 0
    dropped: list[DroppedPage] = field(default_factory=list)
    file_bytes: int = 0
    expected_bytes: int = 0

    def count(self, reason: str) -> None:
        """Count a page that is not loaded."""
        if reason == "room":
            self.pages_dropped_room += 1
        else:
            self.pages_dropped_corrupt += 1

    def __str__(self) -> str:
        lines = [
            f"loaded {self.pages_loaded:,} of {self.pages_saved:,} pages from {self.path}: "
            f"{self.pages_dropped_corrupt:,} dropped as corrupt, {self.pages_dropped_room:,} for "
            "want of room"
        ]
        if self.file_bytes != self.expected_bytes:
            lines.append(
                f"the file has {self.file_bytes:,} bytes, it was saved with "
                f"{self.expected_bytes:,}"
            )
        lines += [
            f"  {page.reason}: namespace {_shown(page.extra_key)}, tokens from {page.start}"
            for page in self.dropped
        ]
        num_more = self.pages_saved - self.pages_loaded - len(self.dropped)
        if num_more > 0:
            lines.append(f"  and {num_more:,} more")
        return "\n".join(lines)


def _shown(extra_key: ExtraKey) -> str:
    if isinstance(extra_key, int):
        # In decimal digits Python refuses to print what is too long.
        return str(extra_key) if abs(extra_key) < 1 << 128 else f"{extra_key:#x}"[:_MOST_SHOWN]
    if isinstance(extra_key, (str, bytes)):
        return repr(extra_key[:_MOST_SHOWN])
    return repr(extra_key)
