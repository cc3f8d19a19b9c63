"""Following a tree: what comes to it and leaves it, told off the scheduler's path.

The compiled tree keeps a journal of plain records while somebody follows; `follower` reads it in a
thread of its own, keeps what pages are called and hold (`mirror`), and tells subscribers
(`contract`).
"""

from kvpool.following.contract import StoredRun, TreeSubscriber
from kvpool.following.follower import TreeFollower

__all__ = ["StoredRun", "TreeFollower", "TreeSubscriber"]
