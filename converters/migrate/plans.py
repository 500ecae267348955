"""Makes conversion plans, which give the destination of every tensor; `resolved` checks them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jaxmha import notebook
from jaxmha.checkpoint.errors import listed
from jaxmha.converters import keras
from jaxmha.converters.discovery import (
    adapters,
    behaviours,
    damaged_blocks,
    family_keymaps,
    head_count,
    hf_config,
    latent_blocks,
    layer_layouts,
    layer_order,
    model_families,
    notes,
    other_layers,
    stored_semantics,
    unknown_attention,
    user_names,
)
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.discovery.latent_blocks import LatentBlock
from jaxmha.converters.discovery.layer_layouts import Convention
from jaxmha.converters.discovery.other_layers import Module
from jaxmha.converters.layout import latent_forms, registry
from jaxmha.converters.layout.base import Layout
from jaxmha.converters.migrate import of_optimizers, read_back
from jaxmha.converters.migrate.lazy_tensors import Tensors

OTHERS = ("pass", "refuse")
DTYPES = ("float16", "bfloat16", "float32", "float64")
_UNCHANGED = "left as it is"


@dataclass(frozen=True)
class Step:
    """A planned layer: one layer of the source, and its destination.

    Attributes:
      kind: "attention", "latent" (latent attention), a kind of `layer_layouts`, or "other": copied
        unchanged.
      layout: layout of attention, or convention of another layer; "" for kind "other".
      source, target: prefixes in source and destination; for kind "other" the full names.
      tensors: names of all source tensors that belong to the layer.
      becomes: kind of the layer in the target.
      num_heads: head count of attention; `heads_from` says where it was found. name: name of the
        layer in a .weights.h5 file.
      confidence, why: certainty of the kind and layout, and the reason. Plan files do not store
        these two and `heads_from`.
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
    """The treatment of every tensor of one source.

    Attributes:
      to: layout of attention in the destination; other layers follow the conventions of its
        framework. "": every tensor is copied (`containers`).
      others: "pass" carries over tensors that are not understood, "refuse" raises for them.
      dtype: dtype to which every floating tensor is cast; None keeps dtypes.
      source, digest: path of the source, and SHA-256 of its contents; "" if not computed.
      fold_scale: True multiplies the queries if the target layout has another logit scale (`fold`).
      fill_bias: "zeros" adds biases of zeros that the target layout requires (`fill`).
      notes: remarks for the user on facts that no tensor holds, such as the epsilon of norms.
    """

    to: str
    steps: tuple[Step, ...]
    others: str = "pass"
    dtype: str | None = None
    source: str = ""
    digest: str = ""
    fold_scale: bool = False
    fill_bias: str | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def layout(self) -> Layout:
        """The layout named `to`; one without attention if every tensor is copied."""
        return registry.named(self.to) if self.to else registry.NONE

    def _repr_html_(self) -> str:
        rows = [
            (one.source or "(top)", one.kind, one.target or "(top)", one.num_heads or "", one.why)
            for one in self.steps
        ]
        caption = f"{len(rows)} layers of {self.source or 'a source'} to {self.to}"
        return notebook.table(caption, ("source", "kind", "target", "heads", "reason"), rows)


