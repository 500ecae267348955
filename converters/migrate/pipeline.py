"""Converts checkpoint files: finds attention blocks, makes and checks a plan, writes the result."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxmha import __version__, checkpoint
from jaxmha.checkpoint import writer
from jaxmha.checkpoint.errors import printable
from jaxmha.converters.discovery import (
    attended,
    attention_blocks,
    behaviours,
    described,
    hf_config,
    notes,
    unconverted,
)
from jaxmha.converters.discovery.attention_blocks import Block, shapes
from jaxmha.converters.discovery.head_count import Configured
from jaxmha.converters.layout import registry, states
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.converters.migrate import (
    containers,
    conversion,
    destination_metadata,
    edited,
    keras_order,
    lazy_tensors,
    read_back,
)
from jaxmha.converters.migrate import plans as planning
from jaxmha.converters.migrate.conversion import Conversion
from jaxmha.converters.migrate.inspection import FileInfo, inspect
from jaxmha.converters.migrate.plans import DTYPES, OTHERS, Plan, Step
from jaxmha.converters.migrate.preconditions import (
    check_heads,
    check_like,
    check_plan,
    naming,
    refuse_another_checkpoint,
    taken_from,
    target_layout,
)
from jaxmha.converters.migrate.resolved import Resolved, resolve

__all__ = ["DTYPES", "Conversion", "FileInfo", "convert", "convert_state", "inspect", "plan"]

_UNBOUND = "the plan has no digest: it may have been made for another source"
DIGEST = "sha256"  # of sources, in plans; unlike xxhash it is always installed


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
    fold_scale: bool = False,
    fill_bias: str | None = None,
) -> tuple[Plan, Resolved]:
    """Returns the plan by which `convert` would convert a checkpoint, and its lazy tensors.

    The plan holds the digest of the source. `in_file`: True for a .weights.h5 destination. See
    `convert` for the other arguments and the errors.
    """
    with hf_config.read_once(), checkpoint.open(source, dequantise=True, unbox=True) as file:
        made, _ = _make(file, to, from_, num_heads, dtype, others, attention_only, in_file, True)
        made = replace(made, fold_scale=fold_scale, fill_bias=fill_bias)
        with naming(file.path):
            found = resolve(made, file)  # raises before `digest` reads all tensors
        named = replace(made, source=printable(str(source)), digest=file.digest(DIGEST))
        return named, found


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
) -> tuple[Plan, described.Description]:
    """Returns a plan, and the description of its source."""
    target = target_layout(attention_blocks.named(to), in_file)
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: known are {', '.join(DTYPES)}")
    if others not in OTHERS:
        raise ValueError(f"others must be {' or '.join(OTHERS)}, got {others!r}")
    known = registry.LAYOUTS if from_ is None else [attention_blocks.named(from_)]
    with naming(file.path):
        every = attention_blocks.find(shapes(file))
        found = every if from_ is None else attention_blocks.find(shapes(file), known)
        behaviours.refuse_unread(file, found)
        description = described.of(file, found)
        made = planning.make(
            file,
            target,
            found=found,
            known=known,
            num_heads=num_heads,
            others=others,
            attention_only=attention_only,
            configured=description.heads,
            epsilon=description.epsilon,
            unlike=description.unlike,
            unbiased=description.unbiased,
            draft=draft,
        )
    if not any(step.kind != "other" for step in made.steps):
        wanted = f" of layout {from_}" if from_ else ""
        raise ValueError(
            f"{file.path}: no attention block{wanted} found, and no other layer to convert to {to} "
            "(`jaxmha inspect` lists the tensors): leave out to= (--to) to write all tensors as they are "
            "in another format, or fill a model of your own (`jaxmha match`)"
        )
    if target.name != attention_blocks.named(to).name or target.name.endswith("-file"):
        groups = keras_order.kept(file, made.steps)
        made = replace(made, steps=keras_order.placed(made.steps, groups))
    around = _around(made, file, every, description.heads)
    all_notes = (*description.notes, *made.notes, *around, *file.notes)
    return replace(made, dtype=dtype, notes=all_notes), description


def _around(
    plan: Plan, file: checkpoint.Checkpoint, blocks: Sequence[Block], heads: Configured | None
) -> tuple[str, ...]:
    """Returns notes on computations of the model (positions, masks) that the plan does not convert.

    `heads`: the head counts of its configuration.

    Raises ValueError if such a computation changes the function of a block.
    """
    layouts = dict.fromkeys(step.layout for step in plan.steps if step.kind == "attention")
    taken = destination_metadata.taken(plan)
    names = [name for name in file.info if name not in taken]
    blocks = behaviours.configured(blocks, file)
    carried = behaviours.carried(blocks, file)
    unconverted.refuse(file.path, names, layouts, carried)
    sources = {step.source for step in plan.steps if step.kind == "attention"}
    chosen = [block for block in blocks if block.prefix in sources]
    around = unconverted.notes(file.path, names, layouts, carried)
    return (*around, *attended.notes_with_positions(file, chosen, heads))


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
    fold_scale: bool = False,
    fill_bias: str | None = None,
    like: str | os.PathLike[str] | None = None,
    force: bool = False,
    shard_size: int | None = None,
    resume: bool = False,
    part: tuple[int, int] | None = None,
    digest: str | None = "fast",
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Converts a checkpoint: attention to another layout, other layers to its framework.

    A tensor that is not understood is copied under its name, or raises; no tensor is dropped.
    Tensors are read and written one by one, so memory holds the largest tensor and a few blocks.
    The destination appears in one atomic step at the end: an error leaves no new file, and an old
    file unchanged.

    Args:
      source: a path that `checkpoint.open` reads; nothing in it is executed.
      destination: its suffix names the format; NAME.safetensors.index.json writes shards.
      to: name of the layout, as in `jaxmha inspect --layouts`; None without a plan copies every
        tensor under its name, to another format, and takes no options of layouts.
      from_: converts only blocks of this layout and copies all other tensors.
      num_heads: for layouts without the head count; default: the config.json next to the source.
      dtype: casts every floating tensor; one of `DTYPES`.
      others: "pass" copies tensors that are not understood, "refuse" raises for them.
      attention_only: converts attention and copies all other tensors.
      plan: a plan for this source; the arguments `to` to `attention_only`, `fold_scale` and
        `fill_bias` are then ignored.
      fold_scale: if the target layout has another logit scale than a block, such as T5's 1,
        multiplies the queries to compensate. This is exact if the factor is a power of two;
        otherwise a note says so.
      fill_bias: "zeros" adds biases of zeros that the target layout requires and a block lacks.
      like: for a .weights.h5 destination: a file that the Keras model itself saved. Each layer is
        written to the group that the layer of the same name has in this file.
      force: overwrites an existing destination.
      shard_size: most bytes of each shard file, if the destination is an index.
      resume: for shards: keeps complete shards after an interruption, and continues with the shards
        that an earlier run of the same conversion has left.
      part: `(i, n)`, with `resume`: writes only every n-th shard (see `checkpoint.write`).
      digest: algorithm of the digest stored per tensor: "fast", "xxh3_128", "sha256" or None.
      progress: called as progress(done, total) with the bytes written and read back.

    Raises:
      CheckpointError: a file cannot be read or written.
      ValueError: the source has no block; the layout is unknown or cannot hold a block; a head
        count is missing; or the plan is for another source.
    """
    if to is None and plan is None:
        options = {"from_": from_, "num_heads": num_heads, "attention_only": attention_only}
        options |= {"others": others != "pass", "fold_scale": fold_scale, "fill_bias": fill_bias}
        if wrong := [name for name, value in (options | {"like": like}).items() if value]:
            raise ValueError(f"{', '.join(wrong)}: only with a layout, and to= is not given")
        return containers.copy(
            source,
            destination,
            dtype=dtype,
            force=force,
            shard_size=shard_size,
            resume=resume,
            part=part,
            digest=digest,
            progress=progress,
        )
    in_file, given = str(destination).endswith(".weights.h5"), plan is not None
    if like is not None:
        check_like(destination, like, given)
    with hf_config.read_once(), checkpoint.open(source, dequantise=True, unbox=True) as file:
        refuse_another_checkpoint(Path(source), file.path, Path(destination))
        read = file.files if like is None else (*file.files, Path(like))
        text = "" if resume else None
        writer.check_destination(destination, force, read, shard_size, resume=text, part=part)
        if plan is not None:
            plan, description = _completed(plan, file, in_file)
        else:
            assert to is not None
            made_plan, description = _make(
                file, to, from_, num_heads, dtype, others, attention_only, in_file
            )
            plan = replace(made_plan, fold_scale=fold_scale, fill_bias=fill_bias)
        if like is not None:
            plan = taken_from(plan, file, like)
        groups = keras_order.kept(file, plan.steps)
        of_given = description if given else None
        found = _resolved(plan, file, in_file, of_given, like is not None, bool(groups))
        ordered = like is not None or given or (bool(groups) and file.ordered)
        ordered = ordered or not in_file or keras_order.order_is_evident(plan.steps, file.info)
        settings, lost = destination_metadata.settings(
            destination, plan, found, file, groups, description.heads
        )
        settings |= {"ordered": ordered} if in_file else {}
        if resume:
            settings["part"] = part
            settings["resume"] = f"{__version__} {file.digest()} {_what(plan)}"
        made = lazy_tensors.renamed(found.made, file.unboxed, destination)
        written = checkpoint.write(
            destination,
            lazy_tensors.lazy(made),
            source=read,
            force=force,
            dtype=plan.dtype,
            overflow="refuse",
            shard_size=shard_size,
            digest=digest,
            progress=progress,
            **settings,
        )
    unbound = [_UNBOUND] * (given and not plan.digest)
    all_notes = (*plan.notes, *unbound, *found.notes, *lost, *written.notes)
    done = conversion.of(source, destination, plan, found, written, given)
    return replace(done, notes=all_notes, unchecked=() if ordered else (keras_order.NOT_KNOWN,))


