"""Every error of every table, made from the table itself; each message is read.

A row of a table that nobody thought of when writing a test is tested all the same: the cases are
all ties, leaves, groups and settings of all layouts.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxmha import MHAParams, Semantics
from jaxmha.converters.discovery import attention_blocks
from jaxmha.converters.layout import registry, transform, validation
from jaxmha.converters.layout.base import Layout
from jaxmha.dims import parse
from jaxmha.params import CANONICAL, NORMS, check, field_of, from_leaves, leaves
from jaxmha.semantics import NORM_FIELDS
from tests.converters.test_every_layout import params_of

# Written here and not read from errors.py: how to evaluate, which no layer has to hold.
EVALUATION = {"fully_masked", "softmax_dtype", "precision"}
OTHER: dict[str, Any] = {
    "scale": 0.37,
    "logits_soft_cap": 30.0,
    "dropout_rate": 0.1,
    "dropout_broadcast": ("B", "N"),
    "add_zero_attn": True,
    "qk_norm": "rms",
    "qk_norm_epsilon": 0.1,
    "qk_norm_scope": "heads",
    "qk_norm_offset": 0.5,
    "qk_norm_learned": False,
    "clip_qkv": 3.0,
    "local_window_size": (2, 0),
    "attention_axes": (1, 2),
}


class Case(NamedTuple):
    """Parameters that are exported into a layout, and the message."""

    layout: Layout
    params: MHAParams
    semantics: Semantics
    message: str


def sized(layout: Layout, **changed: int) -> MHAParams:
    """Parameters of a layout's own sizes, but for the letters given."""
    sizes: dict[str, int] = {}
    for leaf, array in leaves(params_of(layout)).items():
        sizes |= dict(zip(CANONICAL[leaf].split(), array.shape, strict=True))
    sizes |= changed
    rng = np.random.default_rng(0)
    return from_leaves(
        {
            leaf: rng.normal(size=[sizes[a] for a in CANONICAL[leaf].split()]).astype(np.float32)
            for leaf in leaves(params_of(layout))
        }
    )


def without(params: MHAParams, *dropped: str) -> MHAParams:
    """Parameters less some leaves."""
    left: dict[str, Any] = {k: v for k, v in leaves(params).items() if k not in dropped}
    return from_leaves(left)


def held(layout: Layout) -> list[str]:
    """Leaves that the layout has a place for."""
    return [leaf for entry in layout.entries for leaf in entry.leaves]


def ties(layout: Layout) -> Iterator[tuple[str, Case]]:
    """Each tie alone is broken, by a size that nothing else has."""
    for letter, (tied, reason) in layout.ties.items():
        other = {"K": 2, "h": 7, "Dq": 29, "Dk": 31, "Dv": 37, "Do": 41}[letter]
        shape = sized(layout, **{letter: other})
        product = r" \* ".join(rf"{a}=\d+" for a in tied.split())
        # A letter that is tied to this one breaks as well, and may be reported first.
        turned = {x for x, (to, _) in layout.ties.items() if letter in to.split()}
        got = places(shape, letter, *tied.split())
        text = [rf"cannot hold {letter}={other} with {product}: {re.escape(reason)}; got {got}"]
        text += [
            rf"cannot hold {x}=\d+ with {letter}={other}: {re.escape(layout.ties[x][1])}; "
            f"got {places(shape, x, letter)}"
            for x in turned
        ]
        message = rf"^layout {layout.name} ({'|'.join(text)})$"
        yield f"{letter} is not {tied}", Case(layout, shape, layout.semantics, message)


def places(params: MHAParams, *letters: str) -> str:
    """The first leaf with each of the letters, and its shape."""
    found = leaves(params)
    names = [next(leaf for leaf in found if a in CANONICAL[leaf].split()) for a in letters]
    return " and ".join(
        re.escape(f"params.{name} of shape {tuple(found[name].shape)}")
        for name in dict.fromkeys(names)
    )


