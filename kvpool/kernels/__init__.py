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
  too. `scatter_fp8` and `gather_fp8` take uint8 only, and both caches have one `fp8_format`:
  ``"float8_e4m3fn"`` or ``"float8_e5m2"``.
- On a CUDA device the last dimension of rows is contiguous, and strides are otherwise free.
- On the CPU, a `kvpool.kernels.floats.bits_view` may stand for any float16 or bfloat16 array: a
  caller that takes it once saves that on every call.
- ``slot < 0`` means: no such token. Nothing is written for it, and it reads as zeros.
- A slot at or past the end of a cache (or past `num_slots`, where that is given) is treated the
  same way.
- Slots that are written must not occur twice in one call: which row would win is not defined.
  Reading a slot twice is fine.
- Equal dtypes copy bits, NaN payloads included. Different ones convert element by element through
  float32, to nearest, ties to even; a NaN stays a NaN.
- A call that raises has moved nothing: what is done around it may be undone then.
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

``scatter_fp8(k_cache, v_cache, k_rows, v_rows, slots, fp8_format, k_scale, v_scale,
num_slots=None)``
    As `scatter`, and quantises: the float32 of each element is divided by `k_scale` or `v_scale`
    in float32, and becomes the code that `kvpool.kernels.fp8` defines. Scales are finite, positive
    floats. Rows are read as `scatter` reads them, float64 through float32.

``gather_fp8(k_cache, v_cache, slots, fp8_format, k_scale, v_scale, k_out, v_out)``
    As `gather`, and dequantises: the exact float32 of each code is multiplied by its scale in
    float32, and rounded to the dtype of the output, to nearest, ties to even.

``zero(k_cache, v_cache, slots)``
    Zeroes these slots on every layer of both caches ``[layers, total_slots, heads, dim]``.

``copy_slots(k_cache, v_cache, source_slots, target_slots)``
    Copies slot ``source_slots[i]`` over ``target_slots[i]`` on every layer of both caches
    ``[layers, total_slots, heads, dim]``. A pair with a slot outside of the caches is skipped. No
    target is also a source.

A module whose calls have much to work out offers two things more; `kvpool.storage` looks for them:

``Move(verb, k_cache, v_cache, fp8_format, k_scale, v_scale, num_slots)``
    A scatter (or gather) bound to one pair of cache layers. ``prepare(slots, k_rows, v_rows)``
    does all that can fail, and returns what ``run(launches)`` then starts. Rows may be
    ``[batch, seqlen, heads, dim]`` too.

``warm_up(k_cache, v_cache, fp8_format)``
    Compiles every kernel that these caches can need.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

_MODULE_BY_KIND = {"cpu": "kvpool.kernels.cpu", "cuda": "kvpool.kernels.cuda"}
_ATTENTION_BY_KIND = {
    "cpu": "kvpool.kernels.attention",
    "cuda": "kvpool.kernels.dense_attention",
}


def for_device(kind: str) -> ModuleType:
    """Return the module of kernels for a kind of device.

    Parameters
    ----------
    kind : str
        The kind without an ordinal: ``"cpu"`` or ``"cuda"``.

    Raises
    ------
    ValueError
        If there are no kernels for `kind`.
    """
    return _module_of(_MODULE_BY_KIND, kind)


def attention_for_device(kind: str) -> Callable[..., Any]:
    """Return the function that attends over a paged cache layer on a kind of device.

    `kvpool.kernels.attention.paged_attention` says what it takes.
    """
    attend: Callable[..., Any] = _module_of(_ATTENTION_BY_KIND, kind).paged_attention
    return attend


def _module_of(names: dict[str, str], kind: str) -> ModuleType:
    name = names.get(kind)
    if name is None:
        known = ", ".join(repr(known_kind) for known_kind in names)
        raise ValueError(f"no kernels for device kind {kind!r}: expected one of {known}")
    return import_module(name)
