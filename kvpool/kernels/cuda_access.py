"""Memory access of CUDA kernels: 1 to 16 bytes at a plain device address.

numba promises no more than the alignment of an element, so none of its own accesses becomes a
vector one: two neighbouring uint64 stay two 8-byte loads, a record of four uint32 becomes sixteen
1-byte loads. The functions here say width and alignment themselves, and give ``LDG.E.128`` and
``STG.E.128``. An address that is no multiple of the width is a fault on the device.

What is moved is a tuple of uint32 *words*: four for 16 bytes, two for 8, one for less, where it is
zero-extended. Each function has a twin for the simulator, which reads and writes the host's memory
at the same plain address.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

SIMULATED = bool(numba.config.ENABLE_CUDASIM)

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_PTX_TYPE = {16: "v4.b32", 8: "v2.b32", 4: "b32", 2: "u16", 1: "u8"}
_C_TYPE = {4: ctypes.c_uint32, 2: ctypes.c_uint16, 1: ctypes.c_uint8}

# Read-only for the whole kernel, read once: through the texture path, and not kept in L1.
_LOAD_ONCE = "ld.global.nc.L1::no_allocate"
# A load that must be in flight early. ptxas sinks a plain or a read-only load below the branch on
# the slot, and below the stores of another row, which puts latencies one after the other. It keeps
# a relaxed one where it is.
_LOAD_EARLY = "ld.relaxed.gpu.global.L1::no_allocate"
# Slots and tables: small, and read by many threads, so through L1; or early too.
_LOAD_INTEGER = "ld.global.nc"
_LOAD_INTEGER_EARLY = "ld.relaxed.gpu.global"


def num_words(width: int) -> int:
    """Return how many words hold `width` bytes."""
    return max(1, width // 4)


def words_type(width: int) -> Any:
    """Return the numba type of the words of `width` bytes."""
    return types.UniTuple(types.uint32, num_words(width))


def pack_tuple(context: Any, builder: Any, tuple_type: Any, values: Any) -> Any:
    """Return LLVM `values` as one value of a numba tuple type."""
    return context.make_tuple(builder, tuple_type, values)


def unpack_tuple(builder: Any, value: Any, count: int) -> list[Any]:
    """Return the `count` LLVM values in a tuple of one type."""
    return [builder.extract_value(value, k) for k in range(count)]


def _load_asm(builder: Any, width: int, operation: str, arguments: Any) -> list[Any]:
    # Volatile assembly, as LLVM moves a load of its own below the guard. A second argument is a
    # predicate: where it is zero, nothing is read and the words are zero.
    count = num_words(width)
    registers = ", ".join(f"${k}" for k in range(count))
    target = f"{{{registers}}}" if count > 1 else registers
    load = f"{operation}.{_PTX_TYPE[width]} {target}, [${count}];"
    if len(arguments) == 2:
        zeros = " ".join(f"mov.b32 ${k}, 0;" for k in range(count))
        test = f"setp.ne.u32 %guard, ${count + 1}, 0;"
        load = f"{{ .reg .pred %guard; {test} {zeros} @%guard {load} }}"
    constraints = ["=r"] * count + ["l", "r"][: len(arguments)]
    result = _I32 if count == 1 else ir.LiteralStructType([_I32] * count)
    assembly = ir.InlineAsm(
        ir.FunctionType(result, [argument.type for argument in arguments]),
        load,
        ",".join(constraints),
        side_effect=True,
    )
    loaded = builder.call(assembly, arguments)
    return [loaded] if count == 1 else unpack_tuple(builder, loaded, count)


def _device_load(width: int, operation: str) -> Any:
    @intrinsic
    def load(typing_context: Any, address: Any) -> Any:
        result = words_type(width)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            words = _load_asm(builder, width, operation, arguments)
            return pack_tuple(context, builder, result, words)

        return result(types.uint64), generate

    return load


def _device_load_if(width: int) -> Any:
    @intrinsic
    def load_if(typing_context: Any, address: Any, condition: Any) -> Any:
        result = words_type(width)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            flag = builder.zext(arguments[1], _I32)
            words = _load_asm(builder, width, _LOAD_EARLY, [arguments[0], flag])
            return pack_tuple(context, builder, result, words)

        return result(types.uint64, types.boolean), generate

    return load_if


def _device_load_integer(width: int, operation: str) -> Any:
    @intrinsic
    def load_integer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            words = _load_asm(builder, width, operation, arguments)
            if width == 4:
                return builder.sext(words[0], _I64)
            high = builder.shl(builder.zext(words[1], _I64), _I64(32))
            return builder.or_(high, builder.zext(words[0], _I64))

        return types.int64(types.uint64), generate

    return load_integer


def _device_store(width: int) -> Any:
    count = num_words(width)

    @intrinsic
    def store(typing_context: Any, address: Any, words: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            values = unpack_tuple(builder, arguments[1], count)
            if width < 4:
                value = builder.trunc(values[0], ir.IntType(8 * width))
            elif width == 4:
                value = values[0]
            else:
                value = ir.Constant(ir.VectorType(_I32, count), ir.Undefined)
                for k, word in enumerate(values):
                    value = builder.insert_element(value, word, _I32(k))
            # Address space 1 is global memory: a generic store would find that out at run time.
            pointer = builder.inttoptr(arguments[0], value.type.as_pointer(1))
            builder.store(value, pointer).align = width
            return context.get_dummy_value()

        return types.void(types.uint64, words_type(width)), generate

    return store


def _host_words(width: int, address: Any) -> Any:
    return (_C_TYPE[min(width, 4)] * num_words(width)).from_address(int(address))


def _simulated_load(width: int) -> Callable[..., Any]:
    def load(address: Any, condition: Any = True) -> Any:
        if not condition:
            return (np.uint32(0),) * num_words(width)
        assert int(address) % width == 0, f"address {address} is no multiple of {width}"
        return tuple(np.uint32(word) for word in _host_words(width, address))

    return load


def _simulated_load_integer(width: int) -> Callable[..., Any]:
    def load_integer(address: Any) -> Any:
        c_type = ctypes.c_int64 if width == 8 else ctypes.c_int32
        return np.int64(c_type.from_address(int(address)).value)

    return load_integer


def _simulated_store(width: int) -> Callable[..., Any]:
    def store(address: Any, words: Any) -> None:
        assert int(address) % width == 0, f"address {address} is no multiple of {width}"
        assert len(words) == num_words(width)
        memory = _host_words(width, address)
        for k, word in enumerate(words):
            memory[k] = int(word)

    return store


@cache
def load_early(width: int) -> Any:
    """Return ``load(address) -> words``, issued where it stands, before a later branch."""
    return _simulated_load(width) if SIMULATED else _device_load(width, _LOAD_EARLY)


@cache
def load_once(width: int) -> Any:
    """Return ``load(address) -> words`` for memory that nobody writes meanwhile."""
    return _simulated_load(width) if SIMULATED else _device_load(width, _LOAD_ONCE)


@cache
def load_if(width: int) -> Any:
    """Return ``load(address, condition) -> words``: as `load_early`, or zeros and no access."""
    return _simulated_load(width) if SIMULATED else _device_load_if(width)


@cache
def load_integer(width: int, *, early: bool = False) -> Any:
    """Return ``load(address) -> int64`` for signed integers of 8 or 4 bytes: slots and tables."""
    if SIMULATED:
        return _simulated_load_integer(width)
    return _device_load_integer(width, _LOAD_INTEGER_EARLY if early else _LOAD_INTEGER)


@cache
def store(width: int) -> Any:
    """Return ``store(address, words)``; below 4 bytes, the word's high bits are dropped."""
    return _simulated_store(width) if SIMULATED else _device_store(width)


@cache
def unchanged(width: int) -> Any:
    """Return ``convert(words) -> words`` that hands its words back: the conversion of a copy."""
    if SIMULATED:
        return lambda words: words

    @intrinsic
    def hand_back(typing_context: Any, words: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return arguments[0]

        return words_type(width)(words_type(width)), generate

    return hand_back
