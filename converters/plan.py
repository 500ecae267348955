"""What a conversion will do to every tensor: a plan, which is data until `resolve` checks it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxmha.converters import (
    blocks,
    configuration,
    families,
    heads,
    keras,
    keymaps,
    modules,
    moves,
    neighbours,
    notes,
    order,
    read_back,
    user_names,
)
from jaxmha.converters.blocks import Block
from jaxmha.converters.checkpoint.errors import printable
from jaxmha.converters.layout import Layout
from jaxmha.converters.modules import Module
from jaxmha.converters.moves import Made, Tensors
from jaxmha.converters.neighbours import Convention
from jaxmha.converters.notes import listed
from jaxmha.converters.refusals import several_dtypes

OTHERS = ("pass", "refuse")
DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Move:
    """One layer of the source, and what becomes of it.

    Attributes:
      kind: "attention", a kind of `neighbours`, or "other": carried over as it is.
      layout: of attention, or the convention of a neighbour; "" for others.
      source, target: prefixes; the names themselves for others.
      tensors: every name of the source that belongs to it.
      becomes: the kind in the target.
      num_heads: of attention; `heads_from` says where it is from. name: what a .weights.h5 file keeps as the layer's name.
      confidence, why: of the reading; like `heads_from` not read back from a file.
    """

    kind: str
    layout: str
    source: str
    target: str
    tensors: tuple[str, ...]
    becomes: str = ""
    num_heads: int | None = None
    name: str = ""
    heads_from: str = field(default="", compare=False)
    confidence: str = field(default="", compare=False)
    why: str = field(default="", compare=False)


@dataclass(frozen=True)
class Plan:
    """What happens to every tensor of one source.

    Attributes:
      to: layout of attention in the destination; neighbours are written as its framework does.
      others: "pass" carries over what is not understood, "refuse" raises for it.
      dtype: every floating tensor is cast to it; None: as it is.
      source, digest: the file the plan is for; its contents' SHA-256, "" where it was not asked for.
      fold_scale: queries are multiplied so that the layout's own scale gives the same (`fold`).
      notes: what the tensors do not say, such as the epsilon of norms.
    """

    to: str
    moves: tuple[Move, ...]
    others: str = "pass"
    dtype: str | None = None
    source: str = ""
    digest: str = ""
    fold_scale: bool = False
    notes: tuple[str, ...] = field(default=(), compare=False)


class Resolved(NamedTuple):
    """A plan, checked against its source: every tensor of the destination, ready to be computed.

    `made` is by name, `by_move` the same by move; `blocks` are those of the source; `counts` are
    head counts by prefix of the destination, `names` those of Keras layers.
    """

    made: dict[str, Made]
    by_move: list[tuple[Move, dict[str, Made]]]
    blocks: dict[Move, Block]
    counts: dict[str, int]
    names: dict[str, str]
    notes: list[str]


def make(
    file: Tensors,
    to: Layout,
    *,
    from_: Layout | None = None,
    num_heads: int | None = None,
    others: str = "pass",
    attention_only: bool = False,
    configured: heads.Configured | None = None,
    epsilon: notes.Epsilons = notes.Epsilons(),
    unlike: Mapping[str, str] | None = None,
    unbiased: str = "",
    draft: bool = False,
) -> Plan:
    """The plan for a source, with everything that is found in it.

    `configured`, `epsilon`, `unlike` and `unbiased` are what the configuration says (`heads`, `configuration`).
    `draft`: it is to be edited, so that `num_heads` is for blocks that nothing else tells it of.

    Raises:
      ValueError: a damaged block, a head count that is not known, or, with `others="refuse"`,
        tensors that are not understood.
    """
    shapes = {name: tuple(one.shape) for name, one in file.info.items()}
    known = blocks.LAYOUTS if from_ is None else [from_]
    found = blocks.find(shapes, known)
    if broken := blocks.damaged(shapes, found, known):
        raise ValueError(
            f"{broken[0]}; with --from it is carried over as it is, where another layout is named"
        )
    convention = neighbours.beside(to.name)
    layers, why = modules.find(file.info, found, unlike or {}, unbiased)
    if convention is not None and neighbours.tells_norms(convention):
        unsure = [layer for layer in layers if layer.confidence == "ambiguous"]
        why |= {name: modules.UNSURE for layer in unsure for name in layer.keys.values()}
        layers = [layer for layer in layers if layer.confidence != "ambiguous"]
    if from_ is not None or attention_only or convention is None:
        layers = []
    elif not _in_file(to):  # which numbers its groups
        planned = [_neighbour(x, to, convention, file.names, Counter()) for x in layers]
        targets = [(move.target, move.becomes) for move in planned]
        alike = read_back.like_attention(layers, targets, convention, file)
        why |= alike
        layers = [x for x in layers if not alike.keys() & x.keys.values()]
    taken = {name for block in found for name in block.keys.values()}
    taken |= {name for layer in layers for name in layer.keys.values()}
    rest = [name for name in file.info if name not in taken]
    if rest and others == "refuse":
        shown = [f"{name} ({why.get(name, 'left as it is')})" for name in rest]
        raise ValueError(
            f"not understood: {listed(shown, separator='; ')}; --others pass carries them over as they are"
        )
    if _in_file(to):  # which Keras numbers
        place = order.of_source(file.info)
        found = sorted(found, key=lambda block: place(block.prefix))
        layers = sorted(layers, key=lambda layer: place(layer.prefix))
    mistakable = read_back.mistakable(file.info, rest, found, to)
    planned = []
    for i, block in enumerate(found):
        given = heads.by_default(block, num_heads, configured) if draft else num_heads
        count, where = heads.find(block, shapes, given, file.metadata, configured)
        planned.append(
            Move(
                "attention",
                block.layout.name,
                block.prefix,
                user_names.target_by_name(
                    block.prefix, block.layout.separator, to.separator, file.names
                )
                if not _in_file(to)
                else f"layers/{_in_file(to)}{f'_{i}' * (i > 0)}",
                tuple(block.keys.values()),
                "attention",
                count,
                user_names.dotted(block.prefix, block.layout.separator, file.names)
                * bool(_in_file(to)),
                where,
                confidence(block, where, configured),
                block.why,
            )
        )
    numbers: Counter[str] = Counter()
    beside = []
    for layer in layers:
        assert convention is not None
        beside.append(_neighbour(layer, to, convention, file.names, numbers))
    planned += beside
    planned += [
        Move("other", "", name, name, (name,), "other", why=why.get(name, "left as it is"))
        for name in rest
    ]
    return Plan(
        to.name,
        tuple(planned),
        others,
        notes=(
            *[notes.NO_ATTENTION] * (not found),
            *notes.epsilons(layers, convention, found, epsilon),
            *notes.told_by_name(layers),
            *notes.renamed(_renamed(planned, file.names) if not _in_file(to) else ()),
            *notes.not_back(layers, [move.becomes for move in beside], mistakable, to.name),
            *notes.carried_norms(
                {name: why.get(name, "") for name in rest},
                [*(unlike or {}).values(), modules.UNSURE],
            ),
        ),
    )


def _renamed(planned: Sequence[Move], names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Path in the source and in the target of every layer that is called otherwise there."""
    for move in planned:
        if user_names.of_layer(move.source, names) != move.source:
            yield move.source, move.target


