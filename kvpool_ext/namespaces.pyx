"""Namespaces: what callers may call them, as keys of a dictionary."""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_FromObject

import operator

import numpy as np


cdef object namespace_key(object extra_key):
    """`extra_key` as a dictionary key; TypeError for anything but str, bytes, int and None."""
    if extra_key is None or type(extra_key) is str or type(extra_key) is bytes:
        return extra_key
    # Of a subclass the plain value: its own hash and comparison would run in the middle of a move.
    if isinstance(extra_key, str):
        return PyUnicode_FromObject(extra_key)
    if isinstance(extra_key, bytes):
        return PyBytes_FromStringAndSize(PyBytes_AS_STRING(extra_key), PyBytes_GET_SIZE(extra_key))
    if not isinstance(extra_key, (bool, np.bool_)):
        try:
            return operator.index(extra_key)
        except TypeError:
            pass
    raise TypeError(f"extra_key must be str, bytes, int or None, got {type(extra_key).__name__}")


def as_namespace(extra_key):
    """`extra_key` as a namespace: a plain str, bytes, int or None; TypeError for anything else."""
    return namespace_key(extra_key)