def absent(layout: Layout) -> Iterator[tuple[str, Case]]:
    """Leaves that it has no place for."""
    has, params = held(layout), params_of(layout)
    extra = {
        "bias_k": ("bias_k", "bias_v"),
        "query_norm": ("query_norm", "key_norm"),
        "query_norm_heads": ("query_norm_heads", "key_norm_heads"),
        "sinks": ("sinks",),
        "gate.kernel": ("gate.kernel",),
        "out.kernel": ("out.kernel",),
        "query.bias": ("query.bias",),
    }
    sizes = check(params)
    for first, names in extra.items():
        if first in has or field_of(first) in map(field_of, has):
            continue
        more: dict[str, Any] = dict(leaves(params))
        for name in names:
            letters = CANONICAL[name].split()
            more[name] = np.ones([sizes.get(a, 23) for a in letters], np.float32)
        message = (
            rf"^layout {layout.name} cannot hold {', '.join(names)}: it has no such parameter$"
        )
        yield f"has no {first}", Case(layout, from_leaves(more), layout.semantics, message)


def lacking(layout: Layout) -> Iterator[tuple[str, Case]]:
    """A tensor that is required, or comes with another, is missing."""
    params = params_of(layout)
    for group in dict.fromkeys(entry.group for entry in layout.entries):
        members = [leaf for e in layout.entries if e.group == group for leaf in e.leaves]
        for leaf in members:
            if leaf in ("query.kernel", "key.kernel", "value.kernel"):
                continue  # without these there are no parameters at all
            if leaf in ("bias_k", "bias_v", *NORMS):
                continue  # refused as parameters, wherever they go
            of = [other for other in members if other.startswith("gate")]
            dropped = [leaf, "out.bias"] if leaf == "out.kernel" else [leaf]
            dropped = of if leaf == "gate.kernel" and of else dropped
            dropped = [name for name in dropped if name in held(layout)]
            if group and len(members) == 1:
                continue  # there or not, as the user likes
            fillable = all(name.endswith(".bias") for name in dropped)
            way_out = "; a bias of zeros changes nothing: fill_bias='zeros' " if fillable else "$"
            if group:
                rest = ", ".join(name for name in members if name not in dropped)
                message = (
                    rf"^layout {layout.name} holds {', '.join(members)} together or not at all; "
                    rf"there: {rest}; missing: {', '.join(dropped)}{way_out}"
                )
            else:
                own = [name for name in members if name in dropped]
                remedy = ": heads are concatenated here, .*" if "out.kernel" in own else ""
                message = (
                    rf"^layout {layout.name} needs {', '.join(own)}, which is not there{remedy}"
                    f"{way_out}"
                )
            case = Case(layout, without(params, *dropped), layout.semantics, message)
            yield f"{leaf} is not there", case


def behaviour(layout: Layout) -> Iterator[tuple[str, Case]]:
    """Settings that the layer does not have."""
    params = params_of(layout)
    for field in fields(Semantics):
        if field.name in EVALUATION | layout.holds:
            continue
        changed: dict[str, Any] = {field.name: OTHER[field.name]}
        if field.name == "qk_norm_scope" and layout.semantics.qk_norm_scope == "heads":
            changed["qk_norm_scope"] = "head"
        if changed[field.name] == getattr(layout.semantics, field.name):
            changed["qk_norm"] = "layer"
        if field.name == "dropout_broadcast" and "dropout_rate" in layout.holds:
            changed["dropout_rate"] = 0.1
        if field.name == "dropout_broadcast" and "dropout_rate" not in layout.holds:
            continue  # without dropout nothing is shared
        if field.name in NORM_FIELDS[1:] and params.query_norm is None:
            continue  # of a norm that is not there
        shown = re.escape(repr(changed[field.name]))
        message = (
            rf"^layout {layout.name} cannot hold semantics.{field.name}={shown}: its layer always "
            rf"has "
        )
        yield field.name, Case(layout, params, replace(layout.semantics, **changed), message)