def confidence(
    block: Block, heads_from: str = "", configured: heads.Configured | None = None
) -> str:
    """How sure the reading of a block is: its place decides, its keys, or neither.

    A head count that only a configuration has is certain where that names the block's family.

    >>> confidence(Block("h.0.attn", blocks.named("gpt2"), {}))
    'likely'
    """
    if block.family:
        told = heads_from.startswith(configuration.CONFIG)
        named = configured is not None and block.family[0] in configured.families
        return "certain" if named or not told else "likely"
    return "ambiguous" if block.also else "likely"


def _neighbour(
    layer: Module,
    to: Layout,
    convention: Convention,
    names: Mapping[str, str],
    numbers: Counter[str],
) -> Move:
    separator = modules.split(next(iter(layer.keys.values())))[1] or layer.convention.separator
    numbered = convention.group and _in_file(to)
    if numbered:
        kind = kind_there(layer, to, convention, layer.prefix)
        group = convention.group[kind]
        target = f"layers/{group}{f'_{numbers[group]}' * (numbers[group] > 0)}"
        numbers[group] += 1
    else:
        target = user_names.target_by_name(layer.prefix, separator, convention.separator, names)
        kind = kind_there(layer, to, convention, target)
    return Move(
        layer.kind,
        layer.convention.name,
        layer.prefix,
        target,
        tuple(layer.keys.values()),
        kind,
        None,
        user_names.dotted(layer.prefix, separator, names) * bool(numbered),
        confidence=layer.confidence,
        why=layer.why,
    )


