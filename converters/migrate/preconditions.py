"""Checks plans, layouts, destinations and Keras templates before anything is written."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from jaxmha import checkpoint
from jaxmha.checkpoint import CheckpointError
from jaxmha.checkpoint.formats import table
from jaxmha.converters import keras
from jaxmha.converters.discovery import attention_blocks, behaviours, head_count
from jaxmha.converters.discovery.attention_blocks import Block, shapes
from jaxmha.converters.layout import by_hand
from jaxmha.converters.layout.base import Layout
from jaxmha.converters.migrate import keras_order
from jaxmha.converters.migrate.plans import DTYPES, Plan
from jaxmha.converters.migrate.resolved import Resolved, resolve


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Prefixes the messages of ValueErrors raised inside with the path."""
    try:
        yield
    except CheckpointError:
        raise
    except head_count.UnusableConfigError:
        raise
    except ValueError as error:
        between = ", " if str(error).startswith("block ") else ": "
        raise ValueError(f"{path}{between}{error}") from error


def refuse_another_checkpoint(source: Path, found: Path, destination: Path) -> None:
    """Raises ValueError if, with the destination in it, the source folder means another checkpoint.

    `found`: the file read from the folder `source`. A comparison after the conversion opens the
    folder again, and must not read the destination instead, nor find several checkpoints.
    """
    if source == found or destination.absolute().parent.resolve() != found.parent.resolve():
        return
    try:
        after = table.file_in(found.parent, added=destination.name)
    except checkpoint.AmbiguousFile:
        after = destination
    if after != found:
        raise ValueError(
            f"{destination}: is in the source folder, which would then hold two checkpoints: name "
            f"{found} as the source, or write elsewhere"
        )


def check_plan(
    plan: Plan, file: checkpoint.Checkpoint, in_file: bool, found: Sequence[Block]
) -> None:
    """Raises ValueError if a plan is inconsistent, or for another source or kind of destination.

    `found`: all attention blocks of the source.
    """
    if target_layout(attention_blocks.named(plan.to), in_file).name != plan.to:
        raise ValueError(
            f"the plan's layout {plan.to} is not for a .weights.h5 file: name {plan.to}-file"
        )
    behaviours.refuse_unread(file, found)
    if plan.dtype is not None and plan.dtype not in DTYPES:
        raise ValueError(f"unknown dtype {plan.dtype!r}: known are {', '.join(DTYPES)}")
    for step in plan.steps:
        if step.kind in ("attention", "other") and step.becomes not in ("", step.kind):
            raise ValueError(
                f"module {step.source or '(top)'} of the plan is {step.kind!r} and cannot become "
                f"another kind, got as = {step.becomes!r}: remove that line"
            )
        if step.kind != "attention" or step.num_heads is not None:
            continue
        if not attention_blocks.named(step.layout).stores_num_heads:
            raise ValueError(
                f"module {step.source or '(top)'} of the plan lacks num_heads, which layout "
                f"{step.layout} does not store"
            )
    others = [step.source for step in plan.steps if step.kind == "other"]
    if plan.others == "refuse" and others:
        raise ValueError(
            f'the plan has others = "refuse", and a module of kind other: {others[0]!r}'
        )
    # Last, because it reads every tensor.
    if plan.digest and (digest := file.digest(plan.digest.partition(":")[0])) != plan.digest:
        raise ValueError(
            f"{file.path}: its digest is {digest}, and the plan is for {plan.source or 'a file'} "
            f"with {plan.digest}: write a new plan"
        )


def check_heads(
    found: Resolved, file: checkpoint.Checkpoint, configured: head_count.Configured | None
) -> None:
    """Raises ValueError if a plan's head count contradicts the source or its configuration."""
    all_shapes = shapes(file)
    for step, block in found.blocks.items():
        if step.num_heads is not None:
            try:
                head_count.find(block, all_shapes, step.num_heads, file.metadata, configured)
            except ValueError as error:
                raise ValueError(f"block {step.source or '(top)'}: {error}") from error


def target_layout(named: Layout, in_file: bool) -> Layout:
    """Returns the variant of a layout for a .weights.h5 destination (`in_file`), or for others.

    Raises ValueError if this destination cannot have the layout.
    """
    in_files = {name: layout for name, (layout, _) in keras.IN_FILE.items()} | by_hand.IN_FILE
    plain = {layout.name: name for name, layout in in_files.items()}
    if in_file and named.name in in_files:
        return in_files[named.name]
    if in_file and named.name not in plain:
        raise ValueError(
            f"no Keras model could load layout {named.name} from a .weights.h5 file: name "
            f"{' or '.join(keras.IN_FILE)}, dense for a class of your own, or write .safetensors, "
            ".pt or .npz"
        )
    if not in_file and named.name in plain:
        raise ValueError(
            f"layout {named.name} is how Keras names the arrays inside a .weights.h5 file: "
            f"name {plain[named.name]} for other files"
        )
    return named


def check_like(
    destination: str | os.PathLike[str], like: str | os.PathLike[str], given: bool
) -> None:
    """Raises ValueError if no groups of `like` can be taken; `given`: the caller gave a plan."""
    option = "--plan" if given else "--to"
    if not str(destination).endswith(".weights.h5"):
        raise ValueError(
            f"like= (--like) with {option} takes the groups of a .weights.h5 file, and is for a "
            f"destination named .weights.h5, got {destination}: leave out {option} to fill the arrays of "
            "the target, each matched by name and shape (in Python: jaxmha.converters.match)"
        )
    if ":" in Path(like).name and not Path(like).exists():
        raise ValueError(
            f"like= (--like) with {option} takes the groups of a file that the Keras model saved, and "
            f"{like} is no file: name the file of its save_weights, or leave out {option} to fill the "
            "model that MODULE:FUNCTION builds"
        )


def taken_from(plan: Plan, file: checkpoint.Checkpoint, like: str | os.PathLike[str]) -> Plan:
    """Returns the plan with the groups of another .weights.h5 file (`like`) of the same model.

    Raises ValueError if `like` is no such file, or its arrays differ in names or shapes.
    """
    with checkpoint.open(like) as template:
        if template.format not in ("keras_h5", "keras"):
            raise ValueError(f"--like: {like} is no .weights.h5 file but {template.format}")
        ordered = replace(plan, steps=keras_order.like(plan.steps, file, template))
        with naming(file.path):
            keras_order.refuse_unlike(resolve(ordered, file).made, template)
        return ordered
