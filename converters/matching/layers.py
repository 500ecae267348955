"""Groups the arrays of a tree into layers, and finds the axis orders of their main arrays."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxmha.converters.discovery import adapters
from jaxmha.converters.discovery.layer_layouts import CONVENTIONS
from jaxmha.converters.matching.terms import SURE, meaning, packed
from jaxmha.converters.matching.trees import Array, Tree

MAIN, BIAS = "main", "bias"
ONLY = "only "  # a `form` of ONLY + name: the array is paired only with an array of this name
_ENTRIES = [e for c in CONVENTIONS for kind in c.kinds.values() for e in kind if "/" not in e.key]
_SLOTS = {
    **{e.key: BIAS if e.leaves[0].endswith("bias") else MAIN for e in _ENTRIES},
    **dict.fromkeys(("W", "table", "g", "a_2"), MAIN),
    "b_2": BIAS,
    **dict.fromkeys(("running_mean", "moving_mean", "mean"), "mean"),
    **dict.fromkeys(("running_var", "moving_variance", "moving_var", "var"), "var"),
}
_STEM = re.compile(
    r"(?P<stem>.+)_(?P<key>weight|kernel|bias|w|b)$|^(?P<first>W|w|b|kernel|weight|bias)_(?P<rest>.+)$"
)
# Names of buffers that models recompute, of counters, and of biases that T5's cross-attention never
# adds. They are not weights, and are never matched.
BUFFERS = re.compile(
    r"(^|[./])(num_batches_tracked|position_ids|masked_bias|relative_(position_index|coords_table)|"
    r"causal_mask|EncDecAttention\.relative_attention_bias\.weight)$|^rope_freqs\.weight$"
)
_FREQUENCIES = re.compile(r"(^|[./])(original_)?inv_freq$")  # of rotary positions, if a vector
_CAUSAL = re.compile(r"(^|[./])attn\.bias$")  # GPT-2's causal mask, if (1, 1, T, T); else a bias
# Recurrent layers pack gates in orders that shapes do not show (torch r z n, Keras z r h): their
# arrays are paired only with arrays of the same name.
_GATES = re.compile(r"weight_[ih]h(_l\d+)?(_reverse)?|recurrent_kernel")
_TURNED = re.compile(r"transpose|deconv", re.IGNORECASE)


class Layer(NamedTuple):
    """One layer, or one part of a packed layer.

    `slots` maps "main" (the kernel, table or norm scale), "bias", "mean" and "var" to arrays;
    `form` is the axis order of the main array, such as "oi" (output, input). `guessed`: True if
    names do not determine how the parts are ordered in the main array. `apart`: slots whose arrays
    belong to this layer alone, although its other arrays are packed with those of other layers.
    """

    path: tuple[str, ...]
    slots: Mapping[str, Array]
    form: str
    part: tuple[int, int] | None = None  # (index, count) of the layer in a packed array
    guessed: bool = False
    apart: frozenset[str] = frozenset()

    def part_of(self, slot: str) -> tuple[int, int] | None:
        """Returns (index, count) of the layer in the array of `slot`; None if that is not packed."""
        return None if slot in self.apart else self.part


def signature(layer: Layer) -> tuple[object, ...]:
    """Returns a key of array shapes, axis order and part, which repetitions of a layer share."""
    return (
        tuple(sorted((slot, a.shape) for slot, a in layer.slots.items())),
        layer.form,
        layer.part,
    )


def is_buffer(array: Array) -> bool:
    """True for buffers (by name) and for arrays of integers or Booleans, which are not weights.

    >>> is_buffer(Array("bn.num_batches_tracked", ("bn", "num_batches_tracked"), (), "int64"))
    True
    """
    shape = array.shape
    mask = _CAUSAL.search(array.name) and shape[:-2] == (1, 1) and shape[2] == shape[3]
    frequencies = _FREQUENCIES.search(array.name) and len(shape) == 1
    whole = array.dtype.startswith(("int", "uint", "bool"))
    return bool(BUFFERS.search(array.name) or frequencies or mask or whole)


def layers(tree: Tree) -> list[Layer]:
    """Returns the layers of a tree; an array of packed projections gives one layer for each."""
    # Arrays such as lora/lora_b must not make the layer that they adapt a container of layers.
    adapted = set(adapters.find(tree.arrays))
    parents = {array.path[:-1] for name, array in tree.arrays.items() if name not in adapted}
    inner = {path[:n] for path in parents for n in range(len(path))}
    groups: dict[tuple[str, ...], dict[str, Array]] = defaultdict(dict)
    for array in tree.arrays.values():
        if is_buffer(array):
            continue
        *parent, key = array.path
        stem = _STEM.match(key)
        if array.name in adapted:
            path, slot = array.path, MAIN
        elif stem and key not in _SLOTS:
            path = (*parent, stem["stem"] or stem["rest"])
            slot = _SLOTS[stem["key"] or stem["first"]]
        elif key in _SLOTS and tuple(parent) not in inner:
            path, slot = tuple(parent) or ("",), _SLOTS[key]
        else:
            path, slot = array.path, MAIN
        if slot in groups[path]:
            path, slot = array.path, MAIN
        groups[path][slot] = array
    found = []
    gates = {a.path[:-1] for a in tree.arrays.values() if _GATES.fullmatch(a.path[-1])}
    forms = _forms(groups.values(), tree.kind)
    forms |= {
        main.name: f"{ONLY}{main.path[-1]}"
        for slots in groups.values()
        if (main := slots.get(MAIN)) and main.path[:-1] in gates
    }
    biased = _with_packed_bias(groups)
    for path, slots in groups.items():
        if path in biased:
            found.append(Layer(path, slots, "oi", biased[path], apart=frozenset([MAIN])))
            continue
        if MAIN not in slots:  # biases or means without a main array: each is a layer by itself
            found += [Layer(a.path, {MAIN: a}, "raw") for a in slots.values()]
            continue
        layer = Layer(path, slots, forms[slots[MAIN].name])
        key = slots[MAIN].path[-1]
        names = packed(_packed_name(path, slots[MAIN]))
        if names and len(slots[MAIN].shape) > 1:
            sure = any(name in (key, path[-1]) and form in ("", layer.form) for name, form in SURE)
            sure |= slots[MAIN].alternates is not None
            found += [
                layer._replace(path=(*path[:-1], name), part=(i, len(names)), guessed=not sure)
                for i, name in enumerate(names)
            ]
        else:
            found.append(layer)
    return found


def _with_packed_bias(
    groups: dict[tuple[str, ...], dict[str, Array]],
) -> dict[tuple[str, ...], tuple[int, int]]:
    """Adds the packed bias of torch's attention to query, key and value with separate weights.

    Torch has one weight for each, but one bias for all three, if keys or values differ in width from
    queries. Returns the path of each projection -> (index, count) of its part of that bias.
    """
    found: dict[tuple[str, ...], tuple[int, int]] = {}
    for path in [path for path, slots in groups.items() if slots.keys() == {BIAS}]:
        three = [(*path[:-1], f"{name}_proj") for name in "qkv"]
        alone = all(groups.get(one, {}).keys() == {MAIN} for one in three)
        if alone and groups[path][BIAS].path[-1] == "in_proj_bias":
            bias = groups.pop(path)[BIAS]
            for n, one in enumerate(three):
                groups[one][BIAS] = bias
                found[one] = n, len(three)
    return found


def _packed_name(path: tuple[str, ...], main: Array) -> str:
    """Returns the name to look up with `packed`: the last of `path`, or that of torch's attention.

    Mamba has an `in_proj` too, which packs no query, key and value: sizes other than 3 D show it.
    """
    sizes = sorted(main.shape)
    attends = path[-1] == "in_proj" and "attn" in meaning(path[:-1])
    if main.path[-1] == "in_proj_weight" or (attends and sizes[-1:] == [3 * sizes[0]]):
        return "in_proj_weight"
    return path[-1]


def _forms(groups: Iterable[Mapping[str, Array]], kind: str) -> dict[str, str]:
    """Maps the name of each main array to its axis order; "" if it is unknown.

    The class of the layer or the key may determine it. The size of a bias shows the output axis of a
    kernel that is not square. If all such kernels with a key agree, other kernels with this key get
    their order; where classes are known, only of the same class, because a class that a user has
    written may order its axes as no other does.
    """
    groups = list(groups)
    by_stem: dict[str, set[str]] = defaultdict(set)
    proved: dict[str, str] = {}
    for slots in groups:
        main, bias = slots.get(MAIN), slots.get(BIAS)
        if main is None or bias is None or len(main.shape) != 2 or main.shape[0] == main.shape[1]:
            continue
        sizes = tuple(n for n in bias.shape if n != 1)
        for place, form in enumerate(("oi", "io")):
            if sizes == (main.shape[place],):
                proved[main.name] = form
                by_stem[_stem(main)].add(form)
                by_stem[_last(main)].add(form)
    found = {}
    for slots in groups:
        main = slots.get(MAIN)
        if main is None:
            continue
        form = "" if main.form == "raw" else main.form
        key = main.path[-1]
        if not form and main.form != "raw" and key in ("embedding", "embeddings", "table"):
            form = "vd"
        by_key = by_stem[_stem(main)]
        if not form and main.form != "raw" and key in ("kernel", "vars/0"):
            form = "io"
        if not form and len(main.shape) > 2 and key in ("weight", "w"):
            form = "oi" if key == "weight" else "io"
        if not form and len(main.shape) == 2:
            own = by_stem[_last(main)]
            form = proved.get(main.name) or _agreed(own) or _agreed(by_key)
            if kind == "file" and key == "weight" and not by_key:
                form = "oi"
            if form == "oi" and BIAS not in slots and key == "weight" and kind in ("file", "tree"):
                form = "weight"  # without a bias it may also be an embedding table
            if form == "io" and BIAS not in slots and key == "weight" and not _agreed(own):
                form = ""
        if len(main.shape) > 2 and _TURNED.search("/".join(main.path)):
            form = "no"
        found[main.name] = form
    return found


def _agreed(forms: set[str]) -> str:
    return next(iter(forms)) if len(forms) == 1 else ""


def _stem(array: Array) -> str:
    """Returns the class of the layer and the last word of the array's key: `weight` of `q_weight`."""
    match = _STEM.match(array.path[-1])
    key = (match["key"] or match["first"]) if match else array.path[-1]
    return f"{array.owner} {key}"


def _last(array: Array) -> str:
    """Returns the class of the layer and the last two parts of the path, with "#" for numbers."""
    path = "/".join(re.sub(r"\d+", "#", part) for part in array.path[-2:])
    return f"{array.owner} {path}/"
