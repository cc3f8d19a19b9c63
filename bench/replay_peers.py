"""Whole request traces through kvpool and its peers, each phase timed apart.

`make bench-peers` installs the peers and runs this; `python bench/replay_peers.py --help` says how
to choose cells, contenders and traces. The parts are in `bench/replay/`.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file: the clone, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.replay.command import main

if __name__ == "__main__":
    sys.exit(main())
