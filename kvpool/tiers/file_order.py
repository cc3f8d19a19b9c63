"""FileOrder: which page files go first, by the times that their uses left on them."""

from __future__ import annotations

import heapq
import os
import re
import stat
import threading
import time
from collections import deque
from dataclasses import dataclass

from kvpool.page_keys import KEY_BYTES
from kvpool.tiers.directory import Ledger, TierDirectory
from kvpool.tiers.page_files import forget, size_of, stat_of

_FAN = re.compile(r"[0-9a-f]{2}")
_PAGE = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}\.page")
_LATEST = 1 << 62  # ns, in the year 2116: nothing of ours was used later
# A scan looks at every file, and remembers a part of them: so many calls share its price.
_REMEMBERED = 8
_REMEMBERED_LEAST = 1024


@dataclass(frozen=True, order=True)
class _Victim:
    last_use: int
    name: str
    mtime: int


class FileOrder:
    """Stamps uses on page files, and evicts the ones whose stamps are oldest.

    The stamp is a file's time of modification. It follows the clock while that goes forward, and
    counts on by itself where it went back: in this process at once, in others from the next write
    on. A file with a time that cannot be is taken for the oldest.

    Parameters
    ----------
    directory : TierDirectory
        Where the files are.

    Attributes
    ----------
    num_evicted, num_scans : int
        By this object.
    """

    def __init__(self, directory: TierDirectory) -> None:
        self.num_evicted = 0
        self.num_scans = 0
        self._directory = directory
        self._last_use = directory.peek().last_use
        self._lock = threading.Lock()
        self._victims: deque[_Victim] = deque()

    def stamp(self, file: int) -> None:
        """Make an open file the most recently used one."""
        with self._lock:
            now = self._last_use = max(self._last_use + 1, time.time_ns())
        os.utime(file, ns=(now, now))

    # ---- with the ledger locked

    def agree(self, ledger: Ledger) -> None:
        """Go on where all processes are, and have them go on where this one is."""
        with self._lock:
            self._last_use = ledger.last_use = max(self._last_use, ledger.last_use)

    def make_room(self, ledger: Ledger, num_bytes: int, keep: str, capacity_bytes: int) -> bool:
        """Evict until a file `keep` of so many bytes fits; False if it never will."""
        scanned = False
        while True:
            more = num_bytes - (size_of(self._directory, keep) or 0)
            if ledger.num_bytes + more <= capacity_bytes:
                return True
            if not self._victims:
                if scanned:
                    return False
                # What was counted wrong after a crash is put right, which may be all it needs.
                self._scan(ledger)
                scanned = True
                continue
            victim = self._victims.popleft()
            found = stat_of(self._directory, victim.name)
            if found is not None and found.st_mtime_ns == victim.mtime:
                forget(self._directory, ledger, victim.name, found.st_size)
                self.num_evicted += 1

    def _scan(self, ledger: Ledger) -> None:
        """Count what is there, and find the files that go next."""
        self.num_scans += 1
        victims = []
        num_bytes = 0
        for high, _ in list(self._directory.entries(".", _FAN)):
            for low, _ in list(self._directory.entries(high, _FAN)):
                for name, entry in self._directory.entries(f"{high}/{low}", _PAGE):
                    try:
                        found = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if not stat.S_ISREG(found.st_mode):
                        continue
                    mtime = found.st_mtime_ns
                    last_use = mtime if 0 <= mtime < _LATEST else 0
                    victims.append(_Victim(last_use, f"{high}/{low}/{name}", mtime))
                    num_bytes += found.st_size
        ledger.num_bytes, ledger.num_records = num_bytes, len(victims)
        if victims:
            # So that what is used from now on comes after all of them.
            ledger.last_use = max(ledger.last_use, max(victims).last_use)
            self.agree(ledger)
        count = max(_REMEMBERED_LEAST, len(victims) // _REMEMBERED)
        self._victims = deque(heapq.nsmallest(count, victims))
