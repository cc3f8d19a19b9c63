"""What of transformers is subclassed: the one door to it."""

from __future__ import annotations

try:
    from transformers.cache_utils import Cache, CacheLayerMixin
except ImportError as error:
    raise ImportError(
        f"a cache for transformers needs transformers 5 and torch ({error}): install "
        "kvpool[transformers]"
    ) from error

__all__ = ["Cache", "CacheLayerMixin"]
