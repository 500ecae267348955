"""`describe` says what the public functions compute, what it costs, and how frameworks store it."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

import jaxmha
from jaxmha import Semantics
from jaxmha.converters import describe, flax, keras, torch
from jaxmha.implementations.native import library
from jaxmha.introspect import graph_svg
from jaxmha.introspect.framework_differences import FACTS, FRAMEWORKS
from jaxmha.introspect.graph import DataFlow
from jaxmha.introspect.node import Node

# Primes, and so large that products are plain ones: small ones are summed in blocks of four.
SIZES: dict[str, Any] = {
    "num_heads": 6, "num_kv_heads": 3, "head_dim": 31, "value_head_dim": 37, "features": 41,
    "key_features": 43, "value_features": 47, "out_features": 53,
}  # fmt: skip
LENGTHS: dict[str, Any] = {"query_len": 509, "kv_len": 601, "batch": 2}
SQUARE: dict[str, Any] = {"num_heads": 4, "features": 20}


@pytest.fixture(autouse=True, scope="module")
def no_native_kernels() -> Iterator[None]:
    """XLA counts no operations of custom calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(library.SWITCH, "0")
        yield


def shapes(dtype: Any = jnp.float32, **sizes: Any) -> Any:
    return jax.eval_shape(
        lambda: jaxmha.init_params(jax.random.key(0), **{**SIZES, **sizes}, dtype=dtype)
    )


def given(node: Node) -> Any:
    return jax.ShapeDtypeStruct(node.shape, node.dtype)  # type: ignore[no-untyped-call]


