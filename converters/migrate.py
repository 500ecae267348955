"""Checkpoint files from one layout to another: find the attention blocks, convert, write."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from jaxmha import __version__
from jaxmha.converters import (
    blocks,
    checkpoint,
    configuration,
    heads,
    keras,
    moves,
    read_back,
    unconverted,
)
from jaxmha.converters import plan as planning
from jaxmha.converters.arrays import NDArray, to_numpy
from jaxmha.converters.checkpoint import CheckpointError, Loss, sharded
from jaxmha.converters.checkpoint.errors import printable
from jaxmha.converters.inspection import FileInfo, inspect
from jaxmha.converters.layout import Layout
from jaxmha.converters.notes import listed
from jaxmha.converters.plan import DTYPES, OTHERS, Move, Plan, Resolved, resolve
from jaxmha.converters.sides import shapes

__all__ = ["DTYPES", "Conversion", "FileInfo", "convert", "convert_state", "inspect", "plan"]

# Metadata that says what wrote a file, and is written anew or means nothing elsewhere.
_NO_NEWS = ("jaxmha.", "format", "total_size")
_UNBOUND = "the plan has no digest: nothing said that it was made for this source"
DIGEST = "sha256"  # binds plans to sources: the same with and without xxhash


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
      blocks: (prefix in the source, layout there, prefix in the destination, layout there).
      beside: (kind, prefix in the source, prefix in the destination) of the layers beside them.
      carried: names of tensors that are neither, taken over as they are.
      files: what was written. digests: tensor name -> digest, of what was read back.
      losses: tensor name -> what the cast to `dtype` did to it, for every tensor that it changed.
      notes: what to know of single blocks, and of norms. plan: what was done, tensor by tensor.
    """

    source: str
    destination: str
    blocks: tuple[tuple[str, str, str, str], ...]
    beside: tuple[tuple[str, str, str], ...]
    carried: tuple[str, ...]
    files: tuple[str, ...]
    digests: dict[str, str]
    losses: dict[str, Loss]
    notes: tuple[str, ...] = ()
    plan: Plan | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data for machines."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        del data["plan"]
        return data | {"losses": {name: loss._asdict() for name, loss in self.losses.items()}}


def plan(
    source: str | os.PathLike[str],
    *,
    to: str,
    from_: str | None = None,
    num_heads: int | None = None,
    dtype: str | None = None,
    others: str = "pass",
    attention_only: bool = False,
    in_file: bool = False,
) -> tuple[Plan, Resolved]:
    """What `convert` would do to every tensor of a checkpoint, bound to its contents' digest.

    `in_file`: for a .weights.h5 file. Else as `convert`, and raises as it does.
    """
    with checkpoint.open(source) as file:
        made = _make(file, to, from_, num_heads, dtype, others, attention_only, in_file, draft=True)
        named = replace(made, source=printable(str(source)), digest=file.digest(DIGEST))
        with _naming(file.path):
            return named, resolve(named, file)


def _make(
    file: checkpoint.Checkpoint,
    to: str,
    from_: str | None,
    num_heads: int | None,
    dtype: str | None,
    others: str,
    attention_only: bool,
    in_file: bool,
    draft: bool = False,
) -> Plan:
    target = _target(blocks.named(to), in_file)
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: known are {', '.join(DTYPES)}")
    if others not in OTHERS:
        raise ValueError(f"others must be {' or '.join(OTHERS)}, got {others!r}")
    configuration.refuse_behaviour(file.path)
    with _naming(file.path):
        made = planning.make(
            file,
            target,
            from_=None if from_ is None else blocks.named(from_),
            num_heads=num_heads,
            others=others,
            attention_only=attention_only,
            configured=heads.in_config(file.path),
            epsilon=configuration.epsilons(file.path),
            unlike=configuration.offset_norms(file.path),
            unbiased=configuration.unbiased_norms(file.path),
            draft=draft,
        )
    if not any(move.kind != "other" for move in made.moves):
        wanted = f" of layout {from_}" if from_ else ""
        raise ValueError(
            f"{file.path}: no attention block{wanted} found (`jaxmha inspect` lists what is there)"
        )
    return replace(made, dtype=dtype, notes=(*made.notes, *_around(made, file)))


