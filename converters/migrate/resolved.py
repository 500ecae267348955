"""Checks a plan against its source, and makes every lazy tensor of the destination."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxmha.checkpoint.errors import listed, printable
from jaxmha.converters.discovery import (
    adapters,
    attention_blocks,
    behaviours,
    latent_blocks,
    layer_layouts,
    notes,
    other_layers,
    stored_semantics,
)
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.discovery.latent_blocks import LatentBlock
from jaxmha.converters.discovery.layer_layouts import Convention
from jaxmha.converters.discovery.other_layers import Module
from jaxmha.converters.layout.base import Layout
from jaxmha.converters.layout.validation import several_dtypes
from jaxmha.converters.migrate import latent_tensors, lazy_tensors, of_optimizers
from jaxmha.converters.migrate.lazy_tensors import Made, Tensors
from jaxmha.converters.migrate.plans import Plan, Step, in_file, kind_in_target


class Resolved(NamedTuple):
    """A checked plan with every lazy tensor of the destination.

    `made` maps destination names to tensors; `by_step` lists each step with its part of `made`;
    `blocks` maps attention steps to blocks of the source. By destination prefix, `latents` has the
    blocks of latent attention, `counts` the head counts, and `names` the names of Keras layers.
    """

    made: dict[str, Made]
    by_step: list[tuple[Step, dict[str, Made]]]
    blocks: dict[Step, Block]
    latents: dict[str, LatentBlock]
    counts: dict[str, int]
    names: dict[str, str]
    notes: list[str]


def resolve(plan: Plan, file: Tensors) -> Resolved:
    """Checks every layer of a plan, and returns the tensors of the destination.

    Raises:
      ValueError: a planned tensor is not in the source; a source tensor is in no step, or in two;
        a step takes an adapter, such as LoRA, for a layer; arrays do not fit their kind; the layout
        cannot hold them; two tensors get one name; or the state of an optimizer would no longer fit
        the weights.
    """
    to = plan.layout
    convention = layer_layouts.convention_of(to.name)
    used = Counter(name for step in plan.steps for name in step.tensors)
    if unknown := [name for name in used if name not in file.info]:
        raise ValueError(f"the plan names {unknown[0]!r}, which the source does not have")
    if twice := [name for name, count in used.items() if count > 1]:
        raise ValueError(f"the plan has {twice[0]!r} in {used[twice[0]]} modules: leave it in one")
    if dropped := [name for name in file.info if name not in used]:
        raise ValueError(
            f"the plan leaves out {len(dropped)} tensors, {dropped[0]!r} the first: nothing is "
            'dropped; carry them over in a module of kind = "other"'
        )
    of_optimizers.refuse_rounding(file, plan.dtype)
    source_blocks = _blocks(plan, file)
    is_latent = any(step.kind == "latent" for step in plan.steps)
    latents = {x.prefix: x for x in latent_blocks.find(file)} if is_latent else {}
    parts = lazy_tensors.Parts(file)
    found = Resolved({}, [], {}, {}, {}, {}, [])
    for step in plan.steps:
        try:
            if step.kind != "other":
                adapters.refuse(step.tensors)
            if step.kind == "attention":
                block = source_blocks.get((step.layout, step.source, frozenset(step.tensors)))
                made = _attention(step, block, to, file, parts, found, plan)
            elif step.kind == "latent":
                made = _latent(step, latents, to, file, parts)
                found.latents[step.target] = latents[step.source]
            else:
                made = _other_layer(step, to, convention, file, parts)
        except ValueError as error:
            what = "block" if step.kind == "attention" else step.kind
            raise ValueError(printable(f"{what} {step.source or '(top)'}: {error}")) from error
        if clash := sorted(found.made.keys() & made.keys()):
            raise ValueError(
                f"two tensors would be written as {clash[0]!r}: rename one in the source, or in a plan"
            )
        found.made.update(made)
        found.by_step.append((step, made))
        if step.name:
            found.names[step.target] = step.name
    found.notes.extend(_of_heads(found, file))
    copied = [step.source for step in plan.steps if step.kind == "other"]
    if plan.to:  # otherwise no weight is converted, which the state would no longer fit
        found.notes.extend(of_optimizers.left_behind(file, copied))
    if in_file(to):
        layers = [(step.source, step.target) for step in plan.steps if step.kind != "other"]
        found.notes.extend(notes.order_of_creation(layers))
    if file.others:
        if plan.others == "refuse":
            raise ValueError(
                f"not tensors: {listed(file.others)}; --others pass leaves them out, with a note"
            )
        found.notes.append(f"not carried over, because they are not tensors: {listed(file.others)}")
    return found


def _of_heads(found: Resolved, file: Tensors) -> Iterator[str]:
    """Yields a note if blocks of equal shapes have different head counts."""
    alike: dict[Any, dict[str, int]] = {}
    for step, block in found.blocks.items():
        shapes = tuple(tuple(file.info[name].shape) for name in block.keys.values())
        counts = alike.setdefault((block.layout.name, shapes), {})
        counts[step.source or "(top)"] = found.counts[step.target]
    for counts in alike.values():
        if len(set(counts.values())) > 1:
            shown = [f"{name} {count}" for name, count in counts.items()]
            yield f"blocks of the same shapes have different head counts: {listed(shown)}"


def _blocks(plan: Plan, file: Tensors) -> dict[tuple[str, str, frozenset[str]], Block]:
    """Finds the source blocks of the layouts in a plan: (layout, prefix, tensors) -> block."""
    layouts = dict.fromkeys(step.layout for step in plan.steps if step.kind == "attention")
    return {
        (name, block.prefix, frozenset(block.keys.values())): block
        for name in layouts
        for block in behaviours.blocks(file, [attention_blocks.named(name)])
    }


def _attention(
    step: Step,
    block: Block | None,
    to: Layout,
    file: Tensors,
    parts: lazy_tensors.Parts,
    found: Resolved,
    plan: Plan,
) -> dict[str, Made]:
    """Returns the tensors of an attention block; adds block, head count and notes to `found`."""
    if block is None:
        raise ValueError(f"its tensors are no block of layout {step.layout} under that prefix")
    to = stored_semantics.target(to, block, file.metadata)
    made, params, changes = lazy_tensors.attention(
        block,
        file.info,
        parts,
        to,
        step.target,
        step.num_heads,
        plan.fold_scale,
        plan.fill_bias,
    )
    found.notes.extend(change for change in changes if change not in found.notes)
    if to.name.endswith("-file") and (lead := np.shape(params.query.kernel)[:-3]):
        raise ValueError(
            f"its arrays are stacked layers (leading axes {lead}), and Keras has none: its files "
            "keep one group per layer; unstack every tensor of the file, or write .safetensors, "
            ".pt or .npz"
        )
    found.blocks[step] = block
    found.counts[step.target] = np.shape(params.query.kernel)[-2]
    if not plan.dtype and (mixed := several_dtypes(params)):
        found.notes.append(f"{step.target or '(top)'} keeps several dtypes: {mixed}")
    return made


def _latent(
    step: Step,
    latents: Mapping[str, LatentBlock],
    to: Layout,
    file: Tensors,
    parts: lazy_tensors.Parts,
) -> dict[str, Made]:
    """Returns the tensors of a block of latent attention."""
    block = latents.get(step.source)
    if block is None or set(block.keys.values()) != set(step.tensors) or block.form != step.layout:
        raise ValueError(f"its tensors are no latent attention of layout {step.layout} there")
    return latent_tensors.made(block, file.info, parts, to.name, step.target)


def _other_layer(
    step: Step, to: Layout, convention: Convention | None, file: Tensors, parts: lazy_tensors.Parts
) -> dict[str, Made]:
    """The tensors of a layer or tensor other than attention."""
    if step.kind == "other":
        if len(step.tensors) != 1:
            raise ValueError(f"a module of kind other has one tensor, got {len(step.tensors)}")
        if step.tensors != (step.source,):
            raise ValueError(f"`from` must be the name of its tensor, {step.tensors[0]!r}")
        return {step.target: lazy_tensors.other(parts, file.info, step.tensors[0])}
    if convention is None:
        raise ValueError(
            f"layout {to.name} belongs to no framework with other layers: kind must be other"
        )
    module = module_of(step, file.info)
    becomes = step.becomes or kind_in_target(module, to, convention, step.target)
    if becomes not in convention.kinds:
        raise ValueError(
            f"{convention.name} has no {becomes}: it has {', '.join(convention.kinds)}"
        )
    return lazy_tensors.other_layer(module, file.info, parts, convention, becomes, step.target)


def module_of(step: Step, info: Mapping[str, Any]) -> Module:
    """Returns the `Module` of a planned layer, with sizes from the shapes in `info`.

    Raises ValueError if a tensor has another prefix, or does not fit the kind of layer.
    """
    convention = layer_layouts.named(step.layout)
    keys = {}
    for name in step.tensors:
        prefix, _, key = other_layers.split(name)
        if prefix != step.source:
            raise ValueError(f"{name} is not under {step.source or '(top)'}")
        keys[key] = name
    return other_layers.as_kind(step.source, step.kind, convention, keys, info)
