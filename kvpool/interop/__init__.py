"""Borders to other libraries: torch by zero-copy DLPack, FlashInfer over it.

Nothing here is imported with kvpool, and no module here imports its guest before something of it
is asked for.
"""