def make(
    file: Tensors,
    to: Layout,
    *,
    found: Sequence[Block],
    known: Sequence[Layout] = registry.LAYOUTS,
    num_heads: int | None = None,
    others: str = "pass",
    attention_only: bool = False,
    configured: head_count.Configured | None = None,
    epsilon: notes.Epsilons = notes.Epsilons(),
    unlike: Mapping[str, str] | None = None,
    unbiased: str = "",
    draft: bool = False,
) -> Plan:
    """Makes the plan for a source, with all blocks and layers found in it.

    `found`: the attention blocks of the source in the layouts `known`: all layouts, or the one that
    the caller named. `configured`, `epsilon`, `unlike` and `unbiased`: facts from the model's
    config (see `described`). `draft`: True for a plan that the user may edit, in which `num_heads`
    applies only to blocks of unknown head count.

    Raises:
      ValueError: there are adapters, such as LoRA; a block is damaged; a head count is unknown; or,
        with `others="refuse"`, tensors are not understood.
    """
    adapters.refuse(file.info)
    every = known is registry.LAYOUTS
    found = _configured(file, found, known)
    convention = layer_layouts.convention_of(to.name)
    layers, why = layers_of(
        file,
        found,
        to,
        unlike or {},
        unbiased,
        apart=(apart := unknown_attention.find(_shapes(file), found) if every else {}),
        all_kinds=every and not attention_only and not _returns(file, found, to),
    )
    latents = latent_blocks.find(file) if every else []
    held = to.name in latent_forms.FORMS
    converted = latents if held else []
    taken = {name for block in found for name in block.keys.values()}
    taken |= {name for block in converted for name in block.keys.values()}
    taken |= {name for layer in layers for name in layer.keys.values()}
    carried = {name: why.get(name, "") for name in file.info if name not in taken}
    if others == "refuse":
        _refuse_rest(carried)
    if in_file(to):  # Keras groups are numbered in the order of the source
        position = layer_order.of_source(file.info)
        found = sorted(found, key=lambda block: position(block.prefix))
        layers = sorted(layers, key=lambda layer: position(layer.prefix))
    shapes = _shapes(file)
    blocks: list[Step] = []
    for i, block in enumerate(found):
        given = head_count.by_default(block, num_heads, configured) if draft else num_heads
        count = head_count.find(block, shapes, given, file.metadata, configured)
        blocks.append(_attention(block, to, file.names, i, count, configured))
    of_latents = [_latent(block, file.names) for block in converted]
    unchanged = (
        Step("other", "", name, name, (name,), "other", why=reason or _UNCHANGED)
        for name, reason in carried.items()
    )
    other_steps = steps_of(layers, to, convention, file.names)
    steps = (*blocks, *of_latents, *other_steps, *unchanged)
    becomes = [step.becomes for step in other_steps]
    all_notes = (
        *[note for name, note in notes.NEEDS.items() if name == to.name],
        *[notes.NO_ATTENTION] * (not found and not converted),
        *notes_of_layers(file, to, found, layers, becomes, carried, epsilon, unlike or {}),
        *notes.renamed(_renamed(steps, file.names) if not in_file(to) else ()),
        *unknown_attention.notes(
            of_optimizers.weights_of(file, latent_blocks.without(apart, converted)),
            hf_config.model_types(file),
        ),
        *latent_blocks.notes(latents, held),
    )
    return Plan(to.name, steps, others, notes=all_notes)


def _refuse_rest(carried: Mapping[str, str]) -> None:
    """Raises ValueError if `carried` (tensor -> reason it is not understood) is not empty."""
    if carried:
        shown = [f"{name} ({reason or _UNCHANGED})" for name, reason in carried.items()]
        raise ValueError(
            f"not understood: {listed(shown, separator='; ')}; --others pass carries them over as they are"
        )


def notes_of_layers(
    file: Tensors,
    to: Layout,
    found: Sequence[Block],
    layers: Sequence[Module],
    becomes: Sequence[str],
    carried: Mapping[str, str],
    epsilon: notes.Epsilons,
    unlike: Mapping[str, str],
) -> tuple[str, ...]:
    """Returns notes on other layers, and on `carried`: tensor copied unchanged -> the reason."""
    mistakable = read_back.mistakable(file.info, list(carried), found, to)
    return (
        *notes.epsilons(layers, layer_layouts.convention_of(to.name), found, epsilon),
        *notes.known_by_name(layers),
        *notes.of_features(layers),
        *notes.flattened(layers, layer_layouts.convention_of(to.name)),
        *notes.not_back(layers, becomes, mistakable, to.name),
        *notes.in_parts(carried),
        *notes.carried_norms(carried, [*unlike.values(), other_layers.UNSURE]),
    )


def _returns(file: Tensors, found: Sequence[Block], to: Layout) -> bool:
    """True if a plan undoes a conversion of attention alone.

    By the metadata, every block was made from one in the layout `to`. The other layers then still
    follow its framework, and are copied.
    """
    back = [stored_semantics.origin(block, file.metadata) == to.name for block in found]
    return bool(back) and all(back) and not in_file(to)


def _shapes(file: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for name, one in file.info.items()}


def _configured(file: Tensors, found: Sequence[Block], known: Sequence[Layout]) -> list[Block]:
    """Returns the blocks with the model's config applied; raises ValueError if one is damaged."""
    found = of_optimizers.without_parts(file, behaviours.configured(found, file))
    if broken := damaged_blocks.describe(_shapes(file), found, known):
        raise ValueError(
            f"{broken[0]}; with --from it is carried over as it is, where another layout is named"
        )
    return found


def layers_of(
    file: Tensors,
    found: Sequence[Block],
    to: Layout,
    unlike: Mapping[str, str],
    unbiased: str,
    *,
    apart: Mapping[str, Sequence[str]],
    all_kinds: bool,
) -> tuple[list[Module], dict[str, str]]:
    """Returns the layers other than attention to convert; and tensor -> why it is not understood.

    `apart`: prefix -> tensors of attention in no known layout, which are copied unchanged.
    `all_kinds`: False returns no layers, so that all of them are copied unchanged.
    """
    convention = layer_layouts.convention_of(to.name)
    layers, why = other_layers.find(file.info, found, unlike, unbiased)
    carried = {name for names in apart.values() for name in names}
    why |= dict.fromkeys(carried, "of attention of no known layout")
    layers = [x for x in layers if not carried & set(x.keys.values())]
    if convention is not None and layer_layouts.tells_norms(convention):
        unsure = [layer for layer in layers if layer.confidence == "ambiguous"]
        why |= {name: other_layers.UNSURE for layer in unsure for name in layer.keys.values()}
        layers = [layer for layer in layers if layer.confidence != "ambiguous"]
    if not all_kinds or convention is None:
        return [], why
    if not in_file(to):  # Keras groups have no names that look like attention
        steps = [_other_layer(x, to, convention, file.names, Counter()) for x in layers]
        targets = [(step.target, step.becomes) for step in steps]
        alike = read_back.like_attention(layers, targets, convention, file)
        why |= alike
        layers = [x for x in layers if not alike.keys() & x.keys.values()]
    return layers, why


