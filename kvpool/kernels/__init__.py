"""Kernels that move rows of K and V between caches and model arrays: the contract.

`for_device` returns a module of kernels. Each module has the functions below with the same
meaning, and the same bits in the result, so that the CPU is the reference for every other device.

Common to all of them:

- A *slot* is the place of one token. Slots are int64 or int32, shape ``[n]``, on the kernels'
  device.
- A *cache layer* is ``[total_slots, heads, dim]`` and C-contiguous, *caches* are ``[layers,
  total_slots, heads, dim]``. K and V go through one call; they may differ in heads, dim and dtype,
  but not in layers and slots.
- The storage dtype is float32, float16 or bfloat16 (ml_dtypes); `zero` and `copy_slots` take uint8
  too.
- On the CPU, a `kvpool.kernels.floats.bits_view` may stand for any float16 or bfloat16 array: a
  caller that takes it once saves that on every call.
- ``slot < 0`` means: no such token. Nothing is written for it, and it reads as zeros.
- A slot at or past the end of a cache (or past `num_slots`, where that is given) is treated the
  same way.
- Slots that are written must not occur twice in one call: which row would win is not defined.
  Reading a slot twice is fine.
- Equal dtypes copy bits, NaN payloads included. Different ones convert element by element through
  float32, to nearest, ties to even; a NaN stays a NaN.
- Nothing is allocated but what the compiler needs on a first call, nothing synchronises, and ``n
  == 0`` returns at once. Shapes and dtypes are the caller's to check; kernels assert only what is
  cheap.

``scatter(k_cache, v_cache, k_rows, v_rows, slots, num_slots=None)``
    Writes row i of ``k_rows`` and ``v_rows`` to slot ``slots[i]`` of the cache layers. Rows are
    ``[n, heads, dim]`` in float32, float16, bfloat16 or float64, with any strides: a slice of a
    fused projection is read in place. Slots at or past `num_slots` (default: `total_slots`) are
    never written.

``gather(k_cache, v_cache, slots, k_out, v_out)``
    Fills row i of ``k_out`` and ``v_out`` ``[n, heads, dim]``, float32, float16 or bfloat16 with
    any strides, from slot ``slots[i]`` of the cache layers.

``zero(k_cache, v_cache, slots)``
    Zeroes these slots on every layer of both caches ``[layers, total_slots, heads, dim]``.

``copy_slots(k_cache, v_cache, source_slots, target_slots)``
    Copies slot ``source_slots[i]`` over ``target_slots[i]`` on every layer of both caches
    ``[layers, total_slots, heads, dim]``. A pair with a slot outside of the caches is skipped. No
    target is also a source.
"""

from importlib import import_module
from types import ModuleType

_MODULE_BY_KIND = {"cpu": "kvpool.kernels.cpu"}


def for_device(kind: str) -> ModuleType:
    """Return the module of kernels for a kind of device.

    Parameters
    ----------
    kind : str
        The kind without an ordinal: ``"cpu"``.

    Raises
    ------
    ValueError
        If there are no kernels for `kind`.
    """
    name = _MODULE_BY_KIND.get(kind)
    if name is None:
        known = ", ".join(repr(known_kind) for known_kind in _MODULE_BY_KIND)
        raise ValueError(f"no kernels for device kind {kind!r}: expected one of {known}")
    return import_module(name)
