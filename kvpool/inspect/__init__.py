"""Pictures of a pool: its pages, its tree, and which prefixes are worth their pages."""

from kvpool.inspect.hits import PrefixHits, PrefixSaving
from kvpool.inspect.picture import PoolPicture, page_map
from kvpool.inspect.rich_tree import top_prefixes, tree

__all__ = ["PoolPicture", "PrefixHits", "PrefixSaving", "page_map", "top_prefixes", "tree"]