def steps_of(
    layers: Sequence[Module], to: Layout, convention: Convention | None, names: Mapping[str, str]
) -> list[Step]:
    """Returns the steps of layers other than attention; Keras groups are numbered by class."""
    numbers: Counter[str] = Counter()
    if convention is None:
        return []
    return [_other_layer(layer, to, convention, names, numbers) for layer in layers]


def _attention(
    block: Block,
    to: Layout,
    names: Mapping[str, str],
    i: int,
    count: tuple[int | None, str],
    configured: head_count.Configured | None,
) -> Step:
    """Returns the step of the i-th block; `count`: its head count, and where it was found."""
    separator = block.layout.separator
    if group := in_file(to):
        target = f"layers/{group}{f'_{i}' * (i > 0)}"
        name = user_names.dotted(block.prefix, separator, names)
    else:
        target = user_names.target_by_name(block.prefix, separator, to.separator, names)
        name = ""
    return Step(
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


def _latent(block: LatentBlock, names: Mapping[str, str]) -> Step:
    target = user_names.target_by_name(block.prefix, ".", ".", names)
    tensors = tuple(block.keys.values())
    why = f"{len(tensors)} keys of latent attention"
    return Step("latent", block.form, block.prefix, target, tensors, "latent", why=why)


def _renamed(planned: Sequence[Step], names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields source and target path of every layer whose name changes."""
    for step in planned:
        if user_names.of_layer(step.source, names) != step.source:
            yield step.source, step.target


def confidence(
    block: Block, heads_from: str = "", configured: head_count.Configured | None = None
) -> str:
    """Returns how certain the layout of a block is: "certain", "likely" or "ambiguous".

    "certain": a known model family has such a prefix, and a head count from a config is from a
    config of this family. "ambiguous": several layouts fit the keys, and no family decides.

    >>> from jaxmha.converters.discovery import attention_blocks
    >>> confidence(Block("h.0.attn", attention_blocks.named("gpt2"), {}))
    'likely'
    """
    if block.family:
        from_config = heads_from.startswith(hf_config.CONFIG)
        named = configured is not None and block.family[0] in configured.families
        return "certain" if named or not from_config else "likely"
    return "ambiguous" if block.also else "likely"


def _other_layer(
    layer: Module,
    to: Layout,
    convention: Convention,
    names: Mapping[str, str],
    numbers: Counter[str],
) -> Step:
    separator = other_layers.split(next(iter(layer.keys.values())))[1] or layer.convention.separator
    numbered = convention.group and in_file(to)
    if numbered:
        kind = kind_in_target(layer, to, convention, layer.prefix)
        group = convention.group[kind]
        target = f"layers/{group}{f'_{numbers[group]}' * (numbers[group] > 0)}"
        numbers[group] += 1
    else:
        target = user_names.target_by_name(layer.prefix, separator, convention.separator, names)
        kind = kind_in_target(layer, to, convention, target)
    return Step(
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


def kind_in_target(layer: Module, to: Layout, convention: Convention, prefix: str) -> str:
    """Returns the kind in the target: that of the model family at the prefix, or the usual one.

    Raises ValueError if the convention has no kind with the leaves of the layer.
    """
    leaves = set(layer.entries)
    target_families = {
        family.name for family in model_families.FAMILIES if family.layout == to.name
    }
    named = family_keymaps.kind_at(prefix, target_families)
    wanted = [named[0]] if named else []
    # A conv1d of a known family or plan becomes a linear layer, unless gpt2 is the target: only
    # GPT-2 uses Conv1D.
    if layer.kind != "conv1d" or to.name == "gpt2" or layer.confidence != "certain":
        wanted.append(layer.kind)
    wanted.append(layer_layouts.INSTEAD.get(layer.kind, layer.kind))
    for kind in wanted:
        if leaves <= {e.leaves[0] for e in convention.kinds.get(kind, ())}:
            return kind
    raise ValueError(f"{layer.prefix}: {convention.name} has no place for a {layer.kind}")


def in_file(to: Layout) -> str:
    """Returns the name of attention groups in a .weights.h5 layout; "" for other layouts."""
    return {layout.name: group for layout, group in keras.IN_FILE.values()}.get(to.name, "")
