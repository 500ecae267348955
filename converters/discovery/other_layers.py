"""Finds layers other than attention in a flat dict of tensors: kind, prefix, and the reason.

The key map of a family decides first; then keys and shapes, if they allow only one kind; then the
name. If none of these decides, the tensor has no kind and is copied unchanged.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxmha.converters.discovery import adapters, family_keymaps, layer_layouts
from jaxmha.converters.discovery.attention_blocks import Block, natural
from jaxmha.converters.discovery.layer_layouts import CONVENTIONS, KERAS_FILE, Convention
from jaxmha.converters.layout import parametrized
from jaxmha.converters.layout.base import Entry
from jaxmha.dims import parse

# Kind, and pattern of the names of its layers: they decide where a layer has only one array of two
# axes, which could be a linear kernel or the table of an embedding.
_NAMES = (
    (
        "linear",
        r"proj|projector|projection|linear\d*|dense|fc\d*|head|classifier|gate|up|down|mlp"
        + r"|embed_out|unembed|unembedding|patch_(emb|embed|embedding|embeddings|embedder)",
    ),
    ("embedding", r"emb|embed|embedding|embeddings|wte|wpe|embed_tokens|embedder"),
)
# Names of special convolutions whose arrays look like those of an ordinary convolution.
_OTHER_CONVOLUTIONS = (
    r"transpos|deconv|upconv|depthwise|depth_wise|separable|dw_?conv|conv_?dw|(^|[./])dw\d*($|[./])"
)
# Names of layers that have the arrays of a norm over features but compute another function.
_OTHER_NORMS = (
    r"group|instance|prelu|(^|_)(gn|act|activation|gate)_?\d*($|_)"
    r"|(^|_)(ls|gamma|lambda|alpha)_?\d*$"
    r"|layer_?scale|^scale_?\d*$|_scale$"
)
# Prefixes of norms that mostly have a gate as a second input: the user must name the kind.
_GATED = r"(^|[./_])(mamba\d?|mixer|ssm|linear_attn|linear_attention|gated_\w+|kda|gla)[./]([^./]*[./])?\w*norm$|[./]o_norm$"
# Prefixes of norms in stacks of convolutions, which mostly normalise groups of channels (wav2vec 2).
_OF_CHANNELS = r"(^|[./_])conv_layers[./]\d+[./]\w*norm$|(^|[./])pixel_decoder[./]norms[./]\d+$"
# Names that Flax and Haiku derive from the class of a norm.
_BY_CLASS = {"norm": r"(LayerNorm|layer_norm)(_\d+)?", "rmsnorm": r"(RMSNorm|rms_norm)(_\d+)?"}
ASKED = "asked"  # neither names nor configuration decide the kind of norms without a bias
UNSURE = (
    "a norm without a bias: it could be RMSNorm or LayerNorm(bias=False), which compute different "
    "functions; name the kind (norm or rmsnorm) in a plan"
)


# Reason for reading a norm with a bias as LayerNorm if its name does not exclude other norms.
OF_GROUPS = "its keys and shapes (GroupNorm and InstanceNorm have the same)"
_OF_FEATURES = r"layer_?norm|(^|_)ln(_|\d|$)"
_ADAPTER = "of an adapter, such as LoRA: merge it into its base model first"
_FOREIGN = "its separator is not that of the attention blocks in the same file"
_LAYER_NORM = "layer_norm_eps"
_SHAPES = "its keys and shapes"


class Module(NamedTuple):
    """One layer other than attention, and the name of every array in the file.

    Attributes:
      kind, convention: as in `layer_layouts`.
      keys: key of the convention -> name in the file.
      sizes: the size of every axis letter.
      confidence: "certain": a known family has the layer there; "likely": keys and shapes allow one
        kind in the framework of the nearby attention; "by name": only the name decides;
        "ambiguous": a norm without a bias, which may be either of two kinds (`UNSURE`).
      why: the reason for the kind, shown to the user.
    """

    prefix: str
    kind: str
    convention: Convention
    keys: dict[str, str]
    sizes: dict[str, int]
    confidence: str
    why: str

    @property
    def entries(self) -> dict[str, Entry]:
        """The entries whose arrays are present, by leaf."""
        of_kind = self.convention.kinds[self.kind]
        return {entry.leaves[0]: entry for entry in of_kind if entry.key in self.keys}


def find(
    info: Mapping[str, Any],
    blocks: Sequence[Block],
    unlike: Mapping[str, str] = MappingProxyType({}),
    unbiased: str = "",
) -> tuple[list[Module], dict[str, str]]:
    """Every layer other than attention, and the remaining tensors: name -> why its kind is unknown.

    `info` gives shape and dtype of every tensor; tensors of `blocks` are left out. `unlike` maps
    kinds that compute another function in this model to the reason (`hf_config.offset_norms`).
    `unbiased` is the kind of norms without a bias if known, or `ASKED`
    (`hf_config.unbiased_norms`).

    >>> import numpy as np
    >>> found, others = find({"a.weight": np.zeros((3, 5)), "a.bias": np.zeros(3)}, [])
    >>> found[0].kind, found[0].sizes, found[0].confidence
    ('linear', {'Do': 3, 'Di': 5}, 'likely')
    """
    taken = {name for block in blocks for name in block.keys.values()}
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for name in info:
        if name not in taken:
            prefix, separator, key = split(name)
            groups.setdefault((prefix, separator), {})[key] = name
    families = {block.family[0] for block in blocks if block.family}
    preferred = [c for block in blocks if (c := layer_layouts.convention_of(block.layout.name))]
    own = list(dict.fromkeys(preferred)) or list(CONVENTIONS)
    separators = {block.layout.separator for block in blocks}
    if not unbiased and _parallel(prefix for prefix, _ in groups):
        unbiased = ASKED
    of_images = _with_convolutions(groups, info)
    of_parts = _of_parts(info)
    found: list[Module] = []
    others: dict[str, str] = {}
    for (prefix, separator), keys in groups.items():
        if separator and separators and separator not in separators:
            # An earlier conversion copied the tensor, as its separator shows: it is copied again.
            others |= dict.fromkeys(keys.values(), _FOREIGN)
            continue
        module = _decide(prefix, keys, info, families, own, unbiased)
        if adapters.find(keys.values()):
            module = _ADAPTER
        if isinstance(module, Module):
            module = unlike.get(_computes(module), module)
        if isinstance(module, Module) and module.why == _SHAPES:
            module = _of_features(module, of_images)
        if isinstance(module, Module):
            found.append(module)
        else:
            others |= {name: of_parts.get(name, module) for name in keys.values()}
    return sorted(found, key=lambda module: natural(module.prefix)), others


def _of_parts(info: Mapping[str, Any]) -> dict[str, str]:
    """Maps tensors from which torch computes a parameter to the remedy."""
    found = parametrized.stored({name: tuple(one.shape) for name, one in info.items()})
    return {n: parametrized.remedy(key, parts) for key, parts in found.items() for n in parts.names}


def _parallel(prefixes: Iterable[str]) -> bool:
    """True if a layer has only the first of Llama's two norms, as in Cohere.

    Its norms may then be LayerNorms, as Cohere's are, so the user must name their kind.
    """
    present = set(prefixes)
    first = {p for p in present if re.search(r"(^|\.)layers\.\d+\.input_layernorm$", p)}
    return any(
        p.replace("input_layernorm", "post_attention_layernorm") not in present for p in first
    )


def _computes(module: Module) -> str:
    """The kind of a module to find in `unlike`: "rmsnorm" for every norm without a bias.

    Such a norm could be an RMSNorm, whatever kind was read.
    """
    biased = "norm.bias" in module.entries
    return "rmsnorm" if module.kind == "norm" and not biased else module.kind


def split(name: str) -> tuple[str, str, str]:
    """Prefix, separator and key of a name.

    >>> split("a.b.weight"), split("layers/dense/vars/0"), split("w")
    (('a.b', '.', 'weight'), ('layers/dense', '/', 'vars/0'), ('', '', 'w'))
    """
    match = re.fullmatch(r"(?s:(?:(.*)(/))?(vars/\d+))", name)
    match = match or re.fullmatch(r"(?s:(?:(.*)([./]))?([^./]*))", name)
    assert match is not None
    return match[1] or "", match[2] or "", match[3]


def as_kind(
    prefix: str,
    kind: str,
    convention: Convention,
    keys: Mapping[str, str],
    info: Mapping[str, Any],
    why: str = "named",
) -> Module:
    """A module of this kind. Raises ValueError, with the axes, if its arrays do not fit."""
    if kind not in convention.kinds:
        known = ", ".join(convention.kinds)
        raise ValueError(f"convention {convention.name} has no {kind}: it has {known}")
    sizes: dict[str, int] = {}
    known_entries = {entry.key: entry for entry in convention.kinds[kind]}
    for key, name in keys.items():
        if key not in known_entries:
            has = ", ".join(known_entries)
            raise ValueError(f"{name} is no array of {kind} in {convention.name}, which has {has}")
        shape, axes = tuple(info[name].shape), known_entries[key].axes
        letters = [group[0] for group in parse(axes)]
        bound = {**dict(zip(letters, shape, strict=False)), **sizes}
        if len(letters) != len(shape) or shape != tuple(bound[a] for a in letters):
            known = "".join(f", {a}={sizes[a]}" for a in letters if a in sizes)
            raise ValueError(f"{name}: expected axes ({axes}){known}, got shape {shape}")
        if "float" not in str(info[name].dtype):
            raise ValueError(f"{name}: expected a floating array, got {info[name].dtype}")
        sizes |= bound
    for key, entry in known_entries.items():
        if not entry.group and key not in keys:
            raise ValueError(f"{prefix or '(top)'} lacks {key}, which a {kind} has")
    return Module(prefix, kind, convention, dict(keys), sizes, "certain", why)


def _decide(
    prefix: str,
    keys: Mapping[str, str],
    info: Mapping[str, Any],
    families: set[str],
    own: Sequence[Convention],
    unbiased: str,
) -> Module | str:
    """The layer at a prefix, or the reason why its kind is unknown.

    `own`: the conventions of the attention blocks in the file. Shapes decide the kind only of
    layers in these conventions.
    """
    candidates: dict[str, Module] = {}
    for convention in dict.fromkeys([*own, *CONVENTIONS]):
        for kind, entries in convention.kinds.items():
            required = {entry.key for entry in entries if not entry.group}
            if kind in candidates or not required <= keys.keys() or len(keys) > len(entries):
                continue
            try:
                module = as_kind(prefix, kind, convention, keys, info)
            except ValueError:
                continue
            candidates[kind] = module
    if any(family_keymaps.is_bare(name, families) for name in keys.values()):
        return "a parameter or buffer that belongs to no layer"
    if not candidates:
        return "no known layer has such keys and shapes"
    if {"norm", "rmsnorm"} & candidates.keys() and re.search(_GATED, prefix):
        return (
            "a norm in a mixer, which may have a gate: where it has none, name the kind in a plan"
        )
    placed = family_keymaps.kind_at(prefix, families)
    named = placed or _keras_group(prefix, candidates)
    if named is not None:
        kind, place = named
        if kind not in candidates and (other := layer_layouts.INSTEAD.get(kind)) in candidates:
            kind = str(other)
        if kind not in candidates:
            return f"{place} has a {kind}, which these keys and shapes are not"
        if kind == "rmsnorm" and unbiased == "norm":
            why = f"config.json has {_LAYER_NORM} and no rms_norm_eps"
            return candidates["norm"]._replace(confidence="likely", why=why)
        asked = unbiased == ASKED if kind == "rmsnorm" else kind == "norm" and unbiased != "norm"
        if placed and asked and {"norm", "rmsnorm"} <= candidates.keys():
            return _unbiased(prefix, candidates, unbiased)
        return candidates[kind]._replace(why=f"the prefix of {place}")
    if not prefix:
        return "a parameter or buffer at the top, which is no layer's"
    likely = {k: m for k, m in candidates.items() if m.convention in own}
    return _by_shape(prefix, likely, families, unbiased)


def _by_shape(
    prefix: str, candidates: dict[str, Module], families: set[str], unbiased: str
) -> Module | str:
    kinds = set(candidates)
    if not kinds:
        return "only layers of other frameworks have such keys and shapes"
    if kinds <= {"norm", "rmsnorm"}:
        if next(iter(candidates.values())).sizes["D"] == 1:
            return "a single number, which is no norm's"
        if re.search(_OTHER_NORMS, _called(prefix).lower()) or re.search(_OF_CHANNELS, prefix):
            return "a norm of groups or an activation by its name; else name the kind in a plan"
    if kinds == {"norm", "rmsnorm"}:  # without a bias, both have the same array
        return _unbiased(prefix, candidates, unbiased)
    if kinds == {"linear", "conv1d"} and "GPT-2" not in families:
        # A square kernel fits both kinds, but only GPT-2 and related models have Conv1D.
        return candidates["linear"]._replace(
            confidence="likely",
            why="its keys and shapes (only GPT-2 has Conv1D, and no block is of GPT-2)",
        )
    if len(kinds) == 1:
        (module,) = candidates.values()
        if module.kind == "convolution":
            return _convolution(module)
        return module._replace(confidence="likely", why=_SHAPES)
    last = re.split("[./]", prefix)[-1].lower()
    for kind, names in _NAMES:
        if kind in kinds and re.search(rf"(^|[_\d])({names})([_\d]|$)", last):
            sizes = candidates[kind].sizes
            if kind == "embedding" and sizes["V"] == sizes["D"]:
                break  # no shape would show that it is a linear kernel, which is transposed
            why = f"its name {last!r} (shapes alone allow {', '.join(sorted(kinds))})"
            return candidates[kind]._replace(confidence="by name", why=why)
    return f"could be {' or '.join(sorted(kinds))}: name the kind in a plan"


def _of_features(module: Module, of_images: Collection[str]) -> Module | str:
    """Returns a module whose shapes decided its kind, or the reason why its kind is unknown.

    A norm next to convolutions is unknown: it may normalise groups of channels.
    """
    parent, last = _parent(module.prefix)
    if module.kind != "norm" or re.search(_OF_FEATURES, last.lower()):
        return module
    if parent in of_images:
        return "a norm next to convolutions, which may be of groups: name the kind in a plan"
    return module._replace(why=OF_GROUPS)


def _with_convolutions(
    groups: Mapping[tuple[str, str], Mapping[str, str]], info: Mapping[str, Any]
) -> set[str]:
    """Prefixes that contain layers called `conv`, with kernels of three axes or more."""
    return {
        parent
        for (prefix, _), keys in groups.items()
        for parent, last in [_parent(prefix)]
        if last.lower().startswith("conv") and any(len(info[x].shape) > 2 for x in keys.values())
    }


def _parent(prefix: str) -> tuple[str, str]:
    parent, _, last = prefix.replace("/", ".").rpartition(".")
    return parent, last


def _called(prefix: str) -> str:
    """The last name in a path that is not a number: `group_norms` for `group_norms.0`."""
    names = [name for name in re.split("[./]", prefix) if not name.isdigit()]
    return names[-1] if names else ""


def _unbiased(prefix: str, candidates: Mapping[str, Module], unbiased: str) -> Module:
    """A norm without a bias: its name or the configuration decides the kind, or it is ambiguous."""
    last = re.split("[./]", prefix)[-1]
    named = [kind for kind, name in _BY_CLASS.items() if re.fullmatch(name, last)]
    if "rms" in last.lower():
        named = ["rmsnorm"]
    elif named and candidates["norm"].convention.name not in ("flax", "haiku"):
        named = ["norm"] if last == "LayerNorm" else []  # Llama's RMSNorms are called layernorm too
    if named:
        return candidates[named[0]]._replace(confidence="likely", why=f"its name {last!r}")
    if unbiased == "rmsnorm":
        why = "its keys and shapes, and rms_norm_eps of config.json"
        return candidates["rmsnorm"]._replace(confidence="likely", why=why)
    return candidates["norm"]._replace(confidence="ambiguous", why=UNSURE)


def _convolution(module: Module) -> Module | str:
    """The module if it is an ordinary convolution, or the reason why its type is unknown.

    Only a bias whose size differs from the input features shows which axis is the output.
    """
    name = module.prefix.lower()
    other = re.search(_OTHER_CONVOLUTIONS, name)
    oriented = "convolution.bias" in module.entries and module.sizes["Di"] != module.sizes["Do"]
    if oriented and not other:
        return module._replace(confidence="likely", why="its keys and shapes")
    if not other and (patches := re.search(r"(?<![a-z])patch_embed", name)):
        why = f"its name {patches[0]!r} (a transposed convolution could have its shapes)"
        return module._replace(confidence="by name", why=why)
    return (
        "a convolution that could be transposed or depthwise: where it is neither, name the kind in a "
        "plan"
    )


def _keras_group(prefix: str, candidates: Mapping[str, Module]) -> tuple[str, str] | None:
    """The kind and group of a layer in a .weights.h5 file, where groups are named by class.

    None if the name is not that of a class with a kind here.
    """
    last = re.sub(r"_\d+$", "", prefix.rpartition("/")[2])
    for kind, group in KERAS_FILE.group.items():
        if last == group and any(m.convention is KERAS_FILE for m in candidates.values()):
            return kind, f"Keras file: {group}"
    return None
