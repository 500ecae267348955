"""Roles of linear layers in attention, from the names that models give them.

`named_blocks` makes a layout from the tensor names of a block if they are unambiguous: the role of
every array under the block's prefix is known.
"""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from jaxmha.converters.layout.base import Layout
from jaxmha.converters.layout.by_hand import KERNELS, of_names

_BEFORE = r"(?:(?:w|to|in|emb|lin|linear|self|self_attn|cross|cross_attn|attn|att|x|c|fc|content|pos|proj|"
_BEFORE += r"position|ca|sa|txt|img|text|vision|projection|convolution)_?)*"
_AFTER = r"(?:_?(?:proj|projection|lin|linear|dense|conv|layer|net|head|heads|embed|w|weight|"
_AFTER += r"a_proj|b_proj|[ab]|nope|rope|pe|content|pos|d[uv]|(?:content|pos|sine)_proj|weights|"
_AFTER += r"a_proj_with_mqa|with_mqa))*\d*"
LONGEST = 40  # letters of a component to match; no real one has more, and long ones take time
# Role -> the pattern of the component of a tensor name that denotes its projection.
ROLES = {
    role: re.compile(f"{_BEFORE}{name}{_AFTER}", re.IGNORECASE)
    for role, name in {
        "query": r"(?:q|qs|query|queries)",
        "key": r"(?:k|ks|key|keys)",
        "value": r"(?:v|vs|value|values|v_gate)",
        "key value": r"(?:kv|key_value|keys_values|kv_a|kv_b)",
        "query key value": (
            r"(?:qkvs|kqv|qkvz?|qkv_same|query_key_value|queries_keys_values|c_attn|in_proj|att_proj"
            r"|fused_attn\w{,20})"
        ),
        "query key": r"(?:qk|query_key)",
    }.items()
}
_OUT = re.compile(
    rf"{_BEFORE}(?:o|out|output|outputs|proj|projection|dense|fc|merge|combine|concat|unify|final)"
    rf"{_AFTER}",
    re.IGNORECASE,
)
# Names of norms of queries and keys; the group `before` or `after` of the match tells which of them.
_NORM = re.compile(
    r"(?:(?:layer_?|ln_?)?norm_?(?P<after>q|k|query|key)|(?P<before>q|k|query|key)_?(?:layer_?)?norm)",
    re.IGNORECASE,
)
# Sets of roles, in the order in which a layout lists the names of their layers.
_ORDERS = (
    ("query", "key", "value"),
    ("query", "key value"),
    ("query key", "value"),
    ("query key value",),
)
# Layers and arrays of a block that are none of its projections: before them, after the output, or (TinyViT)
# added to the logits; and a regex of the block prefixes that have them ("": any).
_FIRST = (
    (frozenset(("sr", "norm")), ""),  # PVT reduces the tokens before keys and values
    (frozenset(("norm",)), r"(^|\.)layers\.\d+\.\d+(\.(fn|branch|fns\.\d+))?$"),  # vit_pytorch
    (frozenset(("group_norm",)), r"(^|\.)attentions\.\d+$"),  # diffusers
    (frozenset(("norm", "mlp.fc1", "mlp.fc2")), r"(^|\.)attn_pool$"),  # timm
    (frozenset(("norm0", "norm1", "mlp.fc0", "mlp.fc1")), r"(^|\.)encoder\.blocks\.\d+$"),  # Kimi
    (frozenset(("norm",)), r"(^|\.)e_mhsa$"),  # NextViT reduces the tokens before keys and values
    (frozenset(("norm", "attention_biases")), r"(^|\.)blocks\.\d+\.attn$"),  # TinyViT
    (frozenset(("pos_embed",)), ""),  # added to the tokens that ModifiedResNet of CLIP pools
    (frozenset(("positional_embedding",)), ""),
)
# Names of packed layers that hold all queries, then all keys, then all values, except `_UNLIKE`.
_IN_ORDER = re.compile(
    r"(?:\w*_)?(?:w_?)?(?:qkv|kv|qk|in_proj)(?:_\w+)?|(?:emb_)?(?:to_)?key_value", re.IGNORECASE
)
# Names of the layers of blocks that are not read by their names, since models with these names have
# another scale or packing: torchvision's MaxViT divides its logits by the width of all heads, CodeGen
# packs for several processors, and Megatron-Core packs by key head (layout megatron; keys and values of
# its cross-attention by head).
_UNLIKE = {
    ("to_qkv", "merge"),
    ("qkv_proj", "out_proj"),
    ("linear_qkv", "linear_proj"),
    ("linear_q", "linear_kv", "linear_proj"),
}
# Prefixes of blocks of DeepSeek-OCR: their names are in `_UNLIKE`, but they pack all queries, then
# all keys, then all values.
_LIKE = re.compile(r"(^|[./])vision_model[./]transformer[./]layers[./]\d+[./]self_attn$")
_TIMM = ("linear:", ("qkv", "proj"))  # left to layout timm, which knows exceptions
_ATTENTION = re.compile(r"att|mha", re.IGNORECASE)
# Components that end the prefix of a block, or that follow it before the names of its layers.
_WRAPPERS = {"self", "attention", "attn", "mha", "inner", "fn"}


