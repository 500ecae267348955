"""The names that a torch pickle may use, and the objects that they make: storages and views.

Format: torch/_utils.py and torch/storage.py of https://github.com/pytorch/pytorch
"""

import os
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxmha.checkpoint.errors import BudgetExceeded, ForbiddenContent
from jaxmha.checkpoint.limits import Limits

SAVE = "save only the weights: torch.save(model.state_dict(), path)"
_PAD = "call .to_padded_tensor(0.0) on the nested tensor before torch.save"
# Functions and dtypes that are refused -> the remedy.
REMEDIES = {
    "torch._utils _rebuild_sparse_tensor": "call .to_dense() on the sparse tensor before torch.save",
    "torch._utils _rebuild_qtensor": "call .dequantize() on the quantised tensor before torch.save",
    "torch._utils _rebuild_meta_tensor_no_storage": "load the weights before torch.save: a tensor on "
    "the meta device has no values",
    "torch._utils _rebuild_nested_tensor": _PAD,
    "torch.nested._internal.nested_tensor _rebuild_njt": _PAD,
}
REMEDIES |= {
    f"{module}.multiarray {name}": remedy
    for module in ("numpy._core", "numpy.core")
    for name, remedy in {
        "_reconstruct": "call torch.from_numpy on the array before torch.save",
        "scalar": "call .item() on the NumPy number before torch.save",
    }.items()
}
REMEDIES |= {  # dtypes of bits, of which NumPy has no numbers
    f"torch {name}": "call .view(torch.uint8) on the tensor before torch.save"
    for name in ("float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2")
}
# Dtypes of torch's typed storage classes, which are older than untyped storages.
STORAGES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "FloatStorage": np.float32,
        "DoubleStorage": np.float64,
        "HalfStorage": np.float16,
        "BFloat16Storage": ml_dtypes.bfloat16,
        "LongStorage": np.int64,
        "IntStorage": np.int32,
        "ShortStorage": np.int16,
        "CharStorage": np.int8,
        "ByteStorage": np.uint8,
        "BoolStorage": np.bool_,
        "ComplexFloatStorage": np.complex64,
        "ComplexDoubleStorage": np.complex128,
    }.items()
}
# Dtypes without a storage class: the pickle has an untyped storage and the name of the dtype.
UNTYPED: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "uint16": np.uint16,
        "uint32": np.uint32,
        "uint64": np.uint64,
        "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
        "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
        "float8_e5m2": ml_dtypes.float8_e5m2,
        "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
        "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
    }.items()
}


_MOST_REPEATED = 200_000
# Dtypes that an object of a pickle may be, but that no tensor is read with.
_OTHER_DTYPES = ["complex32", "quint8", "qint8", "qint32", "quint4x2", "quint2x4"]
_DTYPES = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
    "complex128",
]
NUMPY_DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in _DTYPES}


class Call(Enum):
    """The functions that REDUCE may call."""

    ORDERED_DICT = "collections OrderedDict"
    TENSOR_V2 = "torch._utils _rebuild_tensor_v2"
    TENSOR_V3 = "torch._utils _rebuild_tensor_v3"
    PARAMETER = "torch._utils _rebuild_parameter"
    PARAMETER_WITH_STATE = "torch._utils _rebuild_parameter_with_state"
    FROM_TYPE = "torch._tensor _rebuild_from_type_v2"
    COUNTER = "collections Counter"
    DEFAULT_DICT = "collections defaultdict"
    SET = "__builtin__ set"
    FROZEN_SET = "__builtin__ frozenset"
    SIZE = "torch Size"