def kind_there(layer: Module, to: Layout, convention: Convention, prefix: str) -> str:
    """The kind in the target: what its family has at that place, else the ordinary one."""
    leaves = set(layer.entries)
    there = {family.name for family in families.FAMILIES if family.layout == to.name}
    named = keymaps.kind_at(prefix, there)
    wanted = [named[0]] if named else []
    if layer.kind != "conv1d" or to.name == "gpt2" or not layer.why.startswith("the place of"):
        wanted.append(layer.kind)  # GPT-2's own becomes Linear
    wanted.append(neighbours.INSTEAD.get(layer.kind, layer.kind))
    for kind in wanted:
        if leaves <= {e.leaves[0] for e in convention.kinds.get(kind, ())}:
            return kind
    raise ValueError(f"{layer.prefix}: {convention.name} has no place for a {layer.kind}")


def _in_file(to: Layout) -> str:
    """The group of a .weights.h5 file that holds the layout; empty for other layouts."""
    return {layout.name: group for layout, group in keras.IN_FILE.values()}.get(to.name, "")


def resolve(plan: Plan, file: Tensors) -> Resolved:
    """Every tensor of the destination, after every path of the plan has been checked.

    Raises:
      ValueError: a tensor of the source that is not there, is in no move or in two; arrays that
        are not of their kind; a layout that cannot hold them; a name that is written twice.
    """
    to = blocks.named(plan.to)
    convention = neighbours.beside(to.name)
    used = Counter(name for move in plan.moves for name in move.tensors)
    if unknown := [name for name in used if name not in file.info]:
        raise ValueError(f"the plan names {unknown[0]!r}, which the source does not have")
    if twice := [name for name, count in used.items() if count > 1]:
        raise ValueError(f"the plan has {twice[0]!r} in {used[twice[0]]} modules: leave it in one")
    if dropped := [name for name in file.info if name not in used]:
        raise ValueError(
            f"the plan leaves out {len(dropped)} tensors, {dropped[0]!r} the first: nothing is "
            'dropped; carry them over in a module of kind = "other"'
        )
    there = _blocks(plan, file.info)
    parts = moves.Parts(file)
    found = Resolved({}, [], {}, {}, {}, [])
    for move in plan.moves:
        try:
            if move.kind == "attention":
                block = there.get((move.layout, move.source, frozenset(move.tensors)))
                made = _attention(
                    move, block, to, file, parts, found, plan.fold_scale, bool(plan.dtype)
                )
            else:
                made = _beside(move, to, convention, file, parts)
        except ValueError as error:
            what = "block" if move.kind == "attention" else move.kind
            raise ValueError(printable(f"{what} {move.source or '(top)'}: {error}")) from error
        if clash := sorted(found.made.keys() & made.keys()):
            raise ValueError(
                f"two tensors would be written as {clash[0]!r}: rename one in the source, or in a plan"
            )
        found.made.update(made)
        found.by_move.append((move, made))
        if move.name:
            found.names[move.target] = move.name
    found.notes.extend(_of_heads(found, file))
    if _in_file(to):
        layers = [(move.source, move.target) for move in plan.moves if move.kind != "other"]
        found.notes.extend(notes.order_of_creation(layers))
    if file.others:
        if plan.others == "refuse":
            raise ValueError(
                f"not tensors: {listed(file.others)}; --others pass leaves them out, with a note"
            )
        found.notes.append(f"not carried over, since they are no tensors: {listed(file.others)}")
    return found


