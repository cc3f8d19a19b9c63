"""A fuzz target: bytes become operations on tree, ledger or allocator, beside slow models."""
