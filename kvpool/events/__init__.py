"""Events: what comes to the cache and leaves it, published for routers."""
