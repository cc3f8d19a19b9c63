"""vLLM: `KVCacheManager` with its block pool, and requests that hash their blocks."""

import importlib
import importlib.metadata
import sys
import types
import typing
from collections.abc import Sequence

import torch

from bench.replay.contender import Contender
from bench.replay.stand_ins import definitions, fill, folder_of, open_, stand_in_for


class _Silent:
    """A logger that says nothing."""

    def __getattr__(self, name):
        return lambda *_, **__: None


class _Nothing:
    """Statistics that nobody reads; what makes one of parameters makes None."""

    def __init__(self, *_, **__):
        pass

    @classmethod
    def from_sampling_params(cls, _parameters):
        return None


def _import_parts():
    """Make the cache modules importable. `ConstantList` and the length helper are vLLM's own."""
    folder = folder_of("vllm")
    stand_in_for(
        *(f"vllm.{name}" for name in ("config", "multimodal", "distributed", "platforms", "lora")),
        *("vllm.pooling_params", "vllm.sampling_params"),
        *(f"vllm.v1.{name}" for name in ("engine", "attention", "hisparse", "kv_hints")),
    )
    for name in ("", ".v1", ".v1.core", ".utils"):
        open_(f"vllm{name}", folder.joinpath(*name.split(".")))
    fill("vllm.logger", init_logger=lambda _name: _Silent())
    flags = fill("vllm.envs")
    flags.__class__ = type("_Unset", (types.ModuleType,), {"__getattr__": lambda *_: None})
    fill("vllm.utils.torch_utils", get_dtype_size=lambda _dtype: 2)
    fill("vllm.v1.metrics")
    fill("vllm.v1.metrics.stats", PrefillStats=_Nothing, PrefixCacheStats=_Nothing)
    fill("vllm.v1.structured_output")
    fill("vllm.v1.structured_output.request", StructuredOutputRequest=_Nothing)
    given = {
        "Generic": typing.Generic,
        "Sequence": Sequence,
        "T": typing.TypeVar("T"),
        "overload": typing.overload,
    }
    fill("vllm.v1.utils", **definitions(folder / "v1" / "utils.py", "ConstantList", **given))
    helper = "length_from_prompt_token_ids_or_embeds"
    found = definitions(folder / "utils" / "__init__.py", helper, torch=torch)
    setattr(sys.modules["vllm.utils"], helper, found[helper])
    torch.set_num_threads(1)


_import_parts()
_manager = importlib.import_module("vllm.v1.core.kv_cache_manager")
_blocks = importlib.import_module("vllm.v1.core.kv_cache_utils")
_interface = importlib.import_module("vllm.v1.kv_cache_interface")
_hashing = importlib.import_module("vllm.utils.hashing")
Request = importlib.import_module("vllm.v1.request").Request

SAMPLING = types.SimpleNamespace(max_tokens=1 << 20, structured_outputs=None, extra_args=None)
SAMPLING.skip_reading_prefix_cache = None


class Sha256Manager(Contender):
    """One group of full attention; sha256 of pickled blocks, which is vLLM's default."""

    name = "vllm-sha256"
    hash_name = "sha256"
    page_sizes = (16, 64)
    publishes = "bind"
    notes = (
        "vllm: modules that the measured code only imports (config, platforms, engine, metrics) "
        "are empty, every flag of envs is unset; the prompt is hashed in match (Request is made "
        "there), the output in alloc, where full blocks are also cached, so compare totals; "
        "finish is free(); output is appended at once; no row of slots is written; no page 1",
    )

    def __init__(self, capacity, page_size):
        super().__init__(capacity, page_size)
        hash_block = _hashing.get_hash_fn_by_name(self.hash_name)
        _blocks.init_none_hash(hash_block)
        self.hasher = _blocks.get_request_block_hasher(page_size, hash_block)
        spec = _interface.FullAttentionSpec(
            block_size=page_size, num_kv_heads=1, head_size=1, dtype=torch.bfloat16
        )
        self.num_blocks = capacity // page_size
        config = _interface.KVCacheConfig(
            num_blocks=self.num_blocks + 1,  # one is its null block
            kv_cache_tensors=[],
            kv_cache_groups=[_interface.KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = _manager.KVCacheManager(
            config,
            max_model_len=1 << 21,
            scheduler_block_size=page_size,
            hash_block_size=page_size,
        )

    @classmethod
    def versions(cls):
        return {"vllm": importlib.metadata.version("vllm"), "torch": torch.__version__}

    def prepare(self, job):
        job.prompt_list = job.prompt.tolist()
        job.output_list = job.tokens[job.num_prompt :].tolist()
        job.id = str(job.index)

    def match(self, job):
        job.request = Request(job.id, job.prompt_list, SAMPLING, None, block_hasher=self.hasher)
        job.blocks, job.hit, _ = self.manager.get_computed_blocks(job.request)

    def alloc(self, job):
        request = job.request
        rest = job.num_prompt - job.hit
        found = self.manager.allocate_slots(request, rest, job.hit, job.blocks)
        assert found is not None, "no room for the prompt"
        request.num_computed_tokens = job.num_prompt
        if job.output_list:
            request.append_output_token_ids(job.output_list)
            found = self.manager.allocate_slots(request, len(job.output_list))
            assert found is not None, "no room for the output"
            request.num_computed_tokens = job.num_tokens

    def finish(self, job):
        self.manager.free(job.request)

    def cached_tokens(self):
        pool = self.manager.block_pool
        assert pool.get_num_free_blocks() == self.num_blocks, "blocks have leaked"
        cached = sum(block.block_hash is not None for block in pool.blocks)
        return cached * self.page_size


class XxhashManager(Sha256Manager):
    """The same with its fastest hash."""

    name = "vllm-xxhash"
    hash_name = "xxhash"
    notes = ("vllm-xxhash: the same with xxhash of pickled blocks",)
