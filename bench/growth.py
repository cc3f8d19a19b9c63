"""How the cost of each verb grows with what it is given, beside peers and the machine's floor.

`python bench/growth.py --plot DIR --json FILE` measures curves and prints what the targets say;
`--quick` takes a minute. The parts are in `bench/curves/`.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file: the clone, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.curves.command import main

if __name__ == "__main__":
    sys.exit(main())