def cost(function: Any, *arguments: Any) -> dict[str, float]:
    """XLA's own count of a program, which is not compiled for it."""
    found: Any = jax.jit(function).lower(*arguments).cost_analysis()
    return {**found, "flops": found["flops"] + found.get("transcendentals", 0.0)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("extras", [{}, {"use_bias_kv": True}])
def test_shapes_are_those_of_the_public_functions(dtype: str, extras: dict[str, Any]) -> None:
    flow = describe(**SIZES, **LENGTHS, **extras, dtype=dtype)
    params = shapes(jnp.dtype(dtype), **extras)
    inputs = [given(flow[name]) for name in ("query", "key", "value")]
    heads = jax.eval_shape(jaxmha.project, params, *inputs)
    for name, expected in zip(("query", "key", "value"), heads, strict=True):
        assert (flow[f"{name}_heads"].shape, flow[f"{name}_heads"].dtype) == seen(expected)
    attend = partial(jaxmha.multi_head_attention, return_weights=True)
    out, weights = jax.eval_shape(attend, params, *inputs)
    assert (flow["out"].shape, flow["out"].dtype) == seen(out)
    assert flow["weights"].shape == flow["logits"].shape == weights.shape
    if not extras:
        attend = partial(jaxmha.dot_product_attention, return_weights=True)
        context, weights = jax.eval_shape(attend, *heads)
        assert (flow["context"].shape, flow["context"].dtype) == seen(context)
        assert flow["weights"].shape == weights.shape
    assert seen(jax.eval_shape(jaxmha.combine, params, given(flow["context"]))) == seen(out)


def seen(array: Any) -> tuple[tuple[int, ...], str]:
    return array.shape, str(array.dtype)


def test_flops_are_those_that_xla_counts() -> None:
    flow, params = describe(**SIZES, **LENGTHS), shapes()
    inputs = [given(flow[name]) for name in ("query", "key", "value")]
    heads = [given(flow[f"{name}_heads"]) for name in ("query", "key", "value")]
    projected = sum(flow[f"{name}_heads"].flops for name in ("query", "key", "value"))
    assert cost(jaxmha.project, params, *inputs)["flops"] == pytest.approx(projected, rel=1e-6)
    combined = cost(jaxmha.combine, params, given(flow["context"]))["flops"]
    assert combined == pytest.approx(flow["out"].flops, rel=1e-6)
    reference = partial(jaxmha.dot_product_attention, implementation="reference")
    counted = cost(reference, *heads)["flops"]
    attended = sum(flow[name].flops for name in ("scaled_query", "logits", "weights", "context"))
    # Beside: what it does for rows with nothing left, some operations for each.
    rows = math.prod(flow["logits"].shape[:3])
    assert 0 <= counted - attended <= 16 * rows < 1e-3 * attended


def softmax(x: Any) -> Any:
    exps = jnp.exp(x - x.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def test_flops_of_one_node_are_those_that_xla_counts() -> None:
    flow = describe(None, Semantics(logits_soft_cap=3.0), **SIZES, **LENGTHS)
    counted = cost(softmax, given(flow["capped_logits"]))["flops"]
    assert counted == pytest.approx(flow["weights"].flops, rel=1e-6)
    counted = cost(lambda x: 3.0 * jnp.tanh(x / 3.0), given(flow["logits"]))["flops"]
    assert counted == pytest.approx(flow["capped_logits"].flops, rel=1e-6)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_flops_of_norms_are_those_that_xla_counts(kind: Any) -> None:
    params = shapes()
    scale = jax.ShapeDtypeStruct((31,), "float32")  # type: ignore[no-untyped-call]
    params = params._replace(query_norm=scale, key_norm=scale)
    semantics = Semantics(qk_norm=kind)
    flow = describe(params, semantics, **LENGTHS)
    inputs = [given(flow[name]) for name in ("query", "key", "value")]
    counted = cost(partial(jaxmha.project, semantics=semantics), params, *inputs)["flops"]
    names = [f"{name}_heads" for name in ("query", "key", "value")]
    ours = sum(flow[name].flops for name in (*names, "query_normed", "key_normed"))
    assert counted == pytest.approx(ours, rel=1e-6)
    assert flow["scaled_query"].inputs == ("query_normed",)


def test_bytes_are_those_that_xla_counts() -> None:
    """Of a product and of the softmax's input and output; a chain reads its results again."""
    flow = describe(**SIZES, **LENGTHS, use_bias=False)
    product = cost(partial(jnp.einsum, "btd,dnh->btnh"), *operands(flow, "query_heads"))
    assert product["bytes accessed"] == flow["query_heads"].bytes
    assert flow["weights"].bytes == 2 * 4 * math.prod(flow["logits"].shape)


def operands(flow: DataFlow, name: str) -> list[Any]:
    node = flow[name]
    arrays = [jax.ShapeDtypeStruct(one.shape, flow.dtype) for one in node.parameters]  # type: ignore[no-untyped-call]
    return [*(given(flow[other]) for other in node.inputs), *arrays]


def test_fused_attention_reads_heads_and_writes_the_context() -> None:
    flow = describe(**SIZES, **LENGTHS, is_causal=True, mask=(2, 1, 509, 601))
    outside = sum(flow[f"{name}_heads"].bytes for name in ("query", "key", "value"))
    heads = [flow[name] for name in ("query_heads", "key_heads", "value_heads", "context")]
    attention = sum(4 * math.prod(node.shape) for node in heads) + 2 * 509 * 601
    assert flow.bytes_fused == outside + attention + flow["out"].bytes < flow.bytes


def test_costs_add_up() -> None:
    flow = describe(**SIZES, **LENGTHS)
    assert flow.flops == sum(node.flops for node in flow.nodes) > 5e8
    data = flow.to_json()
    assert (data["flops"], data["bytes"]) == (flow.flops, flow.bytes)
    assert json.loads(json.dumps(data)) == json.loads(json.dumps(data, allow_nan=False))


def test_every_part_is_a_node() -> None:
    flow = describe(
        None,
        Semantics(dropout_rate=0.1, add_zero_attn=True, logits_soft_cap=3.0),
        **SIZES,
        **LENGTHS,
        use_bias_kv=True,
        is_causal=True,
        mask=(2, 1, 1, 601),
    )
    names = [node.name for node in flow.nodes]
    assert names[-6:] == ["mask", "masked_logits", "weights", "kept_weights", "context", "out"]
    assert {"key_extended", "value_extended", "capped_logits"} <= set(names)
    assert (flow["mask"].axes, flow["mask"].shape) == ("B 1 1 S", (2, 1, 1, 601))
    assert (flow["logits"].axes, flow["logits"].shape) == ("B N T S+2", (2, 6, 509, 603))
    assert flow["masked_logits"].flops == flow["key_extended"].flops == 0
    allowed = np.tril(np.ones((509, 601), bool))
    assert flow.pairs == allowed.sum() + 2 * 509
    for position, node in enumerate(flow.nodes):
        assert set(node.inputs) <= set(names[:position])
        assert node.shape == flow[node.name].shape


def test_without_an_output_layer_heads_stand_side_by_side() -> None:
    flow = describe(shapes()._replace(out=None), **LENGTHS)
    assert (flow["out"].shape, flow["out"].flops) == ((2, 509, 6 * 37), 0)


def test_float64_needs_no_x64() -> None:
    flow = describe(**SQUARE, query_len=5, dtype="float64")
    assert flow["logits"].dtype == flow["out"].dtype == "float64"


def test_softmax_dtype_is_reported() -> None:
    flow = describe(
        None, Semantics(softmax_dtype="float16"), **SQUARE, query_len=5, dtype="float16"
    )
    assert flow["logits"].dtype == "float32"
    assert "float16" in flow["weights"].formula


def live(framework: str) -> dict[str, tuple[int, ...]]:
    """Arrays of a live layer of 4 heads on 20 features."""
    params = jaxmha.init_params(jax.random.key(0), num_heads=4, features=20)
    if framework == "torch":
        state = torch.to_module(params).state_dict()
        return {key: tuple(x.shape) for key, x in state.items()}
    if framework == "keras":
        layer = keras.to_module(params)
        return {"/".join(w.path.split("/")[-2:]): tuple(w.shape) for w in layer.weights}
    if framework == "flax-linen":
        tree = flax.to_module(params, kind="linen")[1]["params"]
        return {key: x.shape for key, x in flatten_dict(tree, sep="/").items()}
    state = nnx.to_flat_state(nnx.state(flax.to_module(params, kind="nnx"), nnx.Param))
    return {"/".join(path): x.get_value().shape for path, x in state}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("framework", ["torch", "keras", "flax-linen", "flax-nnx"])
def test_arrays_are_those_of_a_live_layer(framework: str) -> None:
    flow = describe(**SQUARE, query_len=5, framework=framework)
    shown = {one.name: one.shape for node in flow.nodes for one in node.parameters}
    assert shown == live(framework)
    assert flow.refused is None


@pytest.mark.parametrize(
    ("framework", "more", "why"),
    [
        ("torch", {"num_kv_heads": 2}, "as many key/value heads"),
        ("torch", {"out_features": 7}, "square"),
        ("torch", {"key_features": 7}, None),
        ("keras", {"num_kv_heads": 2}, None),
        ("keras", {"use_bias_kv": True}, "no such parameter"),
        ("flax-linen", {"num_kv_heads": 2}, "nnx has fewer"),
        ("flax-nnx", {"num_kv_heads": 2}, None),
        ("flax-nnx", {"key_features": 7, "value_features": 11}, "in_kv_features"),
        ("flax-linen", {"value_head_dim": 3}, "as wide"),
        ("jax", {"value_head_dim": 3}, None),
    ],
)
def test_what_a_framework_cannot_hold_is_reported(
    framework: str, more: dict[str, Any], why: str | None
) -> None:
    flow = describe(**SQUARE, **more, query_len=5, framework=framework)
    assert (flow.refused is None) == (why is None)
    assert why is None or why in str(flow.refused)


def test_differences_name_known_nodes_and_frameworks() -> None:
    flow = describe(
        shapes(use_bias_kv=True)._replace(query_norm=np.ones(31, "f"), key_norm=np.ones(31, "f")),
        Semantics(qk_norm="rms", dropout_rate=0.1, logits_soft_cap=1.0),
        **LENGTHS,
        mask=(509, 601),
    )
    names = {node.name for node in flow.nodes}
    assert names >= FACTS.keys()
    assert all(FRAMEWORKS.keys() >= facts.keys() for facts in FACTS.values())
    for node in flow.nodes:
        named = [one.framework for one in node.differences]
        assert named == [name for name in FRAMEWORKS if name in named]
    (only,) = {
        one.framework
        for node in describe(**SQUARE, query_len=5, framework="torch").nodes
        for one in node.differences
    }
    assert only == "torch"
    (mask,) = (one for one in flow["mask"].differences if one.framework == "torch")
    assert "attn_mask: True = BLOCKED" in mask.what
    weights = {one.framework: one.what for one in flow["weights"].differences}
    assert "need_weights=False: a row with nothing left is 0" in weights["torch"]
    assert "the mean of all values" in weights["jax"]


def test_differences_of_torch_are_measured() -> None:
    import torch as framework

    framework.manual_seed(0)
    layer = framework.nn.MultiheadAttention(20, 4, dropout=0.5)
    x = framework.randn(5, 3, 20)  # (T, B, Dq): the default
    layer.eval()
    with framework.no_grad():
        out, averaged = layer(x, x, x)
        _, weights = layer(x, x, x, average_attn_weights=False)
        assert layer(x, x, x, need_weights=False)[1] is None
    assert (out.shape, averaged.shape, weights.shape) == ((5, 3, 20), (3, 5, 5), (3, 4, 5, 5))
    assert framework.allclose(averaged, weights.mean(1))
    layer.train()
    rows = layer(x, x, x, average_attn_weights=False)[1].sum(-1)
    assert not framework.allclose(rows, framework.ones_like(rows))  # those after dropout


def boxes(drawing: str) -> dict[str, tuple[float, float, float, float]]:
    root = ElementTree.fromstring(drawing)
    found = {}
    for group in root.iter("{http://www.w3.org/2000/svg}g"):
        rectangle = next(iter(group.iter("{http://www.w3.org/2000/svg}rect")))
        x, y, width, height = (float(rectangle.attrib[k]) for k in ("x", "y", "width", "height"))
        found[group.attrib["data-node"]] = (x, y, x + width, y + height)
    return found


EVERYTHING = Semantics(dropout_rate=0.1, add_zero_attn=True, logits_soft_cap=3.0, qk_norm="layer")


@pytest.mark.parametrize("semantics", [Semantics(), EVERYTHING])
@pytest.mark.parametrize("mask", [None, (2, 1, 509, 601)])
def test_drawing(semantics: Semantics, mask: Sequence[int] | None) -> None:
    params = shapes()
    if semantics.qk_norm:
        params = params._replace(query_norm=np.ones(31, "f"), key_norm=np.ones(31, "f"))
    flow = describe(params, semantics, **LENGTHS, mask=mask)
    drawing = flow.svg()
    drawn = boxes(drawing)
    assert list(drawn) == [node.name for node in flow.nodes]
    for (ax, ay, bx, by), (cx, cy, dx, dy) in combinations(drawn.values(), 2):
        assert bx <= cx or dx <= ax or by <= cy or dy <= ay
    root = ElementTree.fromstring(drawing)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert all(x >= 0 and y >= 0 and a <= width and b <= height for x, y, a, b in drawn.values())
    edges = [p for p in root.iter("{http://www.w3.org/2000/svg}path") if "marker-end" in p.attrib]
    assert len(edges) == sum(len(node.inputs) for node in flow.nodes)
    for edge in edges:  # every one ends on the border of the box that reads
        moves = re.findall(r"([MVH])([\d. ]+)", edge.attrib["d"])
        x, y = map(float, moves[0][1].split())
        for move, to in moves[1:]:
            x, y = (float(to), y) if move == "H" else (x, float(to))
        assert any(
            (y == top and left < x < right) or (x == right and top < y < bottom)
            for left, top, right, bottom in drawn.values()
        )
    texts = list(root.iter("{http://www.w3.org/2000/svg}text"))
    assert min(float(text.attrib["font-size"]) for text in texts) >= 12  # 9 points
    assert any(flow["logits"].formula == text.text for text in texts)
    assert "#010203" not in drawing
    assert "prefers-color-scheme" in drawing


def test_names_on_a_drawing_are_escaped() -> None:
    assert "<b" not in graph_svg._text(0.0, 0.0, "a <b> & c", 12)


def test_printing() -> None:
    flow = describe(**SQUARE, query_len=5)
    lines = str(flow).splitlines()
    assert len(lines) == len(flow.nodes) + 2
    assert lines[-1].split()[-2:] == [f"{flow.flops:,}", f"{flow.bytes:,}"]


def test_unknown_node() -> None:
    with pytest.raises(KeyError, match="softmaxed"):
        describe(**SQUARE, query_len=5)["softmaxed"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"query_len": 5}, TypeError, "num_heads and features"),
        ({**SQUARE, "query_len": 0}, ValueError, "query_len"),
        ({**SQUARE, "query_len": 5, "kv_len": -1}, ValueError, "kv_len"),
        ({**SQUARE, "query_len": 5, "batch": True}, ValueError, "batch"),
        ({**SQUARE, "query_len": 5, "hats": 3}, TypeError, "hats"),
        ({**SQUARE, "query_len": 5, "dtype": "int32"}, TypeError, "int32"),
        ({**SQUARE, "query_len": 5, "framework": "caffe"}, ValueError, "caffe"),
        ({**SQUARE, "query_len": 5, "mask": (3, 5)}, ValueError, r"\(#T, #S\).*\(3, 5\)"),
        ({**SQUARE, "query_len": 5, "mask": (1, 1, 1, 5, 5)}, ValueError, "mask"),
        ({"num_heads": 3, "features": 20, "query_len": 5}, ValueError, "not a multiple"),
        ({**SQUARE, "num_kv_heads": 3, "query_len": 5}, ValueError, "multiple"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        describe(**arguments)


def test_params_have_their_sizes() -> None:
    with pytest.raises(TypeError, match="num_heads"):
        describe(shapes(), query_len=5, num_heads=6)
