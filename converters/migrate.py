"""Checkpoint files from one layout to another: find the attention blocks, convert, write."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from jaxmha import MHAParams
from jaxmha.converters import blocks, checkpoint, heads, keras
from jaxmha.converters.arrays import NDArray
from jaxmha.converters.blocks import Block
from jaxmha.converters.checkpoint.errors import printable
from jaxmha.converters.engine import bind_shapes, export_params
from jaxmha.converters.layout import Layout
from jaxmha.converters.refusals import several_dtypes
from jaxmha.converters.sides import shapes

DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class BlockInfo:
    """One attention block of a file.

    Attributes:
      prefix: where it stands; `name` is the user's name of it, where the format keeps one.
      layout: name of its layout.
      num_heads: None where it is not known; `num_heads_from` says where it is from.
      shapes: key -> shape, of the keys that were found. dtype: of the query kernel.
      family, pattern: models that keep such blocks at such a prefix; None: the keys alone decide.
      also_fits: other layouts with the same keys, where no family decides.
      why: all this in words.
    """

    prefix: str
    name: str
    layout: str
    num_heads: int | None
    num_heads_from: str
    dtype: str
    shapes: dict[str, tuple[int, ...]]
    family: str | None
    pattern: str | None
    also_fits: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class FileInfo:
    """What is in a file: attention blocks, and everything else by dtype.

    `damaged` says what looks like a block and lacks arrays; `convert` and `verify` refuse it.
    """

    path: str
    format: str
    blocks: tuple[BlockInfo, ...]
    other_tensors: dict[str, tuple[int, ...]]
    dtypes: dict[str, int]
    damaged: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data for machines."""
        return asdict(self)


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
      blocks: (prefix in the source, layout there, prefix in the destination, layout there).
      carried: names of tensors that are not attention, taken over as they are.
      largest_rounding: tensor name -> largest absolute change by `dtype`, where there was one.
      notes: what to know of single blocks.
    """

    source: str
    destination: str
    blocks: tuple[tuple[str, str, str, str], ...]
    carried: tuple[str, ...]
    largest_rounding: dict[str, float]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data for machines."""
        return asdict(self)


def inspect(path: str | os.PathLike[str], *, num_heads: int | None = None) -> FileInfo:
    """Lists the attention blocks of a checkpoint and everything else in it.

    Raises:
      CheckpointError: the file cannot be read.
      ValueError: its blocks are ambiguous, or the head count given does not fit them.
    """
    with checkpoint.open(path) as file:
        all_shapes = shapes(file)
        found = blocks.find(all_shapes)
        configured = heads.in_config(file.path)
        infos = []
        for block in found:
            count, where = _heads(file, block, all_shapes, num_heads, configured)
            family, pattern = block.family or (None, None)
            infos.append(
                BlockInfo(
                    block.prefix,
                    file.names.get(block.prefix, ""),
                    block.layout.name,
                    count,
                    where,
                    str(file.info[next(iter(block.keys.values()))].dtype),
                    {key: file.info[name].shape for key, name in block.keys.items()},
                    family,
                    pattern,
                    block.also,
                    block.why,
                )
            )
        taken = {name for block in found for name in block.keys.values()}
        others = {name: info.shape for name, info in file.info.items() if name not in taken}
        dtypes = Counter(str(info.dtype) for info in file.info.values())
        damaged = tuple(blocks.damaged(all_shapes, found))
        return FileInfo(str(path), file.format, tuple(infos), others, dict(dtypes), damaged)


