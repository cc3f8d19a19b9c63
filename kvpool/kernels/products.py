"""Products of small float32 matrices that keep a block of results in registers.

As in `kvpool.kernels.llvm`: each is a Python function that says what it does, together with code
for numba to put in its place.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np import arrayobj

# 16 floats are one register of AVX-512 or two of AVX2.
LANES = 16
# Rows of a block of one vector: AVX2, with 16 registers, holds 12 of results, 2 of the right
# factor and 1 of the left.
ROWS = 6
# A square block, of rows and keys or of rows and vectors, where rows are few.
FEW = 4


def block_dots(c: Any, row: Any, column: Any, a: Any, a_row: Any, b: Any, b_row: Any) -> None:
    """Set ``c[row : row + FEW, column : column + FEW]`` to dots of rows of `a` and of `b`.

    They are the rows from `a_row` and from `b_row` on. All are 2-D float32 arrays, their rows
    contiguous, those of `a` and `b` a multiple of LANES long.
    """
    with np.errstate(all="ignore"):
        dots = a[a_row : a_row + FEW] @ b[b_row : b_row + FEW].T
    c[row : row + FEW, column : column + FEW] = dots


_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_INT32 = ir.IntType(32)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)
_NOTHING = ir.Constant(_VECTOR, ir.Undefined)
_FIRST_IN_ALL_LANES = ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)


class _Matrix:
    """A 2-D array inside generated code."""

    def __init__(self, context: Any, builder: Any, array_type: Any, value: Any) -> None:
        array = arrayobj.make_array(array_type)(context, builder, value)
        self.builder, self.data = builder, array.data
        self.columns = cgutils.unpack_tuple(builder, array.shape)[1]
        row_bytes = cgutils.unpack_tuple(builder, array.strides)[0]
        self.row_stride = builder.sdiv(row_bytes, array.itemsize)

    def start_of(self, row: Any, lane: Any) -> Any:
        """Offset of an element."""
        return self.builder.add(self.builder.mul(row, self.row_stride), lane)

    def vector_at(self, offset: Any, vector: int = 0) -> Any:
        """Pointer to a vector, that many vectors behind an offset."""
        offset = self.builder.add(offset, offset.type(vector * LANES))
        return self.builder.bitcast(self.builder.gep(self.data, [offset]), _VECTOR.as_pointer())

    def load(self, offset: Any, vector: int = 0) -> Any:
        """Read the vector there."""
        return self.builder.load(self.vector_at(offset, vector), align=4)


def _add_product(builder: Any, total: Any, x: Any, y: Any) -> None:
    product = builder.fmul(x, y, flags=("contract",))
    builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)


def _product_of(num_rows: int, num_vectors: int) -> Callable[..., None]:
    """Return the product of a block of so many rows and vectors."""
    num_lanes = num_vectors * LANES
    block = [(r, v) for r in range(num_rows) for v in range(num_vectors)]

    def product(
        c: Any,
        row: Any,
        lane: Any,
        a: Any,
        a_row: Any,
        a_column: Any,
        transposed: Any,
        b: Any,
        length: Any,
        add: Any,
    ) -> None:
        left = a[a_row:, a_column:].T if transposed else a[a_row:, a_column:]
        target = c[row : row + num_rows, lane : lane + num_lanes]
        # Rows and lanes that only fill up a block may hold anything.
        with np.errstate(all="ignore"):
            found = left[:num_rows, :length] @ b[:length, lane : lane + num_lanes]
        target[:] = target + found if add else found

    @intrinsic
    def compiled(
        typing_context: Any,
        c: Any,
        row: Any,
        lane: Any,
        a: Any,
        a_row: Any,
        a_column: Any,
        transposed: Any,
        b: Any,
        length: Any,
        add: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            c_value, row, lane, a_value, a_row, a_column, transposed, b_value, length, add = (
                arguments
            )
            target = _Matrix(context, builder, c, c_value)
            left = _Matrix(context, builder, a, a_value)
            right = _Matrix(context, builder, b, b_value)
            one = row.type(1)
            row_stride = builder.select(transposed, one, left.row_stride)
            term_stride = builder.select(transposed, left.row_stride, one)

            numbers = [row.type(r) for r in range(num_rows)]
            targets = [target.start_of(builder.add(row, number), lane) for number in numbers]
            first = left.start_of(a_row, a_column)
            starts = [builder.add(first, builder.mul(number, row_stride)) for number in numbers]
            # Stack slots here become registers when LLVM promotes them.
            totals = {place: cgutils.alloca_once(builder, _VECTOR) for place in block}
            for total in totals.values():
                builder.store(_ZERO, total)
            with builder.if_then(add):
                for (r, v), total in totals.items():
                    builder.store(target.load(targets[r], v), total)
            with cgutils.for_range(builder, length) as loop:
                start = right.start_of(loop.index, lane)
                vectors = [right.load(start, v) for v in range(num_vectors)]
                term = builder.mul(loop.index, term_stride)
                for r in range(num_rows):
                    scalar = builder.load(builder.gep(left.data, [builder.add(starts[r], term)]))
                    single = builder.insert_element(_NOTHING, scalar, _INT32(0))
                    spread = builder.shuffle_vector(single, _NOTHING, _FIRST_IN_ALL_LANES)
                    for v in range(num_vectors):
                        _add_product(builder, totals[r, v], spread, vectors[v])
            for (r, v), total in totals.items():
                builder.store(builder.load(total), target.vector_at(targets[r], v), align=4)
            return context.get_dummy_value()

        index, flag = types.intp, types.boolean
        return types.void(c, index, index, a, index, index, flag, b, index, flag), generate

    @overload(product, strict=False)
    def _product_when_compiling(
        c: Any,
        row: Any,
        lane: Any,
        a: Any,
        a_row: Any,
        a_column: Any,
        transposed: Any,
        b: Any,
        length: Any,
        add: Any,
    ) -> Any:
        return lambda c, row, lane, a, a_row, a_column, transposed, b, length, add: compiled(
            c, row, lane, a, a_row, a_column, transposed, b, length, add
        )

    return product


def _pairwise_sums(builder: Any, x: Any, y: Any) -> Any:
    """Sums of neighbours: half a vector of `x`, then half a vector of `y`."""

    def every_second(first: int) -> Any:
        places = ir.Constant(ir.VectorType(_INT32, LANES), list(range(first, 2 * LANES, 2)))
        return builder.shuffle_vector(x, y, places)

    return builder.fadd(every_second(0), every_second(1))


@intrinsic
def _block_dots(
    typing_context: Any, c: Any, row: Any, column: Any, a: Any, a_row: Any, b: Any, b_row: Any
) -> Any:
    index = types.intp
    block = [(r, k) for r in range(FEW) for k in range(FEW)]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        c_value, row, column, a_value, a_row, b_value, b_row = arguments
        target = _Matrix(context, builder, c, c_value)
        left = _Matrix(context, builder, a, a_value)
        right = _Matrix(context, builder, b, b_value)
        totals = {place: cgutils.alloca_once(builder, _VECTOR) for place in block}
        for total in totals.values():
            builder.store(_ZERO, total)
        step, zero = row.type(LANES), row.type(0)
        lefts = [left.start_of(builder.add(a_row, row.type(r)), zero) for r in range(FEW)]
        rights = [right.start_of(builder.add(b_row, row.type(k)), zero) for k in range(FEW)]
        with cgutils.for_range_slice(builder, zero, left.columns, step, row.type) as (d, _):
            keys = [right.load(builder.add(start, d)) for start in rights]
            for r in range(FEW):
                query = left.load(builder.add(lefts[r], d))
                for k in range(FEW):
                    _add_product(builder, totals[r, k], query, keys[k])
        # Each round halves the vectors, and the last one holds one sum of each, in their order.
        sums = [builder.load(totals[place]) for place in block]
        while len(sums) > 1:
            sums = [_pairwise_sums(builder, *sums[i : i + 2]) for i in range(0, len(sums), 2)]
        quarter = ir.VectorType(ir.FloatType(), FEW)
        for r in range(FEW):
            places = ir.Constant(ir.VectorType(_INT32, FEW), list(range(r * FEW, (r + 1) * FEW)))
            part = builder.shuffle_vector(sums[0], _NOTHING, places)
            offset = target.start_of(builder.add(row, row.type(r)), column)
            place = builder.bitcast(builder.gep(target.data, [offset]), quarter.as_pointer())
            builder.store(part, place, align=4)
        return context.get_dummy_value()

    return types.void(c, index, index, a, index, b, index), generate


@overload(block_dots, strict=False)
def _block_dots_when_compiling(
    c: Any, row: Any, column: Any, a: Any, a_row: Any, b: Any, b_row: Any
) -> Any:
    return lambda c, row, column, a, a_row, b, b_row: _block_dots(
        c, row, column, a, a_row, b, b_row
    )


# ``c[row : row + R, lane : lane + V * LANES]`` is set to that block of ``a[a_row:, a_column:] @
# b``, or the block is added; with `transposed` the left factor is turned after the cut. All are
# 2-D float32 arrays, their rows contiguous, and only `length` terms are summed.
block_product = _product_of(ROWS, 1)
few_rows_product = _product_of(FEW, FEW)
few_rows_thin_product = _product_of(FEW, 1)