def _around(plan: Plan, file: checkpoint.Checkpoint) -> tuple[str, ...]:
    """What is computed around the blocks of a plan and not converted.

    Raises ValueError where the blocks are no attention of this form.
    """
    layouts = dict.fromkeys(move.layout for move in plan.moves if move.kind == "attention")
    unconverted.refuse(file.path, layouts)
    taken = _taken(plan)
    return unconverted.notes(file.path, (x for x in file.info if x not in taken), layouts)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Messages begin with the file."""
    try:
        yield
    except CheckpointError:
        raise
    except heads.UnusableConfigError:
        raise
    except ValueError as error:
        between = ", " if str(error).startswith("block ") else ": "
        raise ValueError(f"{path}{between}{error}") from error


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: str | None = None,
    from_: str | None = None,
    num_heads: int | None = None,
    dtype: str | None = None,
    others: str = "pass",
    attention_only: bool = False,
    plan: Plan | None = None,
    force: bool = False,
    shard_size: int | None = None,
    resume: bool = False,
    part: tuple[int, int] | None = None,
    digest: str | None = "fast",
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Writes a checkpoint with its attention in another layout, and the layers beside it as that
    layout's framework has them.

    What is not understood is carried over under its name, or refused; nothing is dropped. Tensors
    are read and written one by one, so that memory holds the largest of them and some blocks. The
    destination is put in place last and atomically: an error leaves no file, and an old one as it
    was.

    Args:
      source: anything that `checkpoint.open` reads; never executed.
      destination: its suffix names the format; NAME.safetensors.index.json writes shards.
      to: name of the layout, as in `jaxmha inspect --layouts`.
      from_: takes only blocks of this layout; everything else is carried over.
      num_heads: for layouts that do not store it; default: the config.json beside the source.
      dtype: casts every floating tensor; one of `DTYPES`.
      others: "pass" carries over what is not understood, "refuse" raises for it.
      attention_only: everything but attention is carried over.
      plan: does exactly this instead of all the above, to the source that it is for.
      force: overwrite an existing destination.
      shard_size: bytes of tensors per shard, where the destination is an index.
      resume: where shards are written: an interruption leaves the complete ones, and the same
        conversion goes on from there.
      part: `(i, n)`, with `resume`: only every n-th shard, as `checkpoint.write` has it.
      digest: per tensor, kept in the file: "fast", "xxh3_128", "sha256" or None.
      progress: called as progress(done, total) with bytes, written and read back.

    Raises:
      CheckpointError: a file cannot be read or written.
      ValueError: no block, an unknown layout, a missing head count, a block that the layout
        cannot hold, with the reason; or a plan that is not for this source.
    """
    in_file, given = str(destination).endswith(".weights.h5"), plan is not None
    _refuse_beside(Path(source), Path(destination))
    with checkpoint.open(source) as file:
        if plan is None:
            if to is None:
                raise ValueError("name a layout (to=), or give a plan")
            plan = _make(file, to, from_, num_heads, dtype, others, attention_only, in_file)
        else:
            _check_plan(plan, file, in_file)
            around = _around(plan, file)
            plan = replace(plan, notes=(*plan.notes, *(x for x in around if x not in plan.notes)))
        with _naming(file.path):
            found = resolve(plan, file)
            if given:
                _check_heads(found, file)
        target = blocks.named(plan.to)
        whole = all(name in _taken(plan) for name in _attention_names(file))
        metadata = dict(file.metadata)
        if whole:  # no block is carried over as it is
            metadata = {k: v for k, v in metadata.items() if not k.startswith(heads.METADATA)}
        if not target.stores_num_heads:
            metadata |= heads.to_metadata(found.counts, whole=whole)
        targets = {move.target for move, _ in found.by_move if move.kind == "attention"}
        read_back.refuse(found.made, targets, target, shapes(file))
        settings: dict[str, Any] = {}
        lost = []
        if str(destination).endswith((".safetensors", f".safetensors{sharded.SUFFIX}")):
            settings["metadata"] = metadata
        else:
            if own := [key for key in file.metadata if not key.startswith(_NO_NEWS)]:
                lost = [
                    f"metadata not carried over, for which the format has no place: {listed(own)}"
                ]
            if not target.stores_num_heads:
                counts = ", ".join(map(str, sorted(set(found.counts.values()))))
                lost.append(
                    f"the head count ({counts}) is in no tensor, and the format has no place for it: "
                    "keep a config.json beside the file"
                )
        if in_file:
            settings["names"] = found.names
        if resume:
            settings["part"] = part
            settings["resume"] = f"{__version__} {file.digest()} {_what(plan)}"
        written = checkpoint.write(
            destination,
            moves.lazy(found.made),
            source=file.files,
            force=force,
            dtype=plan.dtype,
            overflow="refuse",
            shard_size=shard_size,
            digest=digest,
            progress=progress,
            **settings,
        )
    return Conversion(
        str(source),
        str(destination),
        tuple(
            (move.source, move.layout, move.target, target.name)
            for move in plan.moves
            if move.kind == "attention"
        ),
        tuple(
            (move.kind, move.source, move.target)
            for move in plan.moves
            if move.kind not in ("attention", "other")
        ),
        tuple(move.target for move in plan.moves if move.kind == "other"),
        tuple(map(str, written.files)),
        dict(written.digests),
        dict(written.losses),
        (
            *plan.notes,
            *([_UNBOUND] if given and not plan.digest else []),
            *found.notes,
            *lost,
        ),
        plan,
    )


