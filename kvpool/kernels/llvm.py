"""The few things that LLVM does not find out from a loop, and is told by hand.

Each is a Python function that says what it does, and is what runs where compilation is off,
together with code for numba to put in its place.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np import arrayobj

CACHE_LINE = 64


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


def head_rows(array: Any, slot: Any, head: Any) -> Any:
    """Return one head of a float32 ``array[slot:]``, C-contiguous, as a 2-D view of strided rows.

    An array of another dtype may be named, but the view must not be used then.
    """
    return array[slot:, head]


@intrinsic
def _head_rows(typing_context: Any, array: Any, slot: Any, head: Any) -> Any:
    # Borrowed, as in `flat_row`; threads that count references to one array would also hand its
    # counter from core to core.
    rows_type = types.Array(types.float32, 2, "A", readonly=not array.mutable)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source = arrayobj.make_array(array)(context, builder, arguments[0])
        slots, _, dim = cgutils.unpack_tuple(builder, source.shape)
        slot_stride, head_stride, _ = cgutils.unpack_tuple(builder, source.strides)
        start = builder.add(
            builder.mul(arguments[1], slot_stride), builder.mul(arguments[2], head_stride)
        )
        rows = arrayobj.make_array(rows_type)(context, builder)
        data_type = context.get_data_type(types.float32).as_pointer()
        arrayobj.populate_array(
            rows,
            data=builder.bitcast(cgutils.pointer_add(builder, source.data, start), data_type),
            shape=[builder.sub(slots, arguments[1]), dim],
            strides=[slot_stride, source.itemsize],
            itemsize=source.itemsize,
            meminfo=None,
        )
        return rows._getvalue()

    return rows_type(array, types.intp, types.intp), generate


@overload(head_rows, strict=False)
def _head_rows_when_compiling(array: Any, slot: Any, head: Any) -> Any:
    return lambda array, slot, head: _head_rows(array, slot, head)