def _of_heads(found: Resolved, file: Tensors) -> Iterator[str]:
    """A note where blocks that look alike have different head counts."""
    alike: dict[Any, dict[str, int]] = {}
    for move, block in found.blocks.items():
        shapes = tuple(tuple(file.info[name].shape) for name in block.keys.values())
        counts = alike.setdefault((block.layout.name, shapes), {})
        counts[move.source or "(top)"] = found.counts[move.target]
    for counts in alike.values():
        if len(set(counts.values())) > 1:
            shown = [f"{name} {count}" for name, count in counts.items()]
            yield f"blocks of the same shapes have different head counts: {listed(shown)}"


def _blocks(plan: Plan, info: Mapping[str, Any]) -> dict[tuple[str, str, frozenset[str]], Block]:
    """Every block of the layouts that a plan names, by layout, prefix and tensors."""
    shapes = {name: tuple(one.shape) for name, one in info.items()}
    layouts = dict.fromkeys(move.layout for move in plan.moves if move.kind == "attention")
    return {
        (name, block.prefix, frozenset(block.keys.values())): block
        for name in layouts
        for block in blocks.find(shapes, [blocks.named(name)])
    }


def _attention(
    move: Move,
    block: Block | None,
    to: Layout,
    file: Tensors,
    parts: moves.Parts,
    found: Resolved,
    fold_scale: bool,
    cast: bool,
) -> dict[str, Made]:
    """The tensors of an attention block; its head count and notes go to `found`."""
    if block is None:
        raise ValueError(f"its tensors are no block of layout {move.layout} under that prefix")
    made, params, folded = moves.attention(
        block, file.info, parts, to, move.target, move.num_heads, fold_scale
    )
    if folded and folded not in found.notes:
        found.notes.append(folded)
    if to.name.endswith("-file") and (lead := np.shape(params.query.kernel)[:-3]):
        raise ValueError(
            f"its arrays are stacked layers (leading axes {lead}), and Keras has none: its files "
            "keep one group per layer; unstack every tensor of the file, or write .safetensors, "
            ".pt or .npz"
        )
    found.blocks[move] = block
    found.counts[move.target] = np.shape(params.query.kernel)[-2]
    if not cast and (mixed := several_dtypes(params)):
        found.notes.append(f"{move.target or '(top)'} keeps several dtypes: {mixed}")
    return made


def _beside(
    move: Move, to: Layout, convention: Convention | None, file: Tensors, parts: moves.Parts
) -> dict[str, Made]:
    """The tensors of what is no attention."""
    if move.kind == "other":
        if len(move.tensors) != 1:
            raise ValueError(f"a module of kind other has one tensor, got {len(move.tensors)}")
        if move.tensors != (move.source,):
            raise ValueError(f"`from` must be the name of its tensor, {move.tensors[0]!r}")
        return {move.target: moves.other(parts, file.info, move.tensors[0])}
    if convention is None:
        raise ValueError(f"layout {to.name} stands in files of no framework: kind must be other")
    module = module_of(move, file.info)
    becomes = move.becomes or kind_there(module, to, convention, move.target)
    if becomes not in convention.kinds:
        raise ValueError(
            f"{convention.name} has no {becomes}: it has {', '.join(convention.kinds)}"
        )
    return moves.neighbour(module, file.info, parts, convention, becomes, move.target)


def module_of(move: Move, info: Mapping[str, Any]) -> Module:
    """The neighbour of a move, from the shapes of the source."""
    convention = neighbours.named(move.layout)
    keys = {}
    for name in move.tensors:
        prefix, _, key = modules.split(name)
        if prefix != move.source:
            raise ValueError(f"{name} is not under {move.source or '(top)'}")
        keys[key] = name
    return modules.as_kind(move.source, move.kind, convention, keys, info)
