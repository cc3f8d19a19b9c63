"""Zeros that go past the caches.

A plain store loads the line that it writes to, and keeps it; a *streaming* one does neither.
Zeroing the pages of a prompt on every layer is more than caches hold, and most of it is not
touched again before its layer's turn: streaming takes half the time. Rows of K and V are not
streamed: attention reads them next.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np import arrayobj

from kvpool.kernels.jit import kernel

# What every allocator aligns to, and the width of a streaming store of SSE2. Such stores to one
# line are combined, so that wider ones would win little.
ALIGNMENT = 16
LINE = 64


@kernel()
def can_stream(array: Any) -> Any:
    """Return whether each ``array[i]``, a contiguous block, is aligned and whole lines."""
    _, heads, dim = array.shape
    where = array.ctypes.data | array.strides[0]
    return where % ALIGNMENT == 0 and heads * dim * array.itemsize % LINE == 0


def stream_zeros(target: Any) -> None:
    """Zero `target`, contiguous and 1-D."""
    target[:] = 0


def finish_streams() -> None:
    """Order what was streamed before all that follows, as plain stores are."""


_VECTOR = ir.VectorType(ir.IntType(8), ALIGNMENT)
_INT64 = ir.IntType(64)


@intrinsic
def _stream_zeros(typing_context: Any, target: Any) -> Any:
    zeros = ir.Constant(_VECTOR, [0] * ALIGNMENT)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = arrayobj.make_array(target)(context, builder, arguments[0])
        (size,) = cgutils.unpack_tuple(builder, array.shape)
        end = builder.mul(size, array.itemsize)
        hint = builder.module.add_metadata([ir.IntType(32)(1)])
        with cgutils.for_range_slice(builder, _INT64(0), end, _INT64(LINE), _INT64) as (line, _):
            for place in range(0, LINE, ALIGNMENT):
                offset = builder.add(line, _INT64(place))
                pointer = cgutils.pointer_add(builder, array.data, offset, _VECTOR.as_pointer())
                builder.store(zeros, pointer, align=ALIGNMENT).set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(target), generate


@intrinsic
def _finish_streams(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@overload(stream_zeros, strict=False)
def _stream_zeros_when_compiling(target: Any) -> Any:
    return lambda target: _stream_zeros(target)


@overload(finish_streams, strict=False)
def _finish_streams_when_compiling() -> Any:
    return lambda: _finish_streams()