def dtypes(layout: Layout) -> Iterator[tuple[str, Case]]:
    """Arrays that are packed into one have one dtype."""
    for entry in layout.entries:
        if len(entry.leaves) == 1:
            continue
        mixed: dict[str, Any] = dict(leaves(params_of(layout)))
        mixed[entry.leaves[1]] = mixed[entry.leaves[1]].astype(np.float16)
        a, b, *rest = entry.leaves
        others = "".join(f", {c} float32" for c in rest)
        message = (
            rf"^{entry.key} packs arrays of one dtype, got {a} float32, {b} float16{others}: "
            "cast them first$"
        )
        yield f"{entry.key} packed", Case(layout, from_leaves(mixed), layout.semantics, message)


def apart(layout: Layout) -> Iterator[tuple[str, Case]]:
    """Sizes that another layout of the framework holds."""
    letters, reason = layout.apart
    if letters:
        size = check(params_of(layout))["Dq"]
        same = sized(layout, **dict.fromkeys(letters.split(), size))
        shown = " = ".join(letters.split())
        message = rf"^layout {layout.name} does not hold {shown}: {re.escape(reason)}$"
        yield shown, Case(layout, same, layout.semantics, message)


CASES = {
    f"{layout.name}: {name}": case
    for layout in registry.LAYOUTS
    for make in (ties, absent, lacking, behaviour, dtypes, apart)
    for name, case in make(layout)
}


PARAMS = params_of(attention_blocks.named("torch"))
TORCH = transform.export_params(attention_blocks.named("torch"), PARAMS)
T5 = transform.export_params(
    attention_blocks.named("t5"), params_of(attention_blocks.named("t5")), Semantics(scale=1.0)
)
POSITIONS = {"relative_attention_bias.weight": np.ones((32, 6), np.float32)}


class Import(NamedTuple):
    """Tensors that are imported, and the message."""

    layout: str
    state: dict[str, Any]
    num_heads: int | None
    message: str


IMPORTS = {
    "added": Import("t5", T5 | POSITIONS, 6, r"^a\.relative_attention_bias\.weight adds to the logits"),
    "unknown": Import("torch", TORCH | {"gate": TORCH["bias_k"]}, 6, r"^unknown key 'gate' under"),
    "missing": Import(
        "torch", {k: x for k, x in TORCH.items() if k != "bias_k"}, 6, r"^missing key 'bias_k'"
    ),
    "no heads": Import("torch", TORCH, None, r"does not store the head count: pass num_heads="),
    "bad heads": Import("torch", TORCH, 0, r"^num_heads must be a positive integer, got 0$"),
    "no array": Import("torch", TORCH | {"bias_k": 3}, 6, r"^a\.bias_k: expected a floating array"),
    "leading": Import(
        "torch", TORCH | {"bias_k": np.ones((2, 1, 1, 24), np.float32)}, 6,
        r"^a\.bias_k: expected leading axes \(\) as in a\.in_proj_weight, then \(1 1 \(N H\)\), "
        r"got shape \(2, 1, 1, 24\)$",
    ),
    "nothing": Import(
        "torch",
        {"in_proj_weight": np.ones((0, 0), "f"), "out_proj.weight": np.ones((0, 0), "f")}, 6,
        r"^H, Dq, Do, h = 0: there is no attention in it; got a\.in_proj_weight of shape \(0, 0\)",
    ),
    "sizes": Import(
        "torch",
        TORCH | {"out_proj.weight": np.ones((23, 24), "f"), "out_proj.bias": np.ones(23, "f")}, 6,
        r"^layout torch cannot hold Do=23 with Dq=24: out_proj of nn\.MultiheadAttention is square; "
        r"got a\.out_proj\.weight of shape \(23, 24\) and a\.in_proj_weight of shape \(72, 24\)$",
    ),
}  # fmt: skip


