"""The README keeps its word: its example runs as printed, its reference table walks."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import kvpool
from kvpool import KVCachePool

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| (.*) ?\|$", README, flags=re.MULTILINE)

# Every member of the reference class, an overload once; the table must name them all.
REFERENCE_MEMBERS = """
activateStep alloc allocate beginPrefetchDecodeGraphStep bindRequest bindRequests bindWithPrefix
boundRequestCount buildFlashInferMetadata clearStepFlashInferMetadata close computeDtype
computeStaticKvBudget consumeVerifyGraphMetaRealloc currentStepFlashInferMetadata
decodeGraphBuffers decodeGraphMetadata device endPrefetchDecodeGraphStep ensureRequest
finishRequest firstCacheLenInNextPageBucket flashInferWorkspace forMtp forMtpHistory forTesting
free freePages freeSlots get getPadded headDim installPrefetchedStepMetadata invalidateRange
isBound isPrefixReuseEnabled kScale keyCache keyLayer kvIsComputeDtype matchedPrefixLen
numKvHeads numLayers numPagesForLength numSlots pageSize prefixInsertTokens prefixMatchTokens
prefixPromptTokens prepareDecodeGraphStep prepareVerifyGraphStep prepareVerifyGraphStepRagged
put radix requestCapacity sealLength setDecodeGraphBuffers setPrefixReuseEnabled
setVerifyGraphBuffers setVerifyWindowKernel sharedFlashInferMetadata slotIndices
stepsUntilPageBoundary truncateTo unbindRequest unbindRequests vScale valueCache valueLayer
verifyGraphBuffers verifyGraphMetadata verifyQoIndptrBuf verifyWindowKernel zeroRejectedKv
"""


def resolve(path):
    """The object behind a dotted name of the table, or None."""
    found = kvpool
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def test_example_runs_as_printed():
    example = r"```python\n(.*?)```\n\nIt prints\n\n```\n(.*?)```"
    code, printed = re.search(example, README, re.DOTALL).groups()
    assert len(code.strip().splitlines()) <= 22
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {})
    assert out.getvalue() == printed


def test_table_names_every_reference_member():
    named = {re.match(r"\w+", member).group() for member, _, _ in ROWS}
    assert named == {
        *REFERENCE_MEMBERS.split(),
        "KvCachePool",
        "DEFAULT_PAGE_SIZE",
        "StaticKvBudget",
    }


@pytest.mark.parametrize(("member", "name", "note"), ROWS)
def test_table_row_walks_unless_it_is_marked(member, name, note):
    found = resolve(name)
    if "*next*" in note:
        assert found is None, f"{name} is there: take the mark off {member}"
    else:
        assert found is not None, f"{member} should be {name}"
        doc = found.__doc__ if name != "DEFAULT_PAGE_SIZE" else "a number"
        assert doc, f"{name} has no docstring"


def test_additions_are_there():
    added = re.search(r"Added beside them: (.*?); namespaces", README, re.DOTALL).group(1)
    for name in re.findall(r"`(\w+)`", added):
        assert hasattr(KVCachePool, name)
