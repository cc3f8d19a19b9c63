"""``python -m kvpool``: the command line."""

from kvpool.cli import main

main()