def refused_import(name: str) -> pytest.ExceptionInfo[ValueError]:
    """Imports a case under the prefix `a`, which the messages name."""
    case = IMPORTS[name]
    state = {f"a.{key}": array for key, array in case.state.items()}
    with pytest.raises(ValueError, match=case.message) as found:
        transform.import_params(
            [attention_blocks.named(case.layout)], state, num_heads=case.num_heads, prefix="a"
        )
    return found


def refused_export(name: str) -> pytest.ExceptionInfo[ValueError]:
    """Exports a case."""
    case = CASES[name]
    with pytest.raises(ValueError, match=case.message) as found:
        transform.export_params(case.layout, case.params, case.semantics)
    return found


def refused_layer() -> pytest.ExceptionInfo[ValueError]:
    """A live layer of several dtypes."""
    mixed: dict[str, Any] = dict(leaves(PARAMS)) | {"bias_k": np.ones((6, 4), np.float16)}
    message = r"^a live layer holds arrays of one dtype: .* is float32, .* is float16; cast them"
    with pytest.raises(ValueError, match=message) as found:
        validation.one_dtype(from_leaves(mixed))
    return found


def test_every_case_is_refused_and_reaches_every_error() -> None:
    """A `raise` that no case reaches fails here: its message would be unread."""
    source = ast.parse(inspect.getsource(validation))
    raises = {node.lineno for node in ast.walk(source) if isinstance(node, ast.Raise)}
    refused = [refused_export(name) for name in CASES] + [refused_import(name) for name in IMPORTS]
    reached = {found.traceback[-1].lineno + 1 for found in [*refused, refused_layer()]}
    assert reached == raises


FIXED = [layout for layout in registry.LAYOUTS if "scale" not in layout.holds]


@pytest.mark.parametrize("layout", FIXED)
def test_a_scale_of_another_last_bit_is_held(layout: Layout) -> None:
    """1 / math.sqrt(H) and H**-0.5 may differ; a scale that differs by more is refused."""
    params = params_of(layout)
    scale = layout.semantics.scale or check(params)["H"] ** -0.5
    for factor in (1 + 1e-15, 1 - 1e-13):
        held = replace(layout.semantics, scale=scale * factor)
        assert transform.export_params(layout, params, held)
    other = replace(layout.semantics, scale=scale * (1 + 1e-9))
    shown = re.escape(repr(scale * (1 + 1e-9)))
    message = rf"^layout {layout.name} cannot hold semantics.scale={shown}: its layer always has "
    with pytest.raises(ValueError, match=message + re.escape(repr(scale))):
        transform.export_params(layout, params, other)


@pytest.mark.parametrize("layout", registry.LAYOUTS)
def test_what_is_spoiled_above_is_held(layout: Layout) -> None:
    for params in (params_of(layout), sized(layout)):
        state = transform.export_params(layout, params, layout.semantics)
        present = leaves(params)
        assert set(state) == {e.key for e in layout.entries if e.leaves[0] in present}
        assert {field_of(x) for x in present} == {field_of(x) for x in held(layout)}
    rate = Semantics(**{**vars(layout.semantics), "dropout_rate": 0.1})
    if "dropout_rate" in layout.holds:
        assert transform.export_params(layout, params_of(layout), rate)


def test_every_kind_of_error_of_every_table_is_among_them() -> None:
    for layout in registry.LAYOUTS:
        names = [name.split(": ")[1] for name in CASES if name.startswith(f"{layout.name}: ")]
        assert {f"{letter} is not {tied}" for letter, (tied, _) in layout.ties.items()} <= {*names}
        assert {"scale", "logits_soft_cap", "add_zero_attn", "qk_norm"} - layout.holds <= {*names}
        packed = {e.key for e in layout.entries if len(parse(e.axes)) and len(e.leaves) > 1}
        assert {f"{key} packed" for key in packed} <= {*names}
        lacks = set(held(layout)) != CANONICAL.keys()
        assert lacks == any(name.startswith("has no ") for name in names)
        assert bool(layout.apart[0]) == any(" = " in name for name in names)
