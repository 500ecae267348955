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


class Call(Enum):
    """The functions that REDUCE may call."""

    ORDERED_DICT = "collections OrderedDict"
    TENSOR_V2 = "torch._utils _rebuild_tensor_v2"
    TENSOR_V3 = "torch._utils _rebuild_tensor_v3"
    PARAMETER = "torch._utils _rebuild_parameter"


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


GLOBALS: dict[str, Call | Type] = (
    {call.value: call for call in Call}
    | {f"torch {name}": Type(dtype, True) for name, dtype in STORAGES.items()}
    | {f"torch {name}": Type(dtype, False) for name, dtype in UNTYPED.items()}
    | {"torch.storage UntypedStorage": Type(None, True)}
)


def flatten(
    root: Any, path: str | os.PathLike[str], limits: Limits, others: list[str]
) -> Iterator[tuple[str, View]]:
    """Yields every tensor with its name: the keys on the path to it, joined by dots.

    The names of the first thousand other values, such as numbers, are appended to `others`.

    Raises:
        ForbiddenContent: `root` is no dict, or a container with tensors occurs twice or in itself.
        BudgetExceeded: nested too deeply.
    """
    if not isinstance(root, dict):
        raise ForbiddenContent(path, "the file holds no dict of tensors", SAVE)
    visiting: set[int] = set()
    with_tensors: dict[int, bool] = {}

    def visit(prefix: str, value: Any, depth: int) -> Iterator[tuple[str, View]]:
        if isinstance(value, View):
            yield prefix, value
            return
        if isinstance(value, Storage | Type | Call):
            raise ForbiddenContent(path, "a storage or type without a tensor", SAVE, prefix[:200])
        if not isinstance(value, dict | list | tuple):
            if len(others) < 1000:
                others.append(prefix)
            return
        if with_tensors.get(id(value)) is False:
            return
        if len(prefix) > limits.name_bytes:
            raise BudgetExceeded(path, "a name is too long", SAVE, prefix[:200])
        if id(value) in visiting or id(value) in with_tensors:
            raise ForbiddenContent(
                path, "a container with tensors appears twice or in itself", SAVE, prefix[:200]
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