def convert_state(
    state: Mapping[str, Any],
    *,
    to: str,
    num_heads: int | None = None,
    others: str = "pass",
    attention_only: bool = False,
) -> dict[str, NDArray]:
    """A flat dict of arrays as `convert` would write it; for models in memory.

    Raises ValueError as `convert` does.

    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(6, 2, 5)
    >>> sorted(convert_state(layer.state_dict(), to="flax", num_heads=2))[:3]
    ['linear1/bias', 'linear1/kernel', 'linear2/bias']
    """
    memory = _Memory(state)
    made = planning.make(
        memory,
        _target(blocks.named(to), in_file=False),
        num_heads=num_heads,
        others=others,
        attention_only=attention_only,
    )
    return {name: to_numpy(one.load()) for name, one in resolve(made, memory).made.items()}


class _Memory(dict[str, NDArray]):
    """A state as a plan wants it."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__({name: to_numpy(array) for name, array in state.items()})
        self.info: Mapping[str, Any] = self
        self.metadata: Mapping[str, str] = {}
        self.names: Mapping[str, str] = {}
        self.others: tuple[str, ...] = ()


def _refuse_beside(source: Path, destination: Path) -> None:
    """Raises ValueError where a folder that is the source would hold two checkpoints afterwards."""
    inside = destination.absolute().parent.resolve() == source.resolve()
    if inside and destination.name.endswith(sharded.SUFFIX):
        raise ValueError(
            f"{destination}: is in the folder that is the source, whose name would then stand for two "
            "checkpoints: name the file in it as the source, or write elsewhere"
        )


def _check_plan(plan: Plan, file: checkpoint.Checkpoint, in_file: bool) -> None:
    """Raises ValueError where a plan is for another source or another kind of destination."""
    if _target(blocks.named(plan.to), in_file).name != plan.to:
        raise ValueError(
            f"the plan's layout {plan.to} is not for a .weights.h5 file: name {plan.to}-file"
        )
    configuration.refuse_behaviour(file.path)
    if plan.digest and (found := file.digest(plan.digest.partition(":")[0])) != plan.digest:
        raise ValueError(
            f"{file.path}: its contents are {found}, and the plan is for {plan.source or 'a file'} of "
            f"{plan.digest}: make a new plan"
        )
    if plan.dtype is not None and plan.dtype not in DTYPES:
        raise ValueError(f"unknown dtype {plan.dtype!r}: known are {', '.join(DTYPES)}")
    for move in plan.moves:
        if move.kind in ("attention", "other") and move.becomes not in ("", move.kind):
            raise ValueError(
                f"module {move.source or '(top)'} of the plan is {move.kind!r} and can become nothing "
                f"else, got as = {move.becomes!r}"
            )
        if move.kind != "attention" or move.num_heads is not None:
            continue
        if not blocks.named(move.layout).stores_num_heads:
            raise ValueError(
                f"module {move.source or '(top)'} of the plan lacks num_heads, which layout "
                f"{move.layout} does not store"
            )
    others = [move.source for move in plan.moves if move.kind == "other"]
    if plan.others == "refuse" and others:
        raise ValueError(f"the plan refuses others, and has {others[0]!r} as one")


def _check_heads(found: Resolved, file: checkpoint.Checkpoint) -> None:
    """Raises ValueError where a plan's head count is not that of the source's own description."""
    configured, there = heads.in_config(file.path), shapes(file)
    for move, block in found.blocks.items():
        if move.num_heads is not None:
            try:
                heads.find(block, there, move.num_heads, file.metadata, configured)
            except ValueError as error:
                raise ValueError(f"block {move.source or '(top)'}: {error}") from error


def _taken(plan: Plan) -> set[str]:
    return {name for move in plan.moves if move.kind == "attention" for name in move.tensors}


def _attention_names(file: checkpoint.Checkpoint) -> set[str]:
    return {name for block in blocks.find(shapes(file)) for name in block.keys.values()}


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


def _what(plan: Plan) -> str:
    """What a plan does, whatever it is called and however it was found."""
    return repr(replace(plan, source="", digest="", notes=(), moves=tuple(map(_bare, plan.moves))))


def _bare(move: Move) -> Move:
    return replace(move, confidence="", why="")
