"""Events: what comes to the cache and leaves it, published for routers.

`KVCachePool.publish_events` opens a stream in the format of vLLM's KV events, so that whatever
subscribes to vLLM, SGLang or Dynamo workers reads a pool as well. `EventSubscriber` and
`read_events` receive such streams, `CacheView` knows from one what its pool has cached. All of it
needs pyzmq and msgspec (extra `events`).
"""

from kvpool.events.publisher import EventPublisher
from kvpool.events.subscriber import EventSubscriber, read_events
from kvpool.events.view import CacheView
from kvpool.events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    ReceivedBatch,
)

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "CacheView",
    "Event",
    "EventBatch",
    "EventPublisher",
    "EventSubscriber",
    "ReceivedBatch",
    "read_events",
]
