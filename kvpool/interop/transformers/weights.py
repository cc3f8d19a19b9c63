"""Which weights a model computes with, and that a pool never mixes two in one namespace.

A pool finds K and V by tokens alone, so what another model, another adapter or the same model
before a step of training left there would be taken for this one's.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from kvpool.dtypes import dtype_name
from kvpool.interop.torch import import_torch
from kvpool_ext.namespaces import as_namespace

if TYPE_CHECKING:
    from kvpool.pool import KVCachePool
    from kvpool.request import ExtraKey

NUM_SAMPLES = 8  # of each parameter
MAX_NAMESPACES = 4096  # that a pool remembers the weights of


def check_weights(model: Any, pool: KVCachePool, extra_key: ExtraKey) -> None:
    """Remember that `extra_key` of a pool is for the weights of `model`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        About to use the pool.
    pool : KVCachePool
        Nothing is remembered of what it held before a reset. Of namespaces, the last 4,096.
    extra_key : str, bytes, int or None
        Namespace.

    Raises
    ------
    ValueError
        The namespace has K and V of other weights.
    """
    if extra_key is not None:
        extra_key = as_namespace(extra_key)
    known: OrderedDict[Any, tuple[str, str]] = pool._guests.setdefault("weights", OrderedDict())
    digest, name = digest_of(model), type(model).__name__
    before, its_name = known.get(extra_key, (digest, name))
    if before != digest:
        if pool.bound_request_count or pool.stats()["pages_tree"]:
            where = "without an extra_key" if extra_key is None else f"under {extra_key!r}"
            raise ValueError(
                f"the pool has K and V of another model {where}, of a {its_name} with other "
                f"weights (or adapters, or dtype) than this {name} has now: give each its own "
                "extra_key or its own pool, or forget them by pool.reset_prefix_cache()"
            )
        known.clear()
    known[extra_key] = digest, name
    known.move_to_end(extra_key)
    if len(known) > MAX_NAMESPACES:
        known.popitem(last=False)


# Of models that are alive: what was looked at cheaply, and the digest that it had then.
_digests: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()


def digest_of(model: Any) -> str:
    """A hash of a model's config, dtype, active adapters, and of samples of each parameter.

    The samples are read again when a parameter was replaced, or changed by an operation in place;
    one on its ``.data`` is not noticed.
    """
    modules = [*model.modules()]
    parameters = [
        parameter
        for parameter in itertools.chain.from_iterable(m._parameters.values() for m in modules)
        if parameter is not None
    ]
    adapters = [
        f"{module.active_adapters} {module.disable_adapters}"
        for module in modules
        # Of a layer with adapters these are properties, of a model methods.
        if isinstance(getattr(type(module), "disable_adapters", None), property)
    ]
    state = (
        sum(0 if each.is_inference() else each._version for each in parameters),
        [each.data_ptr() for each in parameters],
        dtype_name(model.dtype),
        adapters,
    )
    found = _digests.get(model)
    if found is None or found[0] != state:
        digest = hashlib.sha256(f"{model.config.to_json_string(False)}{state[2:]}".encode())
        digest.update(_samples(parameters))
        found = _digests[model] = state, digest.hexdigest()
    return found[1]


def _samples(parameters: list[Any]) -> bytes:
    found = []
    for parameter in parameters:
        flat = parameter.detach().reshape(-1)
        if not flat.is_meta and flat.numel():
            found.append(flat[:: -(-flat.numel() // NUM_SAMPLES)].double())
    # To the host once: from a GPU each copy waits for all that was launched.
    by_device: dict[Any, list[Any]] = {}
    for each in found:
        by_device.setdefault(each.device, []).append(each)
    torch = import_torch()
    return b"".join(torch.cat(each).cpu().numpy().tobytes() for each in by_device.values())
