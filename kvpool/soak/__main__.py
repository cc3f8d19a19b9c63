"""``python -m kvpool.soak``."""

import sys

from kvpool.soak.command import main

if __name__ == "__main__":
    sys.exit(main())