def _completed(
    plan: Plan, file: checkpoint.Checkpoint, in_file: bool
) -> tuple[Plan, described.Description]:
    """Checks a plan that the caller gave; returns it with edited modules completed.

    Also returns the description of the source.
    """
    given, plan = plan, edited.in_file(plan) if in_file else plan
    every = attention_blocks.find(shapes(file))
    check_plan(plan, file, in_file, every)
    with naming(file.path):
        description = described.of(file, every)
        plan = edited.completed(plan, attention_blocks.named(plan.to), file.info)
        plan = replace(plan, notes=edited.answered(given, plan, file, every, description))
    around = _around(plan, file, every, description.heads)
    notes = (*plan.notes, *(x for x in around if x not in plan.notes))
    return replace(plan, notes=notes), description


def _resolved(
    plan: Plan,
    file: checkpoint.Checkpoint,
    in_file: bool,
    given: described.Description | None,
    like: bool,
    kept: bool,
) -> Resolved:
    """Checks a plan against its source, and adds or drops the notes on Keras groups.

    `given`: the description of the file, if the caller passed the plan. `like`: a template gave the
    groups. `kept`: the source gave the groups.
    """
    with naming(file.path):
        found = resolve(plan, file)
        if in_file and (like or (kept and not given)):
            found.notes[:] = [note for note in found.notes if notes.CREATES not in note]
        elif in_file and not given:
            found.notes.append(notes.of_groups([step.target for step in found.blocks]))
        if given is not None:
            check_heads(found, file, given.heads)
    configured = {step.target for step, block in found.blocks.items() if block.configured}
    targets = {step.target for step, _ in found.by_step if step.kind == "attention"}
    read_back.refuse(found.made, targets, attention_blocks.named(plan.to), shapes(file), configured)
    return found


