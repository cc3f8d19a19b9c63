"""Following a tree: what comes to it and leaves it, told off the scheduler's path."""
