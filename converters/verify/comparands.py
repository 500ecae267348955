"""Reads the sources of a comparison: files, state dicts, parameters and model objects."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from jaxmha import MHAParams, Semantics, checkpoint, multi_head_attention
from jaxmha.checkpoint.errors import listed, printable
from jaxmha.converters import equinox, flax, keras, torch
from jaxmha.converters.discovery import (
    attention_blocks,
    behaviours,
    damaged_blocks,
    described,
    flax_layers,
    head_count,
    keras_groups,
    latent_blocks,
    live_model,
    user_names,
)
from jaxmha.converters.discovery.attention_blocks import Block, shapes
from jaxmha.converters.layout.arrays import NDArray, framework_of, packages_of, to_numpy
from jaxmha.converters.migrate.plans import DTYPES
from jaxmha.converters.migrate.preconditions import naming
from jaxmha.converters.verify import other_tensors
from jaxmha.converters.verify.other_tensors import EMPTY, Source
from jaxmha.params import check, from_leaves, leaves
from jaxmha.projections import check_norms

# A path, a dict of arrays (flat or nested), `MHAParams` (alone or with `Semantics`), a layer or model
# object of torch, Keras, flax or equinox, or a linen pair `(module, variables)`; for others `read`
# raises.
AnySource: TypeAlias = object
Forward = Callable[[NDArray, NDArray, NDArray, NDArray | None], NDArray]


class ComparedBlock(NamedTuple):
    """One attention block of a source.

    Attributes:
      name: the user's name of the block, or its prefix or path; "" for a single layer. No two
        blocks of a source share one.
      layout: name of the layout, or the class of a layer object.
      params, semantics: weights and behaviour as imported.
      forward: function that computes the output: by the layer object itself, or by jaxmha.
      is_live: True if a layer object computes the output.
      kind: framework of a layer object: "torch", "keras", "linen", "nnx" or "equinox", also for
        subclasses; "jaxmha.flax" and "jaxmha.equinox" for layers of jaxmha, and for layers of
        flax whose `attention_fn` is jaxmha's.
      path: prefix in the file, or path in the model.
    """

    name: str
    layout: str
    params: MHAParams
    semantics: Semantics
    forward: Forward
    is_live: bool
    kind: str = ""
    path: str = ""


class Comparand(NamedTuple):
    """One source of a comparison: its attention blocks, and access to all its tensors.

    `notes` describes parts that were not read or not run.
    """

    blocks: list[ComparedBlock]
    source: Source = EMPTY
    notes: tuple[str, ...] = ()


OF_MODELS = "models are compared by `jaxmha.converters.matching.prove`"
# Package name -> the converter module for that framework.
FRAMEWORKS: dict[str, ModuleType] = {
    "torch": torch,
    "keras": keras,
    "flax": flax,
    "equinox": equinox,
}


def read(given: AnySource, num_heads: int | None = None) -> Comparand:
    """Reads every attention block of a source; there may be none.

    The source is a path, a dict of arrays, `MHAParams` (alone or with `Semantics`), a layer or
    model object, or a linen pair `(module, variables)`.

    Raises:
      TypeError: the source is none of these.
      ValueError: the source has no array, or a block cannot be read.
    """
    if isinstance(given, str | os.PathLike):
        path = Path(given)
        with checkpoint.open(path, dequantise=True, unbox=True) as file:
            found = _read_state(file, shapes(file), num_heads, file)
            source = found.source._replace(source=path, info=dict(file.info))
            none = f"{path.name}: no tensors, and not read: {listed(file.others)}"
            found = Comparand(found.blocks, source, (*[none] * bool(file.others), *file.notes))
    elif isinstance(given, MHAParams):
        found = Comparand(list(layers("", "jaxmha", given, Semantics())))
    elif isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], MHAParams):
        found = Comparand(list(layers("", "jaxmha", *given)))
    elif isinstance(given, checkpoint.Checkpoint):
        found = _read_state(given, _shapes_of(given), num_heads, given)
    elif isinstance(given, Mapping):
        state = _flat(given)
        found = _read_state(state, _shapes_of(state), num_heads)
    else:
        found = _read_live(given, num_heads)
    if not found.blocks and not found.source.info:
        raise ValueError(f"no arrays to compare in {_shown(given)}")
    return found


def require_blocks(found: Comparand, given: AnySource) -> None:
    """Raises ValueError if a source, the object `given`, has no attention block."""
    if not found.blocks and not found.source.latents:
        raise ValueError(
            f"no attention block found in {_shown(given)}: `jaxmha verify` compares all tensors"
        )


def _read_state(
    state: Mapping[str, Any],
    all_shapes: Mapping[str, tuple[int, ...]],
    num_heads: int | None = None,
    file: checkpoint.Checkpoint | None = None,
) -> Comparand:
    """Reads the blocks of a flat dict of arrays; each stacked layer becomes a block `name[i]`.

    The metadata of `file`, or a config.json next to it, may hold head counts and semantics.
    """
    path, configured = None, None
    names: Mapping[str, str] = {}
    metadata: Mapping[str, str] = {}
    if file is None:
        found = attention_blocks.find(all_shapes)
    else:
        path, metadata = file.path, file.metadata
        names = keras_groups.names(file.names, metadata)
        with naming(path):
            found = behaviours.blocks(file)
        behaviours.refuse_unread(file, found)
        configured = described.of(file, found).heads
    if broken := damaged_blocks.describe(all_shapes, found):
        where = f"{path}: " if path is not None else ""
        raise ValueError(printable(f"{where}{broken[0]}"))
    compared: list[ComparedBlock] = []
    called = user_names.distinct_names((block.prefix for block in found), names)
    for block in found:
        count, _ = head_count.find(block, all_shapes, num_heads, metadata, configured)
        try:
            params, semantics = block.read(state, count)
            name = called[block.prefix]
            compared += layers(name, block.layout.name, params, semantics, block.prefix)
        except ValueError as error:
            where = f"{path}, " if path is not None else ""
            raise ValueError(
                printable(f"{where}block {block.prefix or '(top)'}: {error}")
            ) from error
    latents = () if file is None else tuple(latent_blocks.every(file))
    taken = frozenset(name for block in found for name in block.keys.values())
    taken |= {name for block in latents for name in block.keys.values()}
    groups = keras_groups.of(names, metadata)
    ordered = file is None or file.ordered
    source = Source(
        state, state, tuple(found), taken, names, groups, latents=latents, ordered=ordered
    )
    if file is not None:
        source = source._replace(tied=file.tied)
    return Comparand(compared, source)


def _flat(given: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """The arrays of nested dicts, such as the variables of haiku; keys are joined by "/"."""
    found: dict[str, Any] = {}
    for name, one in given.items():
        if isinstance(one, Mapping):
            found.update(_flat(one, f"{start}{name}/"))
        else:
            found[f"{start}{name}"] = one
    return found


def _shapes_of(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of a flat dict; an object whose shape NumPy cannot read gets shape ()."""
    return {name: np.shape(array) for name, array in state.items()}


