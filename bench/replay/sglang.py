"""SGLang: its Python radix tree with its page allocators."""

import importlib
import importlib.metadata
import sys
import types
from array import array

import torch

from bench.replay.contender import Contender
from bench.replay.stand_ins import fill, folder_of, open_, stand_in_for

MEM_CACHE = "sglang.srt.mem_cache"


def _import_parts():
    """Make the cache modules importable. The helpers given here are rewritten, not SGLang's."""
    folder = folder_of("sglang")
    stand_in_for(
        "sglang.kernels",
        "sglang.srt.disaggregation",
        "sglang.srt.observability",
        "sglang.srt.server_args",
        f"{MEM_CACHE}.memory_pool",
        f"{MEM_CACHE}.hicache_storage",
        f"{MEM_CACHE}.cpp_utils",
        f"{MEM_CACHE}.unified_cache.components",
        f"{MEM_CACHE}.unified_cache.unified_tree_core",
    )
    for name in ("", ".srt", ".srt.mem_cache", ".srt.mem_cache.allocator"):
        open_(f"sglang{name}", folder.joinpath(*name.split(".")))
    for name in ("unified_cache", "rust_tree_core"):
        open_(f"{MEM_CACHE}.{name}", folder / "srt" / "mem_cache" / name)
    helpers = {
        "ceil_align": lambda value, step: -(-value // step) * step,
        "get_bool_env_var": lambda *_, **__: False,
        "is_hip": lambda: False,
        "assert_int64_array": _check_int64,
    }
    fill("sglang.srt.utils", **helpers)
    fill("sglang.srt.utils.common", **helpers)
    capabilities = types.SimpleNamespace(supports_triton=False)
    fill("sglang.srt.platforms", current_platform=types.SimpleNamespace(capabilities=capabilities))
    fill("sglang.srt.environ")
    fill("sglang.srt.runtime_context")
    base = importlib.import_module(f"{MEM_CACHE}.allocator.base")
    package = sys.modules[f"{MEM_CACHE}.allocator"]
    package.BaseTokenToKVPoolAllocator = base.BaseTokenToKVPoolAllocator
    torch.set_num_threads(1)


def _check_int64(tokens, what=""):
    assert tokens.typecode == "q", what


_import_parts()
_arguments = importlib.import_module(f"{MEM_CACHE}.base_prefix_cache")
_tree = importlib.import_module(f"{MEM_CACHE}.radix_cache")
RadixKey = _tree.RadixKey

SHARED_NOTES = (
    "sglang: modules that the measured code only imports (metrics, config, events, kernels) are "
    "empty; ceil_align and assert_int64_array are rewritten; index tensors and free lists are CPU "
    "tensors (in a server they are on the GPU, where cat and clone are kernel launches); "
    "page-aligned alloc(), not alloc_extend; one insert at the end, while the server's checkpoint "
    "also matches again; cutting the prompt at n - 1 is not timed",
)


def make_allocator(capacity, page_size):
    """SGLang's allocator for a page size, on the CPU, with no K/V buffer behind it."""
    rest = torch.bfloat16, "cpu", None, False
    if page_size == 1:
        module = importlib.import_module(f"{MEM_CACHE}.allocator.token")
        return module.TokenToKVPoolAllocator(capacity, *rest)
    module = importlib.import_module(f"{MEM_CACHE}.allocator.paged")
    return module.PagedTokenToKVPoolAllocator(capacity, page_size, *rest)


class SGLang(Contender):
    """What both trees share: keys, rows and the allocator."""

    def __init__(self, capacity, page_size):
        super().__init__(capacity, page_size)
        self.slots = make_allocator(capacity, page_size)

    @classmethod
    def versions(cls):
        return {"sglang": importlib.metadata.version("sglang"), "torch": torch.__version__}

    def prepare(self, job):
        job.full = array("q", job.tokens.astype("int64").tobytes())
        job.shorter = job.full[: job.num_prompt - 1]

    def alloc(self, job):
        need = -(-(job.num_tokens - job.hit) // self.page_size) * self.page_size
        short = need - self.slots.available_size()
        if short > 0:
            self.evict(short)
        new = self.slots.alloc(need)
        assert new is not None, "eviction gave too little"
        # The request's row of ReqToTokenPool: int32 slots.
        job.row = torch.empty(job.hit + need, dtype=torch.int32)
        job.row[: job.hit] = job.indices
        job.row[job.hit :] = new
        job.indices = None

    def evict(self, num_tokens):
        """Make room by `num_tokens` or more."""
        raise NotImplementedError

    def whole_pages(self, job):
        """Key and int64 slots of what can be cached, with the row and the length of it."""
        length = job.num_tokens // self.page_size * self.page_size
        key = RadixKey(job.full).page_aligned(self.page_size)
        return key, job.row[:length].to(dtype=torch.int64, copy=True), length

    def free_slots(self, job, start, end):
        """Give back a part of the row."""
        if start < end:
            self.slots.free_segment(job.row[start:end].to(torch.int64), start_pos=start)

    def check_leaks(self, cached):
        """`cached`, if it and the free slots are all there are."""
        assert cached + self.slots.available_size() == self.capacity, "slots have leaked"
        return cached


class PythonTree(SGLang):
    """`RadixCache`, driven as its own insert and release do."""

    name = "sglang-py"
    notes = SHARED_NOTES

    def __init__(self, capacity, page_size):
        super().__init__(capacity, page_size)
        self.tree = _tree.RadixCache.create_simulated(
            mock_allocator=self.slots, page_size=page_size
        )

    def match(self, job):
        found = self.tree.match_prefix(_arguments.MatchPrefixParams(key=RadixKey(job.shorter)))
        job.node = found.last_device_node
        job.indices = self.tree.path_device_indices(job.node)
        job.hit = len(job.indices)

    def lock(self, job):
        self.tree.inc_lock_ref(job.node)

    def evict(self, num_tokens):
        self.tree.evict(_arguments.EvictParams(num_tokens=num_tokens))

    def finish(self, job):
        key, slots, length = self.whole_pages(job)
        result = self.tree.insert(_arguments.InsertParams(key=key, value=slots))
        self.free_slots(job, job.hit, result.prefix_len)
        self.free_slots(job, length, len(job.row))
        self.tree.dec_lock_ref(job.node)

    def cached_tokens(self):
        return self.check_leaks(self.tree.evictable_size() + self.tree.protected_size())
