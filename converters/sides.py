"""What can be compared: attention blocks of files, states, parameters and live models."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmha import MHAParams, Semantics, multi_head_attention
from jaxmha.converters import (
    blocks,
    checkpoint,
    configuration,
    described,
    flax,
    heads,
    keras,
    torch,
)
from jaxmha.converters.arrays import NDArray, to_numpy
from jaxmha.converters.checkpoint.errors import printable
from jaxmha.params import check, from_leaves, leaves

Forward = Callable[[NDArray, NDArray, NDArray, NDArray | None], NDArray]


class BlockSide(NamedTuple):
    """One attention block of a side.

    Attributes:
      name: prefix in the file, path in the model; "" for a single layer.
      layout: the layout's name, or the class of a live layer.
      params, semantics: as imported.
      forward: runs it: the live layer itself, or jaxmha on the parameters.
      live: whether a live layer runs.
      kind: of a live layer: "torch", "keras", "linen" or "nnx", whatever its class is called.
    """

    name: str
    layout: str
    params: MHAParams
    semantics: Semantics
    forward: Forward
    live: bool
    kind: str = ""


class Side(NamedTuple):
    """What one side holds: its attention blocks, and the names of other arrays."""

    blocks: list[BlockSide]
    others: tuple[str, ...] = ()


FRAMEWORKS: dict[str, ModuleType] = {"torch": torch, "keras": keras, "flax": flax}


def read(side: Any, num_heads: int | None = None) -> Side:
    """Every attention block of a path, a flat dict of arrays, `MHAParams` (alone or with
    `Semantics`), a live layer or model, or a linen pair `(module, variables)`.

    Raises:
      TypeError: it is none of these.
      ValueError: no attention block in it, or one that cannot be read.
    """
    if isinstance(side, str | os.PathLike):
        path = Path(side)
        with checkpoint.open(path) as file:
            found = _read_state(file, shapes(file), num_heads, file)
    elif isinstance(side, MHAParams):
        found = Side(list(layers("", "jaxmha", side, Semantics())))
    elif isinstance(side, tuple) and len(side) == 2 and isinstance(side[0], MHAParams):
        found = Side(list(layers("", "jaxmha", *side)))
    elif isinstance(side, Mapping):
        found = _read_state(side, {k: np.shape(v) for k, v in side.items()}, num_heads)
    else:
        found = Side(list(_read_live(side)))
    if not found.blocks:
        raise ValueError(f"no attention block found in {_shown(side)}")
    return found


def _read_state(
    state: Mapping[str, Any],
    all_shapes: Mapping[str, tuple[int, ...]],
    num_heads: int | None = None,
    file: checkpoint.Checkpoint | None = None,
) -> Side:
    """The blocks of a flat dict of arrays, stacked layers one by one as `block[i]`.

    Of a file the head count may stand in a config.json beside it.
    """
    path, configured = None, None
    names: Mapping[str, str] = {}
    metadata: Mapping[str, str] = {}
    found = blocks.find(all_shapes)
    if file is not None:
        path, names, metadata = file.path, file.names, file.metadata
        configuration.refuse_behaviour(path)
        configured = described.of(file, found).heads
    if broken := blocks.damaged(all_shapes, found):
        where = f"{path}: " if path is not None else ""
        raise ValueError(printable(f"{where}{broken[0]}"))
    sides: list[BlockSide] = []
    for block in found:
        count, _ = heads.find(block, all_shapes, num_heads, metadata, configured)
        try:
            params, semantics = block.read(state, count)
            name = names.get(block.prefix, block.prefix)
            sides += layers(name, block.layout.name, params, semantics)
        except ValueError as error:
            where = f"{path}, " if path is not None else ""
            raise ValueError(
                printable(f"{where}block {block.prefix or '(top)'}: {error}")
            ) from error
    taken = {name for block in found for name in block.keys.values()}
    return Side(sides, tuple(name for name in all_shapes if name not in taken))


Digest = tuple[str, tuple[int, ...], str]


def digests(
    side: Any, names: Iterable[str], *, transposed: bool = False
) -> dict[str, Digest | None]:
    """Dtype, shape and digest of some arrays of a path or of a flat dict, one after the other; None:
    it is no dense array of numbers."""
    if isinstance(side, str | os.PathLike):
        with checkpoint.open(side) as file:
            return {name: _digest(file[name], transposed) for name in names}
    return {name: _digest(side[name], transposed) for name in names}


def _digest(value: Any, transposed: bool) -> Digest | None:
    try:
        array = to_numpy(value)
    except (TypeError, ValueError, RuntimeError):  # a sparse tensor among them
        return None
    if array.dtype == object:
        return None
    array = array.T if transposed else array
    return str(array.dtype), array.shape, checkpoint.digest(array)


def layers(name: str, layout: str, params: MHAParams, semantics: Semantics) -> Iterator[BlockSide]:
    """The block; or, where it has leading axes, every layer in it."""
    arrays = {leaf: to_numpy(array) for leaf, array in leaves(params).items()}
    lead = arrays["query.kernel"].shape[:-3]
    check(params, len(lead))
    if not lead:
        yield of_params(name, layout, params, semantics)
        return
    for index in np.ndindex(lead):
        one = from_leaves({leaf: array[index].copy() for leaf, array in arrays.items()})
        yield of_params(f"{name}{list(index)}", layout, one, semantics)


def shapes(file: checkpoint.Checkpoint) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a checkpoint."""
    return {name: info.shape for name, info in file.info.items()}