def layers(
    name: str, layout: str, params: MHAParams, semantics: Semantics, path: str = ""
) -> Iterator[ComparedBlock]:
    """Yields one block, or one block per stacked layer if `params` have leading axes.

    Raises ValueError if shapes or norms do not fit.
    """
    check_norms(params, semantics)
    arrays = {leaf: to_numpy(array) for leaf, array in leaves(params).items()}
    lead = arrays["query.kernel"].shape[:-3]
    check(params, len(lead))
    if not lead:
        yield of_params(name, layout, params, semantics)._replace(path=path)
        return
    for index in np.ndindex(lead):
        one = from_leaves({leaf: array[index].copy() for leaf, array in arrays.items()})
        block = of_params(f"{name}{list(index)}", layout, one, semantics)
        yield block._replace(path=f"{path}{list(index)}")


def rounded(given: Comparand, dtype: str) -> Comparand:
    """Returns a source whose floating tensors are rounded to a dtype, as `convert --dtype` does.

    Raises ValueError for an unknown dtype, values that do not fit into it, or a layer object, which
    computes with its own weights.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: known are {', '.join(DTYPES)}")
    if live := next((block for block in given.blocks if block.is_live), None):
        raise ValueError(
            f"dtype={dtype!r} rounds files, arrays and parameters, and {live.name or live.layout} is "
            "a live layer: give its weights, such as its state dict"
        )
    blocks = [
        of_params(
            block.name,
            block.layout,
            from_leaves(
                {
                    leaf: other_tensors.rounded(f"{block.name} {leaf}".strip(), to_numpy(x), dtype)
                    for leaf, x in leaves(block.params).items()
                }
            ),
            block.semantics,
        )._replace(path=block.path)
        for block in given.blocks
    ]
    return given._replace(blocks=blocks, source=given.source._replace(dtype=dtype))


def of_params(name: str, layout: str, params: MHAParams, semantics: Semantics) -> ComparedBlock:
    """Makes a block whose forward runs jaxmha on the parameters of a single layer."""
    single = replace(semantics, attention_axes=None)  # the forward has one sequence axis
    held, wide = {np.dtype(x.dtype) for x in leaves(params).values()}, np.dtype(np.float64)

    def forward(
        query: NDArray, key: NDArray, value: NDArray, mask: NDArray | None = None
    ) -> NDArray:
        (B, T), S = query.shape[:2], key.shape[1]
        full = np.ones((B, 1, T, S), bool) if mask is None else mask
        full = np.ascontiguousarray(np.broadcast_to(full, (B, full.shape[1], T, S)))
        # `full` has one shape for all masks: JAX compiles once.
        with exact_dtypes(wide if wide in held else query.dtype):
            out = multi_head_attention(params, query, key, value, mask=full, semantics=single)
            return to_numpy(out)

    return ComparedBlock(name, layout, params, semantics, forward, is_live=False)


@contextmanager
def exact_dtypes(dtype: np.dtype[Any]) -> Iterator[None]:
    """Enables x64 for float64, and full float32 precision of matrix products on every device.

    It also allows promotion of dtypes and ranks, on which layer objects rely: the settings of the
    caller may forbid it.
    """
    with (
        jax.enable_x64(dtype == np.float64),
        jax.default_matmul_precision("highest"),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def _read_live(given: AnySource, num_heads: int | None) -> Comparand:
    """Reads the attention layers (also hand-written ones) and other tensors of a model object."""
    module = given[0] if isinstance(given, tuple) and given else given
    package = framework_of(module, FRAMEWORKS)
    if "haiku" in (*packages_of(given), *packages_of(module)):
        raise TypeError(
            "a module of haiku holds no weights: give the parameters that init returns, with "
            "num_heads"
        )
    if not package:
        raise TypeError(
            f"cannot compare {_shown(given)}: give a path, a flat dict of arrays, MHAParams, a live "
            f"layer or model of {_frameworks()}, or a linen pair (module, variables)"
        )
    framework = FRAMEWORKS[package]
    if package == "flax":
        flax_layers.refuse_latent(module)
    whole = framework.tensors_of(*(given if isinstance(given, tuple) else (given,)))
    found: list[ComparedBlock] = []
    taken: set[str] = set()
    notes: tuple[str, ...] = ()
    for name, layer in framework.attention_layers(given):
        module = layer[0] if isinstance(layer, tuple) else layer
        path = next((path for path, one in whole.layers.items() if one is module), name)
        block = _live_block(name, layer, package)
        if not block.is_live:
            why = f"{name or block.layout} {_beyond(framework, module)}"
            notes += (f"{why}: its weights were compared, and its forward was not run",)
        found.append(block._replace(path=path))
        taken |= live_model.under(whole, module)
    rest = {name: x for name, x in whole.state.items() if name not in taken}
    written, more, by_hand = _by_hand(rest, whole, num_heads)
    taken |= {name for block in more for name in block.keys.values()}
    source = Source(whole.state, whole.state, tuple(more), frozenset(taken), whole.names)
    blocks = [*found, *written]
    called = user_names.distinct_names((x.path for x in blocks), {x.path: x.name for x in blocks})
    return Comparand([x._replace(name=called[x.path]) for x in blocks], source, (*notes, *by_hand))


def _by_hand(
    state: Mapping[str, Any], whole: live_model.LiveModel, num_heads: int | None
) -> tuple[list[ComparedBlock], list[Block], tuple[str, ...]]:
    """Reads the weights of hand-written attention; its forward has an unknown call signature.

    Returns the blocks, their layouts and tensor names, and notes that no forward was run.
    """
    all_shapes = {name: tuple(np.shape(x)) for name, x in state.items() if hasattr(x, "shape")}
    written: list[ComparedBlock] = []
    notes = []
    found = attention_blocks.find(all_shapes)
    for block in found:
        own = live_model.head_count(whole, block.prefix)
        if None not in (own, num_heads) and own != num_heads:
            raise ValueError(
                f"a head count of {num_heads} is given, and {block.prefix or 'the layer'} has {own}: "
                "leave it out, or correct the one that is wrong"
            )
        count, _ = head_count.find(block, all_shapes, num_heads or own)
        params, semantics = block.read(state, count)
        name = whole.names.get(block.prefix, block.prefix) if block.prefix else ""
        shown = type(whole.layers.get(block.prefix)).__name__
        written += layers(
            name,
            f"{shown}, weights of layout {block.layout.name}",
            params,
            semantics,
            block.prefix,
        )
        notes.append(
            f"{name or shown} is a class written by hand: its weights were compared, and its "
            "forward was not run"
        )
    return written, found, tuple(notes)


def _live_block(name: str, layer: object, package: str) -> ComparedBlock:
    framework = FRAMEWORKS[package]
    # Unlike `from_module`, `weights_of` accepts layers with a modified forward.
    read = getattr(framework, "weights_of", framework.from_module)
    params, semantics = read(*(layer if isinstance(layer, tuple) else (layer,)))
    if (lead := np.shape(params.query.kernel)[:-3]) != ():
        raise ValueError(
            f"{name or _shown(layer)} has stacked layers (leading axes {lead}), which one live "
            "layer cannot run: compare its weights as a flat dict of arrays"
        )

    def forward(
        query: NDArray,
        key: NDArray,
        value: NDArray,
        mask: NDArray | None = None,
    ) -> NDArray:
        with exact_dtypes(query.dtype):
            result: NDArray = framework.forward(layer, query, key, value, mask)
            return result

    module = layer[0] if isinstance(layer, tuple) else layer
    shown = type(module)
    label = f"{shown.__module__.split('.')[0]} {shown.__name__}"
    flavour = "linen" if isinstance(layer, tuple) else "nnx"
    kind = flavour if package == "flax" else package
    if "jaxmha" in packages_of(module) or (package == "flax" and flax_layers.by_jaxmha(module)):
        kind = f"jaxmha.{package}"
    if _beyond(framework, module):
        return of_params(name, label, params, semantics)._replace(kind=kind)
    return ComparedBlock(name, label, params, semantics, forward, is_live=True, kind=kind)


def _beyond(framework: ModuleType, module: object) -> str | None:
    """Describes the computation of a layer that neither parameters nor semantics hold, if any."""
    describe: Callable[[object], str | None] | None
    describe = getattr(framework, "beyond_semantics", None)
    return None if describe is None else describe(module)


def _frameworks() -> str:
    *first, last = FRAMEWORKS
    return f"{', '.join(first)} or {last}"


def _shown(given: AnySource) -> str:
    return str(given) if isinstance(given, str | os.PathLike) else f"a {type(given).__name__}"
