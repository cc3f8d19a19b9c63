"""Words of one dtype to words of another, inside CUDA kernels.

`conversion` goes from and to float32, float16, bfloat16 (float64 is a source only), through
float32, to nearest, ties to even. `quantisation` and `dequantisation` go to FP8 and back, by the
rule of `kvpool.kernels.fp8`. All of them work on a unit of a few elements at once: the code of a
unit is written out in a line, so that the compiler may interleave it.

bfloat16 has no type here: its bits are the upper half of a float32's, so reading one is a shift or
a mask. Writing one is a conversion of the hardware, from sm_80 on. FP8 is converted by the
hardware from sm_89 on, and before that by the integer functions of `kvpool.kernels.fp8`.

Twins for the simulator say the same in NumPy.
"""

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import typing
from numba.cuda.extending import intrinsic

from kvpool.kernels import cuda_twins, fp8
from kvpool.kernels.cuda_access import SIMULATED, pack_tuple, unpack_tuple, words_type
from kvpool.kernels.cuda_units import ITEMSIZES

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
# PTX names of the two FP8 formats.
_PTX_FORMAT = {fp8.E4M3FN.name: "e4m3", fp8.E5M2.name: "e5m2"}


# ---- pieces of code: LLVM values in, LLVM values out


def _ptx(builder: Any, result: Any, text: str, constraints: str, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(ir.InlineAsm(kind, text, constraints), arguments)


def _floats_of(builder: Any, dtype: str, words: list[Any], unit: int) -> list[Any]:
    """Return `unit` float32 values from the words of a dtype."""
    if dtype == "float32":
        return [builder.bitcast(word, _F32) for word in words]
    if dtype == "float64":
        pairs = zip(words[::2], words[1::2], strict=True)
        wide = [
            builder.or_(builder.zext(low, _I64), builder.shl(builder.zext(high, _I64), _I64(32)))
            for low, high in pairs
        ]
        return [builder.fptrunc(builder.bitcast(bits, ir.DoubleType()), _F32) for bits in wide]
    floats = []
    for k in range(unit):
        word, is_high = words[k // 2], k % 2
        if dtype == "bfloat16":
            bits = builder.and_(word, _I32(0xFFFF0000)) if is_high else builder.shl(word, _I32(16))
            floats.append(builder.bitcast(bits, _F32))
        else:
            half = builder.trunc(builder.lshr(word, _I32(16)) if is_high else word, _I16)
            floats.append(_ptx(builder, _F32, "cvt.f32.f16 $0, $1;", "=f,h", half))
    return floats


def _words_of(builder: Any, dtype: str, floats: list[Any]) -> list[Any]:
    """Return the words of a dtype for float32 values."""
    if dtype == "float32":
        return [builder.bitcast(value, _I32) for value in floats]
    # Two at a time, the upper half first. An odd one out is packed with itself.
    name = "bf16x2" if dtype == "bfloat16" else "f16x2"
    text = f"cvt.rn.{name}.f32 $0, $1, $2;"
    return [
        _ptx(builder, _I32, text, "=r,f,f", pair[-1], pair[0])
        for pair in (floats[k : k + 2] for k in range(0, len(floats), 2))
    ]


def divide(builder: Any, value: Any, power: Any, divisor: Any, inverse: Any) -> Any:
    """Return ``value * power / divisor`` for `encode`: its code is that of the real quotient.

    `divisor` is a float32 in [1, 2), `power` the power of two that goes with it, `inverse` is
    ``1 / divisor`` to nearest. ``div.rn.f32`` calls a routine for its rare cases, and takes 24
    instructions per value; this takes six. One step of correction is not always division, but its
    codes are: `tests/test_quotient.py` has every divisor at every boundary between two codes.

    The first quotient is kept where the rest is zero, as the sum of zeros would lose the sign of
    -0.0, and where it is NaN, which is what infinity leaves.
    """
    scaled = builder.fmul(value, power)
    quotient = builder.fmul(scaled, inverse)
    # NVVM reads an LLVM from before the negation instruction.
    negated = builder.fsub(ir.Constant(_F32, -0.0), quotient)
    rest = builder.fma(negated, divisor, scaled)
    corrected = builder.fma(rest, inverse, quotient)
    return builder.select(
        builder.fcmp_ordered("!=", rest, ir.Constant(_F32, 0.0)), corrected, quotient
    )


def _codes_of(context: Any, builder: Any, form: str, floats: list[Any], hardware: bool) -> Any:
    """Return the words of FP8 codes of float32 values, four to a word."""
    words = []
    for first in range(0, len(floats), 4):
        four = floats[first : first + 4]
        if hardware:
            text = f"cvt.rn.satfinite.{_PTX_FORMAT[form]}x2.f32 $0, $1, $2;"
            parts = [
                _ptx(builder, _I16, text, "=h,f,f", pair[-1], pair[0])
                for pair in (four[k : k + 2] for k in range(0, len(four), 2))
            ]
        else:
            signature = typing.signature(types.uint8, types.float32)
            parts = [
                context.compile_internal(builder, fp8.ENCODE[form], signature, [value])
                for value in four
            ]
        word = builder.zext(parts[0], _I32)
        for k, part in enumerate(parts[1:], 1):
            shifted = builder.shl(builder.zext(part, _I32), _I32(k * part.type.width))
            word = builder.or_(word, shifted)
        words.append(word)
    return words


def _values_of(
    context: Any, builder: Any, form: str, words: list[Any], unit: int, hardware: bool
) -> list[Any]:
    """Return `unit` float32 values of the FP8 codes in `words`."""
    if not hardware:
        signature = typing.signature(types.float32, types.uint32)
        codes = [
            builder.and_(builder.lshr(words[k // 4], _I32(k % 4 * 8)), _I32(0xFF))
            for k in range(unit)
        ]
        return [
            context.compile_internal(builder, fp8.DECODE[form], signature, [code])
            for code in codes
        ]
    # float16 holds every value of both formats.
    halves = []
    for k in range(0, unit, 2):
        pair = builder.trunc(builder.lshr(words[k // 4], _I32(k % 4 * 8)), _I16)
        text = f"cvt.rn.f16x2.{_PTX_FORMAT[form]}x2 $0, $1;"
        halves.append(_ptx(builder, _I32, text, "=r,h", pair))
    return _floats_of(builder, "float16", halves, unit)


# ---- what kernels call


def _device_conversion(source: str, target: str, unit: int) -> Any:
    source_type = words_type(unit * ITEMSIZES[source])
    target_type = words_type(unit * ITEMSIZES[target])

    @intrinsic
    def convert(typing_context: Any, words: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            unpacked = unpack_tuple(builder, arguments[0], source_type.count)
            floats = _floats_of(builder, source, unpacked, unit)
            return pack_tuple(context, builder, target_type, _words_of(builder, target, floats))

        return target_type(source_type), generate

    return convert


def _device_quantisation(source: str, form: str, unit: int, hardware: bool) -> Any:
    source_type, target_type = words_type(unit * ITEMSIZES[source]), words_type(unit)
    word = types.uint64

    @intrinsic
    def quantise(typing_context: Any, words: Any, divisor: Any, power: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            both, power_bits = arguments[1], arguments[2]
            divisor = builder.bitcast(builder.trunc(both, _I32), _F32)
            high = builder.trunc(builder.lshr(both, _I64(32)), _I32)
            inverse = builder.bitcast(high, _F32)
            power = builder.bitcast(builder.trunc(power_bits, _I32), _F32)
            unpacked = unpack_tuple(builder, arguments[0], source_type.count)
            quotients = [
                divide(builder, value, power, divisor, inverse)
                for value in _floats_of(builder, source, unpacked, unit)
            ]
            codes = _codes_of(context, builder, form, quotients, hardware)
            return pack_tuple(context, builder, target_type, codes)

        return target_type(source_type, word, word), generate

    return quantise


def _device_dequantisation(form: str, target: str, unit: int, hardware: bool) -> Any:
    source_type, target_type = words_type(unit), words_type(unit * ITEMSIZES[target])

    @intrinsic
    def dequantise(typing_context: Any, words: Any, scale: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            factor = builder.bitcast(builder.trunc(arguments[1], _I32), _F32)
            unpacked = unpack_tuple(builder, arguments[0], source_type.count)
            values = _values_of(context, builder, form, unpacked, unit, hardware)
            floats = [builder.fmul(value, factor) for value in values]
            return pack_tuple(context, builder, target_type, _words_of(builder, target, floats))

        return target_type(source_type, types.uint64), generate

    return dequantise


@cache
def conversion(source: str, target: str, unit: int) -> Any:
    """Return ``convert(words) -> words`` for `unit` elements of two different dtypes."""
    if SIMULATED:
        return cuda_twins.simulated_conversion(source, target, unit)
    return _device_conversion(source, target, unit)


@cache
def quantisation(source: str, form: str, unit: int, hardware: bool) -> Any:
    """Return ``quantise(words, divisor, power) -> words``: `unit` elements to FP8 codes.

    The last two are what `kvpool.kernels.cuda_scales.divisor_words` makes of a scale.
    """
    if SIMULATED:
        return cuda_twins.simulated_quantisation(source, form, unit)
    return _device_quantisation(source, form, unit, hardware)


@cache
def dequantisation(form: str, target: str, unit: int, hardware: bool) -> Any:
    """Return ``dequantise(words, scale) -> words``: FP8 codes to `unit` elements of `target`.

    The scale is the bits of a float32.
    """
    if SIMULATED:
        return cuda_twins.simulated_dequantisation(form, target, unit)
    return _device_dequantisation(form, target, unit, hardware)