class Named(NamedTuple):
    """An attention block with a layout made from its names; `keys`: key of the layout -> tensor."""

    prefix: str
    layout: Layout
    keys: dict[str, str]


@lru_cache(1 << 14)
def role_of(part: str) -> str | None:
    """The role that a component of a tensor name stands for; None if it stands for none.

    >>> role_of("to_q"), role_of("in_proj"), role_of("mlp")
    ('query', 'query key value', None)
    """
    if len(part) > LONGEST:
        return None
    return next((role for role, pattern in ROLES.items() if pattern.fullmatch(part)), None)


def named_blocks(
    shapes: Mapping[str, Sequence[int]], taken: set[str], alongside: frozenset[str] = frozenset()
) -> Iterator[Named]:
    """Yields every block whose names and shapes determine the role of each of its linear layers.

    `taken`: names of tensors that belong to blocks of known layouts. `alongside`: keys of arrays that
    may stand next to the projections.

    >>> shapes = {f"a.{x}_lin9.weight": (6, 6) for x in ("q", "k", "v", "out")}
    >>> [(block.prefix, block.layout.name) for block in named_blocks(shapes, set())]
    [('a', 'linear:q_lin9,k_lin9,v_lin9,out_lin9')]
    """
    starts: dict[str, None] = {}
    for name in shapes:
        path = () if name in taken else name.split(".")
        at = next((i for i, part in enumerate(path[:-1]) if role_of(part) is not None), None)
        if at is not None:
            starts[".".join(path[:at])] = None
    names = sorted(shapes) if starts else []
    for start in starts:
        outer, _, last = start.rpartition(".")
        for prefix in (start, outer) if last in _WRAPPERS and outer else (start,):
            begin = f"{prefix}." if prefix else ""
            under = names[bisect_left(names, begin) : bisect_left(names, f"{prefix}/")]
            own = [
                name
                for name in (under if prefix else names)
                if name[len(begin) :] not in alongside and not name.endswith("inv_freq")
            ]
            if not taken.intersection(own) and (found := _block(prefix, own, shapes)):
                yield found
                break