def _heads(
    file: checkpoint.Checkpoint,
    block: Block,
    all_shapes: Mapping[str, tuple[int, ...]],
    given: int | None,
    configured: tuple[int | None, str] | None,
) -> tuple[int | None, str]:
    """The head count of a block where it fits the shapes, and where it is from or what is wrong."""
    try:
        count, where = heads.find(block, all_shapes, given, file.metadata, configured)
    except heads.UnusableConfigError as error:
        return None, str(error)
    own = {key: all_shapes[name] for key, name in block.keys.items()}
    try:
        if count is not None and not block.refused:
            bind_shapes(block.layout, own, count, block.prefix)
    except ValueError as error:
        if given is not None:
            raise ValueError(printable(f"{file.path}: {error}")) from error
        return None, printable(f"{where} says {count}, which does not fit: {error}")
    return count, where


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: str,
    from_: str | None = None,
    num_heads: int | None = None,
    dtype: str | None = None,
    force: bool = False,
    progress: Callable[[list[Block]], Iterable[Block]] = list,
) -> Conversion:
    """Writes a checkpoint with every attention block in another layout.

    Tensors that are not attention are carried over under their names. The destination is written
    last and atomically: an error leaves no file, and an old one as it was.

    Args:
      source: .safetensors, .pt (zip), .weights.h5 or .npz; never executed.
      destination: its suffix names the format.
      to: name of the layout, as in `jaxmha inspect --layouts`.
      from_: takes only blocks of this layout.
      num_heads: for layouts that do not store it; default: the config.json beside the source.
      dtype: casts every floating tensor; one of `DTYPES`.
      force: overwrite an existing destination.
      progress: wraps the list of blocks, to show how far the work is.

    Raises:
      CheckpointError: a file cannot be read or written.
      ValueError: no block, an unknown layout, a missing head count, or a block that the layout
        cannot hold, with the reason.
    """
    in_file = str(destination).endswith(".weights.h5")
    target = _target(blocks.named(to), in_file)
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: known are {', '.join(DTYPES)}")
    with checkpoint.open(source) as file:
        all_shapes = shapes(file)
        known = blocks.LAYOUTS if from_ is None else [blocks.named(from_)]
        found = blocks.find(all_shapes, known)
        if broken := blocks.damaged(all_shapes, found, known):
            raise ValueError(
                f"{source}: {broken[0]}; with --from it is carried over as it is, where another "
                "layout is named"
            )
        if not found:
            wanted = f" of layout {from_}" if from_ else ""
            raise ValueError(
                f"{source}: no attention block{wanted} found (`jaxmha inspect` lists what is there)"
            )
        written: dict[str, NDArray] = {}
        names: dict[str, str] = {}
        moves = []
        notes = []
        counts: dict[str, int] = {}
        heads.refuse_behaviour(file.path)
        configured = heads.in_config(file.path)
        old_names = {b.prefix: file.names[b.prefix] for b in found if b.prefix in file.names}
        for i, block in enumerate(progress(found)):
            count, _ = heads.find(block, all_shapes, num_heads, file.metadata, configured)
            try:
                params, semantics = block.read(file, count)
                if in_file:
                    _refuse_stacked(params)
                prefix = _new_prefix(block, target, i, in_file, old_names)
                arrays = export_params(target, params, semantics, prefix=prefix)
            except ValueError as error:
                where = f"{source}, block {block.prefix or '(top)'}"
                raise ValueError(printable(f"{where}: {error}")) from error
            if dtype is None and (mixed := several_dtypes(params)):
                notes.append(f"{prefix or '(top)'} keeps several dtypes: {mixed}")
            counts[prefix] = params.query.kernel.shape[-2]
            names[prefix] = file.names.get(block.prefix, block.prefix)
            moves.append((block.prefix, block.layout.name, prefix, target.name))
            _add(written, arrays)
        taken = {name for block in found for name in block.keys.values()}
        others = [name for name in file if name not in taken]
        _add(written, {name: file[name] for name in others})
        metadata = dict(file.metadata)
    rounding = _cast(written, dtype) if dtype is not None else {}
    if from_ is None:  # of blocks that are not carried over as they are
        metadata = {k: v for k, v in metadata.items() if not k.startswith(heads.METADATA)}
    if not target.stores_num_heads:
        metadata |= heads.to_metadata(counts, whole=from_ is None)
    _refuse_unreadable(written, {prefix for *_, prefix, _ in moves}, target)
    settings: dict[str, Any] = {"force": force}
    if str(destination).endswith(".safetensors"):
        settings["metadata"] = metadata
    if in_file:
        settings["names"] = names
    checkpoint.write(destination, written, source=source, **settings)
    return Conversion(
        str(source), str(destination), tuple(moves), tuple(others), rounding, tuple(notes)
    )


