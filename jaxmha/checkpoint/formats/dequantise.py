"""On reading, dequantises weights whose scales are other tensors of the checkpoint."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain

import numpy as np

from jaxmha.checkpoint.errors import UnsupportedFormat
from jaxmha.checkpoint.formats import bitsandbytes, packed, scaled
from jaxmha.checkpoint.formats.quantised import Quantised
from jaxmha.checkpoint.limits import Budget, Limits
from jaxmha.checkpoint.plan import Contents
from jaxmha.checkpoint.tensor import TensorInfo

Finder = Callable[[Contents, str | os.PathLike[str]], Iterator[tuple[str, Quantised]]]
_FINDERS: tuple[Finder, ...] = (scaled.found, packed.found, bitsandbytes.found)
# Suffix of the name of a tensor that no finder used -> the unsupported scheme that has it.
_OTHERS = {
    ".qweight": "packed integers without scales",
    ".weight_packed": "packed integers without scales",
    ".weight.absmax": "bitsandbytes without quant_state",
    ".SCB": "bitsandbytes without an int8 weight",
    ".weight_zero_point": "zero points without scales",
    ".weight_global_scale": "NVFP4",
    ".weight_g_idx": "compressed-tensors in the order of activations",
}


def dequantised(
    contents: Contents, path: str | os.PathLike[str], size: int, limits: Limits
) -> Contents:
    """Returns contents that dequantise weights on loading, and lack the tensors of their scales.

    `size` is the number of bytes of the files.

    Raises:
        UnsupportedFormat: weights are quantised by an unsupported scheme.
        MalformedFile: the shapes of a weight and its scale do not fit.
        BudgetExceeded: the dequantised weights are larger than `limits` allow.
    """
    found = dict(chain.from_iterable(find(contents, path) for find in _FINDERS))
    used = {part for one in found.values() for part in one.parts}
    _refuse_others(contents.info, used, path)
    if not found:
        return contents
    if limits.logical_bytes is None:  # 4 bits become 4 bytes; 8 bits, up to 8 bytes
        limits = replace(limits, logical_bytes=max(8 * size, 1 << 30))
    budget = Budget(path, size, limits)
    for name, one in found.items():
        budget.tensor(name, *one.info)
    used |= {f"{name.removesuffix('weight')}input_scale" for name in found}
    info = {name: one for name, one in contents.info.items() if name not in used}
    info |= {name: one.info for name, one in found.items()}
    order = {name: n for n, name in enumerate(contents.info)}
    names = sorted(
        info, key=lambda name: order.get(found[name].parts[0] if name in found else name, 0)
    )

    def load(name: str) -> np.ndarray:
        one = found.get(name)
        if one is None:
            return contents.load(name)
        return one.make(*map(contents.load, one.parts))

    def view(name: str) -> np.ndarray | None:
        return None if name in found or contents.view is None else contents.view(name)

    return replace(
        contents,
        info={name: info[name] for name in names},
        load=load,
        view=view,
        stream=None,
        part=None,
        digests={n: x for n, x in contents.digests.items() if n in info and n not in found},
        quantised={name: one.kind for name, one in found.items()},
    )


def _refuse_others(
    info: Mapping[str, TensorInfo], used: set[str], path: str | os.PathLike[str]
) -> None:
    for name in info.keys() - used:
        for ending, scheme in _OTHERS.items():
            if name.endswith(ending):
                problem = f"its weights are quantised as {scheme}, which is not dequantised here"
                remedy = "dequantise the model with its library and save it, or use the original"
                raise UnsupportedFormat(path, problem, remedy, name)
