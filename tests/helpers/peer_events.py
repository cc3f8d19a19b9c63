"""The event modules of vLLM and SGLang as they are installed, without what else they import."""

import importlib.util
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest


class _Anything:
    def __init__(self, *args, **options):
        self.__dict__.update(options)


def _load(package, path, stubs):
    """One file of an installed package, beside modules that hold just the given names."""
    spec = find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    file = Path(spec.submodule_search_locations[0]) / path
    before = dict(sys.modules)
    try:
        for name, contents in stubs.items():
            parts = name.split(".")
            for i in range(1, len(parts) + 1):
                sys.modules[".".join(parts[:i])] = types.ModuleType(".".join(parts[:i]))
            vars(sys.modules[name]).update(contents)
        name = f"peer_events_of_{package}"
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] in {stub.partition(".")[0] for stub in stubs}:
                del sys.modules[name]
        sys.modules.update(before)


def _logger(name):
    import logging

    return logging.getLogger(name)


def vllm_events():
    """`vllm.distributed.kv_events`: its messages and its publisher."""
    nothing = dict.fromkeys(
        ("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path"), _Anything
    )
    return _load(
        "vllm",
        "distributed/kv_events.py",
        {
            "vllm.config.kv_events": {"KVEventsConfig": _Anything},
            "vllm.logger": {"init_logger": _logger},
            "vllm.utils.network_utils": nothing,
            "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
        },
    )


def sglang_events():
    """`sglang.srt.disaggregation.kv_events`: its messages."""
    return _load(
        "sglang",
        "srt/disaggregation/kv_events.py",
        {
            "pydantic": {"BaseModel": _Anything},
            "sglang.srt.runtime_context": {"get_parallel": _Anything},
            "sglang.srt.utils.network": {"NetworkAddress": _Anything},
        },
    )
