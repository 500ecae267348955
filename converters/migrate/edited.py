"""Completes a plan that the user edited."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxmha import checkpoint
from jaxmha.converters import keras
from jaxmha.converters.discovery import (
    attention_blocks,
    described,
    layer_layouts,
    other_layers,
    unknown_attention,
)
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.discovery.layer_layouts import CONVENTIONS, Convention
from jaxmha.converters.discovery.user_names import target_by_name
from jaxmha.converters.layout.base import Layout
from jaxmha.converters.migrate import plans as planning
from jaxmha.converters.migrate.plans import Plan, Step, kind_in_target
from jaxmha.converters.migrate.resolved import module_of


def completed(plan: Plan, to: Layout, info: Mapping[str, Any]) -> Plan:
    """Completes every module for which the user gave only a kind, as the planner would write it.

    A tensor of kind "other" that the user turns into a layer gets the convention of the file and
    the layer's other tensors; `from` and `to` become the prefix, without the key at the end.
    """
    kinds = {kind for convention in CONVENTIONS for kind in convention.kinds}
    plan = replace(plan, steps=tuple(_reread(m, to, plan.steps) for m in plan.steps))
    named = [m for m in plan.steps if not m.layout and m.kind in kinds]
    if not named:
        return plan
    convention = layer_layouts.convention_of(to.name)
    own = [
        c
        for m in plan.steps
        if (c := layer_layouts.convention_of(m.layout)) or (c := _of(m.layout))
    ]
    steps: list[Step] = []
    taken: set[str] = set()
    for step in plan.steps:
        if set(step.tensors) & taken:
            continue
        if step not in named:
            steps.append(step)
            continue
        whole = _whole(step, plan.steps, own, info)
        taken |= set(whole.tensors)
        steps = [m for m in steps if not set(m.tensors) & set(whole.tensors)]
        if convention is not None and step.target in (*step.tensors, step.source):
            separator = other_layers.split(whole.tensors[0])[1] or "."
            target = target_by_name(whole.source, separator, convention.separator, {})
            group = _numbered(whole.kind, convention, steps)
            name = whole.source.replace("/", ".") if group else ""
            whole = replace(whole, target=group or target, name=name)
        steps.append(whole)
    return replace(plan, steps=tuple(steps))


def _reread(step: Step, to: Layout, steps: Sequence[Step]) -> Step:
    """Removes the target kind of a layer if it has other leaves than the kind that the user gave."""
    convention = layer_layouts.convention_of(to.name)
    if step.kind in ("attention", "other") or not step.becomes or convention is None:
        return step
    ours = {e.leaves[0] for c in CONVENTIONS for e in c.kinds.get(step.kind, ())}
    theirs = {entry.leaves[0] for entry in convention.kinds.get(step.becomes, ())}
    if not ours or not theirs or ours & theirs:
        return step
    target = _numbered(step.kind, convention, [m for m in steps if m is not step]) or step.target
    return replace(step, becomes="", target=target)


def _numbered(kind: str, convention: Convention, steps: Sequence[Step]) -> str:
    """Returns the next free Keras group for a kind; "" if the convention has no groups."""
    group = convention.group.get(
        layer_layouts.INSTEAD.get(kind, kind) if kind == "conv1d" else kind
    )
    if group is None:
        return ""
    taken = {step.target for step in steps}
    names = (f"layers/{group}{f'_{i}' * (i > 0)}" for i in range(len(steps) + 1))
    return next(name for name in names if name not in taken)


def in_file(plan: Plan) -> Plan:
    """Adapts a plan to a .weights.h5 destination: numbers Keras groups in the order of the plan.

    Modules for which the user gave only a kind stay unchanged, because `completed` handles them.
    Raises ValueError if Keras has no layer of a kind.
    """
    if plan.to not in keras.IN_FILE:
        return plan
    layout, attention = keras.IN_FILE[plan.to]
    counts: Counter[str] = Counter()
    steps = []
    for step in plan.steps:
        if step.kind != "other" and (step.layout or step.kind == "attention"):
            kind = step.becomes or layer_layouts.INSTEAD.get(step.kind, step.kind)
            group = (
                attention if step.kind == "attention" else layer_layouts.KERAS_FILE.group.get(kind)
            )
            if group is None:
                raise ValueError(f"module {step.source!r} of the plan: Keras has no {kind}")
            target = f"layers/{group}{f'_{counts[group]}' * (counts[group] > 0)}"
            counts[group] += 1
            name = step.name or step.target.replace("/", ".")
            step = replace(step, target=target, name=name)
        steps.append(step)
    return replace(plan, to=layout.name, steps=tuple(steps))


def answered(
    plan: Plan,
    edit: Plan,
    file: checkpoint.Checkpoint,
    found: Sequence[Block],
    description: described.Description,
) -> tuple[str, ...]:
    """Returns the notes of an edited plan: without notes that the edit resolves, with new ones.

    `plan`: the plan as given. `edit`: the same plan, completed. `found`: all attention blocks of
    the source. Notes that the planner did not write stay.
    """
    to = attention_blocks.named(plan.to)
    epsilon, unlike = description.epsilon, description.unlike
    apart = unknown_attention.find(attention_blocks.shapes(file), found)
    layers, why = planning.layers_of(
        file, found, to, unlike, description.unbiased, apart=apart, all_kinds=True
    )
    planned = {frozenset(layer.keys.values()): layer for layer in layers}
    convention = layer_layouts.convention_of(to.name)

    def notes_of(steps: Sequence[Step]) -> tuple[str, ...]:
        """Returns the notes that the planner would write about these steps."""
        modules, becomes = [], []
        carried = {x.source: why.get(x.source, "") for x in steps if x.kind == "other"}
        for step in steps:
            if step.kind in ("attention", "latent", "other") or convention is None:
                continue
            module = planned.get(frozenset(step.tensors))
            if module is None or module.kind != step.kind:
                module = module_of(step, file.info)
            modules.append(module)
            target = step.becomes or kind_in_target(module, to, convention, step.target)
            becomes.append(target)
        return planning.notes_of_layers(file, to, found, modules, becomes, carried, epsilon, unlike)

    own = planning.steps_of(layers, to, convention, file.names)
    taken = {name for step in own for name in step.tensors}
    taken |= {n for x in edit.steps if x.kind in ("attention", "latent") for n in x.tensors}
    rest = (Step("other", "", name, name, (name,)) for name in file.info if name not in taken)
    before, after = notes_of([*own, *rest]), notes_of(edit.steps)
    gone = {note for note in plan.notes if note in before and note not in after}
    left = [note for note in after if note not in before] if gone else []
    return (*(note for note in plan.notes if note not in gone), *left)


def _of(layout: str) -> Convention | None:
    return next((c for c in CONVENTIONS if c.name == layout), None)


def _whole(
    step: Step, steps: Sequence[Step], own: Sequence[Convention], info: Mapping[str, Any]
) -> Step:
    """Adds the other tensors with its prefix to a module, so that it is a layer of its kind.

    Raises ValueError if the tensors fit this kind in no convention.
    """
    prefix = other_layers.split(step.tensors[0])[0]
    same_prefix = [
        name
        for other in steps
        if other.kind in ("other", step.kind) and not other.layout
        for name in other.tensors
        if other_layers.split(name)[0] == prefix
    ]
    names = list(dict.fromkeys([*step.tensors, *same_prefix]))
    wrong = ""
    for convention in dict.fromkeys([*own, *CONVENTIONS]):
        keys = {other_layers.split(name)[2]: name for name in names}
        known = {entry.key for entry in convention.kinds.get(step.kind, ())}
        fitting = {key: name for key, name in keys.items() if key in known}
        try:
            other_layers.as_kind(prefix, step.kind, convention, fitting, info)
        except ValueError as error:
            wrong = wrong or str(error)
            continue
        if set(step.tensors) <= set(fitting.values()):
            return replace(
                step,
                layout=convention.name,
                source=prefix,
                tensors=tuple(fitting.values()),
                becomes=step.becomes.removeprefix("other"),
            )
    raise ValueError(f"module {step.source!r} of the plan is no {step.kind}: {wrong}")
