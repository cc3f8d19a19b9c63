"""SGLang: its Rust tree core, through the adapter that its unified cache calls."""

import importlib
import importlib.machinery
import importlib.util

from bench.replay.sglang import MEM_CACHE, SHARED_NOTES, RadixKey, SGLang
from bench.replay.stand_ins import fill, folder_of


def _import_core():
    """Load the extension of the wheel in place of `extension.py`, which looks for a Rust build."""
    name = f"{MEM_CACHE}.rust_tree_core.mem_cache"
    folder = folder_of("sglang") / "srt" / "mem_cache" / "rust_tree_core"
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        if (path := folder / f"mem_cache{suffix}").exists():
            break
    else:
        raise ModuleNotFoundError(f"no Rust core for this Python in {folder.name} of sglang")
    spec = importlib.util.spec_from_file_location(name, path)
    bindings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bindings)
    fill(f"{MEM_CACHE}.rust_tree_core.extension", bindings=bindings)
    return importlib.import_module(f"{MEM_CACHE}.rust_tree_core.adapter")


_adapter = _import_core()
_arguments = importlib.import_module(f"{MEM_CACHE}.base_prefix_cache")
_actions = importlib.import_module(f"{MEM_CACHE}.unified_cache.cache_action")
_parameters = importlib.import_module(f"{MEM_CACHE}.cache_init_params")
FULL = importlib.import_module(f"{MEM_CACHE}.unified_cache.component_type").ComponentType.FULL


class RustTree(SGLang):
    """The tree core with full attention only, pumped as `UnifiedRadixCache` pumps it."""

    name = "sglang-rust"
    notes = (
        *SHARED_NOTES,
        "sglang-rust: a thin loop stands for UnifiedRadixCache (no HiCache, sessions, metrics or "
        "consensus of ranks), which favours it; its extension, built for torch 2.14, runs on the "
        "torch that is named below",
    )

    def __init__(self, capacity, page_size):
        super().__init__(capacity, page_size)
        parameters = _parameters.CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.slots,
            page_size=page_size,
            tree_components=(FULL,),
        )
        self.core = _adapter.RustUnifiedTreeCore(parameters)
        self.root = self.core.root_node_handle(None)

    def match(self, job):
        found = self.core.match_prefix(_arguments.MatchPrefixParams(key=RadixKey(job.shorter)))
        self.apply(found.cache_actions)
        job.node = found.last_device_node
        job.indices = self.core.collect_full_device_indices(job.node, self.root)
        job.hit = found.device_prefix_len

    def lock(self, job):
        job.receipt = self.core.inc_lock_ref(job.node).to_dec_params()

    def evict(self, num_tokens):
        core, evicted = self.core, {FULL: 0}
        core.evict_device_start(FULL, num_tokens)
        try:
            while True:
                step = core.evict_device_next_node(FULL, evicted)
                self.settle(step, evicted)
                if step.node_id is not None:
                    self.settle(core.evict_device_leaf(step.node_id, False), evicted)
                elif not step.made_progress:
                    break
        finally:
            core.evict_device_end(FULL)

    def settle(self, result, evicted):
        """Count and free what one step of an eviction gave up."""
        evicted[FULL] += result.tracker.get(FULL, 0)
        for indices in result.device_frees.pop(FULL, ()):
            self.slots.free_segment(indices, start_pos=0)
        self.apply(result.cache_actions)

    def apply(self, actions):
        """Free what the tree gives back; a full-attention tree asks for nothing else."""
        for action in actions:
            kind = type(action)
            assert kind in (_actions.FreeDeviceKV, _actions.FreeDeviceKVFullOnly), action
            for indices in action.indices:
                self.slots.free_segment(indices, start_pos=0)

    def finish(self, job):
        core = self.core
        key, slots, length = self.whole_pages(job)
        step = core.begin_insert(
            _arguments.InsertParams(
                key=key, value=slots, prev_prefix_len=job.hit, inserted_len=job.hit
            )
        )
        self.apply(step.actions)
        while step.result is None:
            step = core.resume_insert()
            self.apply(step.actions)
        self.apply(core.end_insert())
        self.free_slots(job, length, len(job.row))
        core.dec_lock_ref(job.node, job.receipt)

    def cached_tokens(self):
        return self.check_leaks(self.core.evictable_size() + self.core.protected_size())
