"""Borders to other libraries: torch by zero-copy DLPack, FlashInfer and transformers over it.

Nothing here is imported with kvpool. No module here imports its guest before something of it is
asked for, but for `kvpool.interop.transformers`, whose cache is a subclass of its guest's.
"""