class Value(Enum):
    """Types of values other than tensors: a call returns the type itself, without its arguments."""

    ENCODE = "_codecs encode"  # of bytes
    BYTES = "__builtin__ bytes"
    BYTEARRAY = "__builtin__ bytearray"
    COMPLEX = "__builtin__ complex"
    RANGE = "__builtin__ xrange"
    SLICE = "__builtin__ slice"
    LIST = "__builtin__ list"
    DICT = "__builtin__ dict"
    INT = "__builtin__ long"  # int of Python 3, by its name in pickle protocol 2
    FLOAT = "__builtin__ float"
    TENSOR = "torch Tensor"
    TENSOR_CLASS = "torch._tensor Tensor"
    BUFFER = "torch.nn.parameter Buffer"
    PARAMETER_CLASS = "torch.nn.parameter Parameter"


class Type(NamedTuple):
    """A storage class or dtype of torch; `storage` is True for a storage class."""

    dtype: np.dtype | None  # None: an untyped storage, counted in bytes
    storage: bool


class Storage(NamedTuple):
    """The elements that one zip member stores."""

    key: str
    dtype: np.dtype | None
    elements: int


class View(NamedTuple):
    """A tensor: a strided view of a storage, with offset and strides in elements."""

    storage: Storage
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


GLOBALS: dict[str, Call | Value | Type] = (
    {call.value: call for call in Call}
    | {value.value: value for value in Value}
    | {f"torch {name}": Type(dtype, True) for name, dtype in STORAGES.items()}
    | {f"torch {name}": Type(x, False) for name, x in (UNTYPED | NUMPY_DTYPES).items()}
    | {f"torch {name}": Type(None, False) for name in _OTHER_DTYPES}
    | {"torch.storage UntypedStorage": Type(None, True)}
)


def flatten(
    root: Any, path: str | os.PathLike[str], limits: Limits, others: list[str]
) -> Iterator[tuple[str, View]]:
    """Yields every tensor with its name: the keys on the path to it, joined by dots.

    The names of the first thousand other values, such as numbers, are appended to `others`.

    Raises:
        ForbiddenContent: `root` is no dict, or a container with tensors occurs in itself.
        BudgetExceeded: nested too deeply, or containers that occur often hold too much.
    """
    if not isinstance(root, dict):
        raise ForbiddenContent(path, "the file holds no dict of tensors", SAVE)
    visiting: set[int] = set()
    with_tensors: dict[int, bool] = {}
    repeated = 0  # entries of containers that were visited before, such as shared state dicts

    def visit(prefix: str, value: Any, depth: int) -> Iterator[tuple[str, View]]:
        if isinstance(value, View):
            yield prefix, value
            return
        nonlocal repeated
        if isinstance(value, Storage | Call) or (isinstance(value, Type) and value.storage):
            raise ForbiddenContent(path, "a storage or type without a tensor", SAVE, prefix[:200])
        if not isinstance(value, dict | list | tuple) or isinstance(value, Type):
            if len(others) < 1000:
                others.append(prefix)
            return
        if with_tensors.get(id(value)) is False:
            return
        if len(prefix) > limits.name_bytes:
            raise BudgetExceeded(path, "a name is too long", SAVE, prefix[:200])
        if id(value) in visiting:
            raise ForbiddenContent(
                path, "a container with tensors is in itself", SAVE, prefix[:200]
            )
        if id(value) in with_tensors:
            repeated += 1 + len(value)
            if repeated > _MOST_REPEATED:
                raise BudgetExceeded(
                    path, "containers with tensors appear too often", SAVE, prefix[:200]
                )
        if depth > limits.depth:
            raise BudgetExceeded(path, "containers are nested too deeply", SAVE, prefix[:200])
        visiting.add(id(value))
        with_tensors_here = False
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            # Check the length before joining, since one long key may occur in many dicts.
            if isinstance(key, str) and len(key) > limits.name_bytes:
                raise BudgetExceeded(path, "a name is too long", SAVE, key[:200])
            for found in visit(f"{prefix}.{key}" if prefix else str(key), item, depth + 1):
                with_tensors_here = True
                yield found
        visiting.remove(id(value))
        with_tensors[id(value)] = with_tensors_here

    yield from visit("", root, 1)