def of_params(name: str, layout: str, params: MHAParams, semantics: Semantics) -> BlockSide:
    """A side that runs jaxmha on parameters of a single layer."""

    def forward(
        query: NDArray, key: NDArray, value: NDArray, mask: NDArray | None = None
    ) -> NDArray:
        (B, T), S = query.shape[:2], key.shape[1]
        full = np.ones((B, 1, T, S), bool) if mask is None else mask
        full = np.ascontiguousarray(np.broadcast_to(full, (B, full.shape[1], T, S)))
        with exact_dtypes(query.dtype):  # masks of one shape: compiled once
            out = multi_head_attention(params, query, key, value, mask=full, semantics=semantics)
            return to_numpy(out)

    return BlockSide(name, layout, params, semantics, forward, live=False)


@contextmanager
def exact_dtypes(dtype: np.dtype[Any]) -> Iterator[None]:
    """float64 needs x64; highest precision, so that float32 is float32 everywhere.

    Live layers promote dtypes and ranks by themselves, which users' tests may forbid.
    """
    with (
        jax.enable_x64(dtype == np.float64),
        jax.default_matmul_precision("highest"),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def _read_live(side: Any) -> Iterator[BlockSide]:
    module = side[0] if isinstance(side, tuple) and side else side
    packages = (base.__module__.split(".")[0] for base in type(module).__mro__)
    package = next((p for p in packages if p in FRAMEWORKS), None)
    if package is None:
        raise TypeError(
            f"cannot compare {_shown(side)}: give a path, a flat dict of arrays, MHAParams, a live "
            "layer or model of torch, keras or flax, or a linen pair (module, variables)"
        )
    framework = FRAMEWORKS[package]
    for name, layer in framework.attention_layers(side):
        # A layer that does something else is what a comparison is for.
        read = getattr(framework, "weights_of", framework.from_module)
        params, semantics = read(*(layer if isinstance(layer, tuple) else (layer,)))
        if (lead := np.shape(params.query.kernel)[:-3]) != ():
            raise ValueError(
                f"{name or _shown(module)} has stacked layers (leading axes {lead}), which one live "
                "layer cannot run: compare its weights as a flat dict of arrays"
            )

        def forward(
            query: NDArray,
            key: NDArray,
            value: NDArray,
            mask: NDArray | None = None,
            layer: Any = layer,
        ) -> NDArray:
            with exact_dtypes(query.dtype):
                result: NDArray = framework.forward(layer, query, key, value, mask)
                return result

        shown = type(layer[0] if isinstance(layer, tuple) else layer)
        label = f"{shown.__module__.split('.')[0]} {shown.__name__}"
        flavour = "linen" if isinstance(layer, tuple) else "nnx"
        kind = flavour if package == "flax" else package
        yield BlockSide(name, label, params, semantics, forward, live=True, kind=kind)


def _shown(side: Any) -> str:
    return str(side) if isinstance(side, str | os.PathLike) else f"a {type(side).__name__}"
