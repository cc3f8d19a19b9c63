"""The target: a byte says what is driven, the next ones how it is made, the rest are operations.

An operation is a byte for the verb and a byte an argument. After each one the counts are compared
with the model, every few operations everything is, by `check()` too; at the end all that is held
goes back.
"""

from tests.fuzz.allocator import AllocatorStream
from tests.fuzz.ledger import LedgerStream
from tests.fuzz.stream import Stream
from tests.fuzz.tree import TreeStream

# How often each comes up.
DRIVEN = (TreeStream, LedgerStream, TreeStream, LedgerStream, AllocatorStream)
MAX_OPERATIONS = 64
CHECK_EVERY = 4


def run(data):
    """Run `data` to its end and answer ``(name of what is driven, operations)``."""
    stream = Stream(data)
    twin = stream.item(DRIVEN)(stream)
    done = []
    while not stream.ended and len(done) < MAX_OPERATIONS:
        verb = stream.item(twin.VERBS)
        done.append(verb)
        getattr(twin, verb)(stream)
        twin.compare()
        if len(done) % CHECK_EVERY == 0:
            twin.compare_all()
    twin.end()
    return type(twin).__name__, done
