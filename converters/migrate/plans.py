"""What a conversion will do to every tensor: a plan, which is data until `resolved` checks it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jaxmha.converters import keras
from jaxmha.converters.discovery import (
    attention_blocks,
    family_keymaps,
    head_count,
    hf_config,
    layer_layouts,
    layer_order,
    model_families,
    notes,
    other_layers,
    user_names,
)
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.discovery.layer_layouts import Convention
from jaxmha.converters.discovery.notes import listed
from jaxmha.converters.discovery.other_layers import Module
from jaxmha.converters.layout import registry
from jaxmha.converters.layout.base import Layout
from jaxmha.converters.migrate import read_back
from jaxmha.converters.migrate.lazy_tensors import Tensors

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


def make(
    file: Tensors,
    to: Layout,
    *,
    from_: Layout | None = None,
    num_heads: int | None = None,
    others: str = "pass",
    attention_only: bool = False,
    configured: head_count.Configured | None = None,
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
    known = registry.LAYOUTS if from_ is None else [from_]
    found = attention_blocks.find(shapes, known)
    if broken := attention_blocks.damaged(shapes, found, known):
        raise ValueError(
            f"{broken[0]}; with --from it is carried over as it is, where another layout is named"
        )
    convention = layer_layouts.beside(to.name)
    layers, why = other_layers.find(file.info, found, unlike or {}, unbiased)
    if convention is not None and layer_layouts.tells_norms(convention):
        unsure = [layer for layer in layers if layer.confidence == "ambiguous"]
        why |= {name: other_layers.UNSURE for layer in unsure for name in layer.keys.values()}
        layers = [layer for layer in layers if layer.confidence != "ambiguous"]
    if from_ is not None or attention_only or convention is None:
        layers = []
    elif not in_file(to):  # which numbers its groups
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
    if in_file(to):  # which Keras numbers
        place = layer_order.of_source(file.info)
        found = sorted(found, key=lambda block: place(block.prefix))
        layers = sorted(layers, key=lambda layer: place(layer.prefix))
    moved: list[Move] = []
    for i, block in enumerate(found):
        given = head_count.by_default(block, num_heads, configured) if draft else num_heads
        count = head_count.find(block, shapes, given, file.metadata, configured)
        moved.append(_attention(block, to, file.names, i, count, configured))
    numbers: Counter[str] = Counter()
    beside = []
    for layer in layers:
        assert convention is not None
        beside.append(_neighbour(layer, to, convention, file.names, numbers))
    others_moved = (
        Move("other", "", name, name, (name,), "other", why=why.get(name, "left as it is"))
        for name in rest
    )
    moved += [*beside, *others_moved]
    mistakable = read_back.mistakable(file.info, rest, found, to)
    carried = {name: why.get(name, "") for name in rest}
    reasons = [*(unlike or {}).values(), other_layers.UNSURE]
    said = (
        *[notes.NO_ATTENTION] * (not found),
        *notes.epsilons(layers, convention, found, epsilon),
        *notes.told_by_name(layers),
        *notes.of_features(layers),
        *notes.renamed(_renamed(moved, file.names) if not in_file(to) else ()),
        *notes.not_back(layers, [move.becomes for move in beside], mistakable, to.name),
        *notes.carried_norms(carried, reasons),
    )
    return Plan(to.name, tuple(moved), others, notes=said)


def _attention(
    block: Block,
    to: Layout,
    names: Mapping[str, str],
    i: int,
    count: tuple[int | None, str],
    configured: head_count.Configured | None,
) -> Move:
    """The move of the i-th block; `count` is its head count, and where that is from."""
    separator = block.layout.separator
    if group := in_file(to):
        target = f"layers/{group}{f'_{i}' * (i > 0)}"
        name = user_names.dotted(block.prefix, separator, names)
    else:
        target = user_names.target_by_name(block.prefix, separator, to.separator, names)
        name = ""
    return Move(
        "attention",
        block.layout.name,
        block.prefix,
        target,
        tuple(block.keys.values()),
        "attention",
        count[0],
        name,
        count[1],
        confidence(block, count[1], configured),
        block.why,
    )


def _renamed(planned: Sequence[Move], names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Path in the source and in the target of every layer that is called otherwise there."""
    for move in planned:
        if user_names.of_layer(move.source, names) != move.source:
            yield move.source, move.target


def confidence(
    block: Block, heads_from: str = "", configured: head_count.Configured | None = None
) -> str:
    """How sure the reading of a block is: its place decides, its keys, or neither.

    A head count that only a configuration has is certain where that names the block's family.

    >>> confidence(Block("h.0.attn", blocks.named("gpt2"), {}))
    'likely'
    """
    if block.family:
        told = heads_from.startswith(hf_config.CONFIG)
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
    separator = other_layers.split(next(iter(layer.keys.values())))[1] or layer.convention.separator
    numbered = convention.group and in_file(to)
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
    there = {family.name for family in model_families.FAMILIES if family.layout == to.name}
    named = family_keymaps.kind_at(prefix, there)
    wanted = [named[0]] if named else []
    # GPT-2's own becomes Linear, and one that a plan names.
    own = layer.why.startswith(("the place of", "named"))
    if layer.kind != "conv1d" or to.name == "gpt2" or not own:
        wanted.append(layer.kind)
    wanted.append(layer_layouts.INSTEAD.get(layer.kind, layer.kind))
    for kind in wanted:
        if leaves <= {e.leaves[0] for e in convention.kinds.get(kind, ())}:
            return kind
    raise ValueError(f"{layer.prefix}: {convention.name} has no place for a {layer.kind}")


def in_file(to: Layout) -> str:
    """The group of a .weights.h5 file that holds the layout; empty for other layouts."""
    return {layout.name: group for layout, group in keras.IN_FILE.values()}.get(to.name, "")
