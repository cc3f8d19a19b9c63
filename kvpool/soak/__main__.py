"""``python -m kvpool.soak``."""

import sys

if __name__ == "__main__":
    try:
        # Here, as it takes a while, and Ctrl-C may come before it is over.
        from kvpool.soak.command import main

        code = main()
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
