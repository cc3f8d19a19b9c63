"""Token sequences from Python, checked and turned into int32.

The tree compares memory, so every prompt must become a contiguous int32 run. An int32 array is borrowed as it is;
lists and tuples get one C loop (`np.asarray` of a list costs several times as much); everything else goes through
NumPy. Nothing is truncated: a value that int32 cannot hold is an error that names it.
"""
from cpython.bool cimport PyBool_Check
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t

import operator

import numpy as np

cimport numpy as cnp

cnp.import_array()

cdef extern from "Python.h":
    bint PyLong_CheckExact(object item)
    long long PyLong_AsLongLongAndOverflow(object item, int *overflow) except? -1


cdef str _OUT_OF_RANGE = "token {} at position {} does not fit int32 ({} .. {})"


cdef int32_t _one_token(object item, Py_ssize_t position) except? -1:
    cdef int overflow = 0
    cdef long long value
    if not PyLong_CheckExact(item):
        if PyBool_Check(item) or isinstance(item, np.bool_):
            raise TypeError(f"token at position {position} is a bool, expected an integer")
        try:
            item = operator.index(item)
        except TypeError:
            raise TypeError(
                f"token at position {position} is {type(item).__name__}, expected an integer"
            ) from None
    value = PyLong_AsLongLongAndOverflow(item, &overflow)
    if overflow != 0 or value < INT32_MIN or value > INT32_MAX:
        raise ValueError(_OUT_OF_RANGE.format(item, position, INT32_MIN, INT32_MAX))
    return <int32_t>value


cdef cnp.ndarray _from_list(list items):
    cdef Py_ssize_t n = PyList_GET_SIZE(items), i
    cdef cnp.npy_intp shape = n
    cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &shape, cnp.NPY_INT32, 0)
    cdef int32_t *data = <int32_t *>cnp.PyArray_DATA(out)
    for i in range(n):
        # `__index__` of a foreign item may run code that shortens the list.
        if i >= PyList_GET_SIZE(items):
            raise ValueError("the token list changed while it was read")
        data[i] = _one_token(<object>PyList_GET_ITEM(items, i), i)
    return out


cdef cnp.ndarray _from_tuple(tuple items):
    cdef Py_ssize_t n = PyTuple_GET_SIZE(items), i
    cdef cnp.npy_intp shape = n
    cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &shape, cnp.NPY_INT32, 0)
    cdef int32_t *data = <int32_t *>cnp.PyArray_DATA(out)
    for i in range(n):
        data[i] = _one_token(<object>PyTuple_GET_ITEM(items, i), i)
    return out


cdef cnp.ndarray _from_range(object items):
    try:
        count = len(items)
    except OverflowError:
        raise ValueError(f"{items} has more tokens than an array can hold") from None
    if count > 0:
        for position, value in ((0, items[0]), (len(items) - 1, items[len(items) - 1])):
            if not INT32_MIN <= value <= INT32_MAX:
                raise ValueError(_OUT_OF_RANGE.format(value, position, INT32_MIN, INT32_MAX))
    return np.arange(items.start, items.stop, items.step, dtype=np.int64).astype(np.int32)


cdef cnp.ndarray _from_array(object items):
    if hasattr(items, "__dlpack__") and not hasattr(items, "__array__"):
        items = np.from_dlpack(items)
    array = np.asarray(items)
    if array.size == 0 and array.ndim == 1 and array.dtype.kind in "iuf":
        return np.zeros(0, np.int32)
    if array.dtype == object:
        raise TypeError(f"tokens must be a sequence of integers, got {type(items).__name__}")
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"tokens must be integers, got {type(items).__name__} with dtype {array.dtype}"
        )
    if array.ndim != 1:
        raise ValueError(f"tokens must be one-dimensional, got shape {array.shape}")
    if array.size and array.dtype != np.int32 and not np.can_cast(array.dtype, np.int32):
        for position in (int(array.argmin()), int(array.argmax())):
            value = int(array[position])
            if not INT32_MIN <= value <= INT32_MAX:
                raise ValueError(_OUT_OF_RANGE.format(value, position, INT32_MIN, INT32_MAX))
    # Not `ascontiguousarray`, which lets an array at an odd address pass.
    return np.require(array, np.int32, "CA")


cdef cnp.ndarray borrow_tokens(object tokens):
    if cnp.PyArray_Check(tokens):
        if (
            cnp.PyArray_TYPE(<cnp.ndarray>tokens) == cnp.NPY_INT32
            and cnp.PyArray_NDIM(<cnp.ndarray>tokens) == 1
            and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>tokens)
        ):
            return <cnp.ndarray>tokens
        return _from_array(tokens)
    if isinstance(tokens, list):
        return _from_list(<list>tokens)
    if isinstance(tokens, tuple):
        return _from_tuple(<tuple>tokens)
    if isinstance(tokens, range):
        return _from_range(tokens)
    if isinstance(tokens, (str, bytes, bytearray)):
        raise TypeError(f"tokens must be integers, got {type(tokens).__name__}")
    return _from_array(tokens)


cdef cnp.ndarray borrow_pages(object pages):
    cdef cnp.ndarray array
    cdef Py_ssize_t i
    try:
        array = borrow_tokens(pages)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("token", "page id")) from None
    cdef const int32_t *data = <const int32_t *>cnp.PyArray_DATA(array)
    cdef Py_ssize_t n = cnp.PyArray_DIM(array, 0)
    cdef int32_t signs = 0
    # Without a branch, for the compiler to make vectors of.
    for i in range(n):
        signs |= data[i]
    if signs < 0:
        for i in range(n):
            if data[i] < 0:
                raise ValueError(f"page id {data[i]} at position {i} is negative")
    return array


def as_tokens(tokens):
    """Return `tokens` as a contiguous int32 array ``[n]`` on the host, without a copy where it is one already.

    Parameters
    ----------
    tokens : list, tuple, range, array.array or integer ndarray
        One-dimensional integers; torch CPU tensors work through NumPy's array protocol.

    Raises
    ------
    TypeError
        An element is no integer (bool, float and str included).
    ValueError
        A value beyond int32, or more than one dimension.
    """
    return borrow_tokens(tokens)