def _target(named: Layout, in_file: bool) -> Layout:
    """The layout as the destination's format has it."""
    inside = {layout.name for layout, _ in keras.IN_FILE.values()}
    if in_file and named.name in keras.IN_FILE:
        return keras.IN_FILE[named.name][0]
    if in_file and named.name not in inside:
        raise ValueError(
            f"no Keras model could load layout {named.name} from a .weights.h5 file: name "
            f"{' or '.join(keras.IN_FILE)}, or write .safetensors, .pt or .npz"
        )
    if not in_file and named.name in inside:
        plain = next(name for name, (layout, _) in keras.IN_FILE.items() if layout is named)
        raise ValueError(
            f"layout {named.name} is how Keras names the arrays inside a .weights.h5 file: "
            f"name {plain} for other files"
        )
    return named


def _refuse_stacked(params: MHAParams) -> None:
    if lead := np.shape(params.query.kernel)[:-3]:
        raise ValueError(
            f"its arrays are stacked layers (leading axes {lead}), and Keras has none: its files "
            "keep one group per layer; unstack every tensor of the file, or write .safetensors, "
            ".pt or .npz"
        )


def _new_prefix(
    block: Block, target: Layout, i: int, in_file: bool, names: Mapping[str, str]
) -> str:
    """Keras files name groups by class and number; the block's own name is an attribute there."""
    groups = {layout.name: group for layout, group in keras.IN_FILE.values()}
    if in_file and target.name in groups:
        return f"layers/{groups[target.name]}{f'_{i}' * (i > 0)}"
    name = names.get(block.prefix)
    if name is None or list(names.values()).count(name) > 1:
        return block.prefix.replace(block.layout.separator, target.separator)
    return re.sub("[./]", target.separator, name)


def _add(written: dict[str, NDArray], arrays: Mapping[str, NDArray]) -> None:
    if clash := sorted(written.keys() & arrays.keys()):
        raise ValueError(f"two tensors would be written as {clash[0]!r}: rename one in the source")
    written |= arrays


def _refuse_unreadable(written: Mapping[str, NDArray], prefixes: set[str], target: Layout) -> None:
    """Raises ValueError where a carried tensor would make a block of the destination unreadable."""
    found = blocks.find({name: array.shape for name, array in written.items()}, [target])
    for block in found:
        if block.prefix in prefixes and block.unknown:
            raise ValueError(
                f"block {block.prefix or '(top)'} could not be read back: layout {target.name} has no "
                f"{printable(', '.join(block.unknown))}, which the source has beside its attention"
            )
    if missing := prefixes - {block.prefix for block in found}:
        raise ValueError(f"block {min(missing)} could not be read back as layout {target.name}")


def _cast(written: dict[str, NDArray], dtype: str) -> dict[str, float]:
    """Casts floating tensors in place of the old ones; the largest change of each."""
    wanted, rounding = jax.numpy.dtype(dtype), {}
    for name, array in written.items():
        if not jax.numpy.issubdtype(array.dtype, np.floating) or array.dtype == wanted:
            continue
        with np.errstate(over="ignore"):
            cast = array.astype(wanted)
        if (np.isinf(cast) & ~np.isinf(array)).any():
            raise ValueError(
                f"{name}: values up to {np.abs(array).max():.3g} do not fit into {dtype}: choose "
                "a wider dtype (bfloat16 has the range of float32)"
            )
        change = np.abs(cast.astype(np.float64) - array.astype(np.float64)).max(initial=0.0)
        if change:
            rounding[name] = float(change)
        written[name] = cast
    return rounding
