"""SHA-256 of tensors, and of a whole checkpoint whatever its format, order or shards."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmha.converters.arrays import NDArray
from jaxmha.converters.checkpoint.tensor import to_bytes


def of_tensor(array: NDArray) -> str:
    """The digest of one tensor's little-endian bytes, without its shape."""
    return hashlib.sha256(to_bytes(array).data).hexdigest()


def of_contents(info: Mapping[str, Any], tensors: Mapping[str, str]) -> str:
    """The digest of names, shapes, dtypes and the digests of all tensors.

    >>> info = {"a": np.zeros(2), "b": np.ones(3)}
    >>> digests = {name: of_tensor(array) for name, array in info.items()}
    >>> of_contents(info, digests)[:15]
    'sha256:578b2bf0'
    """
    whole = hashlib.sha256()
    for name in sorted(info):
        shape = "x".join(map(str, info[name].shape))
        dtype = np.dtype(info[name].dtype).name
        for text in (name, shape, dtype, tensors[name]):
            raw = text.encode("utf-8", "surrogatepass")
            whole.update(len(raw).to_bytes(8, "little") + raw)
    return f"sha256:{whole.hexdigest()}"


def of_file(file: Any) -> str:
    """The digest of an open checkpoint; reads every tensor, one at a time."""
    return of_contents(file.info, {name: of_tensor(file[name]) for name in file.info})
