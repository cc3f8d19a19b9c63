"""Hugging Face transformers over a pool: `model.generate` with prefixes that outlive the call.

`PoolCache` is a `Cache` of transformers whose K and V lie in a `KVCachePool`; `generate` makes
one, calls ``model.generate`` with it, and inserts what was computed. Needs the extra
``transformers``.
"""

from kvpool.interop.transformers.cache import PoolCache
from kvpool.interop.transformers.generation import generate

__all__ = ["PoolCache", "generate"]