def _block(prefix: str, names: Sequence[str], shapes: Mapping[str, Sequence[int]]) -> Named | None:
    modules: dict[str, dict[str, str]] = {}
    for name in names:
        module, _, array = name[len(prefix) + 1 if prefix else 0 :].rpartition(".")
        modules.setdefault(module, {})[array] = name
    first = outside(modules, prefix)
    modules = {m: arrays for m, arrays in modules.items() if m not in first}
    norms = _norms(modules, shapes)
    if norms is None:
        return None
    modules_of_norms = {m: modules.pop(m) for m in norms}
    ranks = {len(shapes[a["weight"]]) for a in modules.values() if "weight" in a}
    kernel = next((s for s, axes in KERNELS.items() if ranks == {2 + len(axes.split())}), None)
    roles: dict[str, str] = {}
    outs: list[str] = []
    for module, arrays in modules.items():
        parts = module.split(".")
        role = next((r for part in parts if (r := role_of(part)) is not None), None)
        whole = "weight" in arrays and not arrays.keys() - {"weight", "bias"}
        if not whole or role in roles or kernel is None:
            return None
        if role is not None:
            roles[role] = module
        elif any(_OUT.fullmatch(part) for part in parts if len(part) <= LONGEST):
            outs.append(module)
        else:
            return None
    order = next((o for o in _ORDERS if roles.keys() == {*o}), None)
    if order is None or len(outs) != 1 or not all(map(_in_order, order, map(roles.get, order))):
        return None
    own = (*(roles[role] for role in order), *outs)
    if "in_proj" in own[0] and not _ATTENTION.search(prefix):  # Mamba has an in_proj as well
        return None
    weights = [shapes[modules[m]["weight"]] for m in own]
    if any(max(shape[2:], default=1) > 1 for shape in weights):
        return None  # a convolution over several positions is not a linear layer
    more = ""
    if norms:
        rows = [shapes[modules_of_norms[m]["weight"]][0] for m in norms]
        heads = rows[0] * len(order[0].split(" ")) == weights[0][0]
        more = f"+{','.join(norms)}{'(heads)' * heads}"
    last = tuple(module.rpartition(".")[2] for module in own)
    layout = (
        None
        if (last in _UNLIKE and not _LIKE.search(prefix)) or (kernel, last) == _TIMM
        else of_names(f"{kernel}{','.join(own)}{more}")
    )
    keys = {
        f"{module}.{array}": name
        for module, arrays in (modules | modules_of_norms).items()
        for array, name in arrays.items()
    }
    return Named(prefix, layout, keys) if layout is not None and _fits(order, weights) else None


def _norms(
    modules: Mapping[str, Mapping[str, str]], shapes: Mapping[str, Sequence[int]]
) -> tuple[str, ...] | None:
    """The names of the query norm and the key norm: empty if there are none, None if ambiguous."""
    found: dict[str, str] = {}
    for module, arrays in modules.items():
        part = module.rpartition(".")[2]
        if len(part) > LONGEST or (match := _NORM.fullmatch(part)) is None:
            continue
        role = (match["after"] or match["before"])[0].lower()
        whole = "weight" in arrays and not arrays.keys() - {"weight", "bias"}
        if role in found or not whole or any(len(shapes[n]) != 1 for n in arrays.values()):
            return None
        found[role] = module
    if not found:
        return ()
    return (found["q"], found["k"]) if found.keys() == {"q", "k"} else None


def outside(modules: Collection[str], prefix: str) -> frozenset[str]:
    """The modules under the prefix of a block that are no part of its attention, by `_FIRST`.

    >>> sorted(outside(["q", "kv", "proj", "sr", "norm"], "blocks.0.attn"))
    ['norm', 'sr']
    """
    path = prefix.replace("/", ".")
    rows = (first for first, at in _FIRST if first.issubset(modules) and re.search(at, path))
    return next(rows, frozenset())


def _in_order(role: str, module: str | None) -> bool:
    """False for a packed layer whose name does not determine the order of its parts."""
    if " " not in role:
        return True
    return any(_IN_ORDER.fullmatch(part) for part in str(module).split("."))


def _fits(order: Sequence[str], shapes: Sequence[Sequence[int]]) -> bool:
    """True if queries are as wide as the output projection's input, and keys and values fit them.

    `shapes` are (out, in), in the order of the roles `order`; the output projection is last.
    """
    *projections, (_, width, *_) = shapes
    rows: dict[str, int] = {}
    for role, (out, *_) in zip(order, projections, strict=True):
        parts = role.split(" ")
        if out % len(parts):
            return False
        rows |= dict.fromkeys(parts, out // len(parts))
    grouped = rows["key"] == rows["value"] and width % rows["key"] == 0
    even = rows["key"] == rows["value"] == width
    return rows["query"] == width and (grouped if "query" in order else even)