def convert_state(
    state: Mapping[str, Any],
    *,
    to: str,
    num_heads: int | None = None,
    others: str = "pass",
    attention_only: bool = False,
    fold_scale: bool = False,
    fill_bias: str | None = None,
) -> dict[str, NDArray]:
    """Converts a dict of arrays (a model in memory) as `convert` converts a file.

    Raises ValueError as `convert` does, and TypeError if `state` is not a dict but, for example, a
    module.

    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(6, 2, 5)
    >>> sorted(convert_state(layer.state_dict(), to="flax", num_heads=2))[:3]
    ['linear1/bias', 'linear1/kernel', 'linear2/bias']
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state: expected a flat dict of arrays by name, got {type(state).__name__}: of a "
            "torch module pass module.state_dict(); of other models flatten the tree of "
            "parameters, its keys joined with '/'"
        )
    memory = _Memory(states.flat(state, "/"))
    made = planning.make(
        memory,
        target_layout(attention_blocks.named(to), in_file=False),
        found=attention_blocks.find({name: array.shape for name, array in memory.items()}),
        num_heads=num_heads,
        others=others,
        attention_only=attention_only,
    )
    made = replace(made, fold_scale=fold_scale, fill_bias=fill_bias)
    return {name: to_numpy(one.load()) for name, one in resolve(made, memory).made.items()}


class _Memory(dict[str, NDArray]):
    """A state dict with the attributes of `lazy_tensors.Tensors`, which a checkpoint has too."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__({name: to_numpy(array, name) for name, array in state.items()})
        self.info: Mapping[str, Any] = self
        self.metadata: Mapping[str, str] = {}
        self.names: Mapping[str, str] = {}
        self.others: tuple[str, ...] = ()


def _what(plan: Plan) -> str:
    """Returns a plan as text, without fields that do not affect the destination."""
    return repr(replace(plan, source="", digest="", notes=(), steps=tuple(map(_bare, plan.steps))))


def _bare(step: Step) -> Step:
    return replace(step, confidence="", why="")
