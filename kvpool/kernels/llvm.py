"""The few things that LLVM does not find out from a loop, and is told by hand.

Each is a Python function that says what it does, and is what runs where compilation is off,
together with code for numba to put in its place.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np import arrayobj

CACHE_LINE = 64
# A block of results in registers: 16 floats are one register of AVX-512 or two of AVX2, whose 16
# registers hold 12 of results, 2 of the right factor and 1 of the left.
ROWS = 6
LANES = 16


def flat_row(array: Any, index: Any) -> Any:
    """Return ``array[index]``, a contiguous block ``[heads, dim]``, as a 1-D view."""
    return array[index].reshape(-1)


@intrinsic
def _flat_row(typing_context: Any, array: Any, index: Any) -> Any:
    # Indexing an array of unknown strides keeps the stride of the last axis unknown, and the loop
    # scalar. The view borrows: without an owner it costs no reference counting, and its array
    # outlives the kernel.
    row_type = types.Array(array.dtype, 1, "C", readonly=not array.mutable)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source = arrayobj.make_array(array)(context, builder, arguments[0])
        row_stride, *_ = cgutils.unpack_tuple(builder, source.strides)
        _, heads, dim = cgutils.unpack_tuple(builder, source.shape)
        data = cgutils.pointer_add(builder, source.data, builder.mul(arguments[1], row_stride))
        row = arrayobj.make_array(row_type)(context, builder)
        arrayobj.populate_array(
            row,
            data=data,
            shape=[builder.mul(heads, dim)],
            strides=[source.itemsize],
            itemsize=source.itemsize,
            meminfo=None,
        )
        return row._getvalue()

    return row_type(array, types.intp), generate


@overload(flat_row, strict=False)
def _flat_row_when_compiling(array: Any, index: Any) -> Any:
    return lambda array, index: _flat_row(array, index)


def prefetch(array: Any, slot: Any, first_head: Any, num_heads: Any) -> None:
    """Ask the processor to load these heads of a contiguous ``array[slot]``.

    Only a hint: any slot is allowed and harmless.
    """


@intrinsic
def _prefetch(typing_context: Any, array: Any, slot: Any, first_head: Any, num_heads: Any) -> Any:
    byte_pointer, int32, int64 = cgutils.voidptr_t, ir.IntType(32), ir.IntType(64)
    prefetch_type = ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32])
    # For reading, into the second level, as data. The write hint does not exist on every x86.
    hints = [int32(0), int32(2), int32(1)]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source = arrayobj.make_array(array)(context, builder, arguments[0])
        slot_stride, _, _ = cgutils.unpack_tuple(builder, source.strides)
        dim = cgutils.unpack_tuple(builder, source.shape)[2]
        head_bytes = builder.mul(dim, source.itemsize)
        start = builder.add(
            builder.mul(arguments[1], slot_stride), builder.mul(arguments[2], head_bytes)
        )
        end = builder.add(start, builder.mul(arguments[3], head_bytes))
        declaration = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte_pointer], prefetch_type
        )
        step = int64(CACHE_LINE)
        with cgutils.for_range_slice(builder, start, end, step, int64) as (offset, _):
            line = cgutils.pointer_add(builder, source.data, offset, byte_pointer)
            builder.call(declaration, [line, *hints])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, types.intp), generate


@overload(prefetch, strict=False)
def _prefetch_when_compiling(array: Any, slot: Any, first_head: Any, num_heads: Any) -> Any:
    return lambda array, slot, first_head, num_heads: _prefetch(array, slot, first_head, num_heads)


def block_product(
    c: Any, row: Any, lane: Any, a: Any, transposed: Any, b: Any, length: Any, add: Any
) -> None:
    """Set ``c[row : row + ROWS, lane : lane + LANES]`` to that block of ``a @ b``, or add it.

    All are contiguous 2-D float32 arrays. Only `length` terms are summed; with `transposed`, the
    left factor is ``a.T``.
    """
    left = a.T if transposed else a
    block = c[row : row + ROWS, lane : lane + LANES]
    # Rows and lanes that only fill up a block may hold anything.
    with np.errstate(all="ignore"):
        product = left[row : row + ROWS, :length] @ b[:length, lane : lane + LANES]
    block[:] = block + product if add else product


@intrinsic
def _block_product(
    typing_context: Any,
    c: Any,
    row: Any,
    lane: Any,
    a: Any,
    transposed: Any,
    b: Any,
    length: Any,
    add: Any,
) -> Any:
    index, flag = types.intp, types.boolean
    vector_type = ir.VectorType(ir.FloatType(), LANES)
    int32 = ir.IntType(32)
    zero = ir.Constant(vector_type, [0.0] * LANES)
    nothing = ir.Constant(vector_type, ir.Undefined)
    first_in_all_lanes = ir.Constant(ir.VectorType(int32, LANES), [0] * LANES)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        c_value, row, lane, a_value, transposed, b_value, length, add = arguments

        def data_and_width(array_type: Any, value: Any) -> tuple[Any, Any]:
            array = arrayobj.make_array(array_type)(context, builder, value)
            return array.data, cgutils.unpack_tuple(builder, array.shape)[1]

        def vector_at(data: Any, offset: Any) -> Any:
            return builder.bitcast(builder.gep(data, [offset]), vector_type.as_pointer())

        c_data, c_width = data_and_width(c, c_value)
        a_data, a_width = data_and_width(a, a_value)
        b_data, b_width = data_and_width(b, b_value)
        one = row.type(1)
        a_row_stride = builder.select(transposed, one, a_width)
        a_term_stride = builder.select(transposed, a_width, one)

        targets, starts, totals = [], [], []
        for r in range(ROWS):
            this_row = builder.add(row, row.type(r))
            targets.append(vector_at(c_data, builder.add(builder.mul(this_row, c_width), lane)))
            starts.append(builder.mul(this_row, a_row_stride))
            # Stack slots here become registers when LLVM promotes them.
            totals.append(cgutils.alloca_once(builder, vector_type))
            builder.store(zero, totals[r])
            with builder.if_then(add):
                builder.store(builder.load(targets[r], align=4), totals[r])
        with cgutils.for_range(builder, length) as loop:
            b_start = builder.add(builder.mul(loop.index, b_width), lane)
            b_vector = builder.load(vector_at(b_data, b_start), align=4)
            term = builder.mul(loop.index, a_term_stride)
            for r in range(ROWS):
                scalar = builder.load(builder.gep(a_data, [builder.add(starts[r], term)]))
                single = builder.insert_element(nothing, scalar, int32(0))
                spread = builder.shuffle_vector(single, nothing, first_in_all_lanes)
                product = builder.fmul(spread, b_vector, flags=("contract",))
                total = builder.fadd(builder.load(totals[r]), product, flags=("contract",))
                builder.store(total, totals[r])
        for r in range(ROWS):
            builder.store(builder.load(totals[r]), targets[r], align=4)
        return context.get_dummy_value()

    return types.void(c, index, index, a, flag, b, index, flag), generate


@overload(block_product, strict=False)
def _block_product_when_compiling(
    c: Any, row: Any, lane: Any, a: Any, transposed: Any, b: Any, length: Any, add: Any
) -> Any:
    return lambda c, row, lane, a, transposed, b, length, add: _block_product(
        c, row, lane, a, transposed, b, length, add
    )
