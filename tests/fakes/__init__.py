"""Stand-ins for what a machine without a GPU lacks: a driver, and CuPy's arrays."""
