"""Completes a plan after its user edited it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxmha.converters import keras
from jaxmha.converters.discovery import layer_layouts, other_layers
from jaxmha.converters.discovery.layer_layouts import CONVENTIONS, Convention
from jaxmha.converters.discovery.user_names import target_by_name
from jaxmha.converters.layout.base import Layout
from jaxmha.converters.migrate.plans import Move, Plan


def completed(plan: Plan, to: Layout, info: Mapping[str, Any]) -> Plan:
    """Fills in every module to which the user gave only a kind, as if it had been discovered.

    A carried-over tensor that the user makes a linear layer or an embedding gets the convention of
    its file, loses the key at the end of `from` and `to`, and takes the other tensors of the layer
    along.
    """
    kinds = {kind for convention in CONVENTIONS for kind in convention.kinds}
    plan = replace(plan, moves=tuple(_reread(m, to, plan.moves) for m in plan.moves))
    named = [m for m in plan.moves if not m.layout and m.kind in kinds]
    if not named:
        return plan
    convention = layer_layouts.beside(to.name)
    own = [c for m in plan.moves if (c := layer_layouts.beside(m.layout)) or (c := _of(m.layout))]
    moves: list[Move] = []
    taken: set[str] = set()
    for move in plan.moves:
        if set(move.tensors) & taken:
            continue
        if move not in named:
            moves.append(move)
            continue
        whole = _whole(move, plan.moves, own, info)
        taken |= set(whole.tensors)
        moves = [m for m in moves if not set(m.tensors) & taken]
        if convention is not None and move.target in (*move.tensors, move.source):
            separator = other_layers.split(whole.tensors[0])[1] or "."
            there = target_by_name(whole.source, separator, convention.separator, {})
            group = _numbered(whole.kind, convention, moves)
            name = whole.source.replace("/", ".") if group else ""
            whole = replace(whole, target=group or there, name=name)
        moves.append(whole)
    return replace(plan, moves=tuple(moves))


def _reread(move: Move, to: Layout, moves: Sequence[Move]) -> Move:
    """Drops the old target kind of a layer whose kind the user changed."""
    convention = layer_layouts.beside(to.name)
    if move.kind in ("attention", "other") or not move.becomes or convention is None:
        return move
    ours = {e.leaves[0] for c in CONVENTIONS for e in c.kinds.get(move.kind, ())}
    theirs = {entry.leaves[0] for entry in convention.kinds.get(move.becomes, ())}
    if not ours or not theirs or ours & theirs:
        return move
    target = _numbered(move.kind, convention, [m for m in moves if m is not move]) or move.target
    return replace(move, becomes="", target=target)


def _numbered(kind: str, convention: Convention, moves: Sequence[Move]) -> str:
    """The next free group of a kind in a .weights.h5 file; "" for other conventions."""
    group = convention.group.get(
        layer_layouts.INSTEAD.get(kind, kind) if kind == "conv1d" else kind
    )
    if group is None:
        return ""
    taken = {move.target for move in moves}
    names = (f"layers/{group}{f'_{i}' * (i > 0)}" for i in range(len(moves) + 1))
    return next(name for name in names if name not in taken)


def in_file(plan: Plan) -> Plan:
    """A plan for a .weights.h5 file, with Keras groups numbered in the order of the plan."""
    if plan.to not in keras.IN_FILE:
        return plan
    layout, attention = keras.IN_FILE[plan.to]
    counts: Counter[str] = Counter()
    moves = []
    for move in plan.moves:
        if move.kind != "other":
            kind = move.becomes or layer_layouts.INSTEAD.get(move.kind, move.kind)
            group = (
                attention if move.kind == "attention" else layer_layouts.KERAS_FILE.group.get(kind)
            )
            if group is None:
                raise ValueError(f"module {move.source!r} of the plan: Keras has no {kind}")
            target = f"layers/{group}{f'_{counts[group]}' * (counts[group] > 0)}"
            counts[group] += 1
            name = move.name or move.target.replace("/", ".")
            move = replace(move, target=target, name=name)
        moves.append(move)
    return replace(plan, to=layout.name, moves=tuple(moves))


def _of(layout: str) -> Convention | None:
    return next((c for c in CONVENTIONS if c.name == layout), None)


def _whole(
    move: Move, moves: Sequence[Move], own: Sequence[Convention], info: Mapping[str, Any]
) -> Move:
    """The layer of the wanted kind that a module forms with other tensors of the same prefix."""
    prefix = other_layers.split(move.tensors[0])[0]
    beside = [
        name
        for other in moves
        if other.kind in ("other", move.kind) and not other.layout
        for name in other.tensors
        if other_layers.split(name)[0] == prefix
    ]
    names = list(dict.fromkeys([*move.tensors, *beside]))
    wrong = ""
    for convention in dict.fromkeys([*own, *CONVENTIONS]):
        keys = {other_layers.split(name)[2]: name for name in names}
        known = {entry.key for entry in convention.kinds.get(move.kind, ())}
        fitting = {key: name for key, name in keys.items() if key in known}
        try:
            other_layers.as_kind(prefix, move.kind, convention, fitting, info)
        except ValueError as error:
            wrong = wrong or str(error)
            continue
        if set(move.tensors) <= set(fitting.values()):
            return replace(
                move,
                layout=convention.name,
                source=prefix,
                tensors=tuple(fitting.values()),
                becomes=move.becomes.removeprefix("other"),
            )
    raise ValueError(f"module {move.source!r} of the plan is no {move.kind}: {wrong}")
