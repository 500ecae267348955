"""Data and tensor parallel layers: nothing travels but one sum after the output projection."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

import jaxmha
from jaxmha import Mask, MHAParams, Semantics, sharding
from tests import drawn, tolerance
from tests.drawn import to_jax
from tests.sharding.devices import BOTH, assert_alike, mesh, put
from tests.sharding.hlo import Collective, collectives

B, T, D, H = 4, 47, 24, 5
RNG = np.random.default_rng(0)
X = to_jax(RNG.standard_normal((B, T, D)), jnp.float32)
COTANGENT = to_jax(RNG.standard_normal((B, T, D)), jnp.float32)
P: Any = PartitionSpec
NAMES: dict[str, Any] = {"data": "data", "tensor": "tensor"}


def params(N: int = 8, K: int = 4) -> MHAParams:
    return drawn.params(num_heads=N, num_kv_heads=K, features=D, head_dim=H)


def layer(**options: Any) -> Any:
    def run(params: MHAParams, x: Any) -> Any:
        return jaxmha.multi_head_attention(params, x, is_causal=True, **options)

    return run


def with_gradients(run: Any) -> Any:
    def both(params: MHAParams, x: Any, grad: Any) -> Any:
        out, pull = jax.vjp(run, params, x)
        return out, *pull(grad)

    return both


def placed(mesh: Mesh, weights: MHAParams, **names: Any) -> tuple[Any, ...]:
    specs = sharding.specs(weights, mesh=mesh, **names)
    x = sharding.activations(**names)
    return jax.device_put(weights, sharding.named(mesh, specs)), *(
        put(mesh, y, *x) for y in (X, COTANGENT)
    )


def entered(mesh: Mesh, **names: Any) -> Any:
    """Explicit types say everything; else the names are given."""
    if AxisType.Explicit in mesh.axis_types:
        return jax.set_mesh(mesh)
    return sharding.use(mesh, **names)


def assert_layer(got: Any, expected: Any) -> None:
    """A constant added to all keys changes nothing: its gradient is rounding error."""
    (out, grads, dx), (out_, grads_, dx_) = got, expected
    noise = np.abs(np.asarray(grads.key.bias)).max()
    scale = tolerance.floor(np.asarray(grads_.query.bias), np.float32)
    assert noise <= BOTH * tolerance.FLOORS["float32"] * scale
    grads, grads_ = (x._replace(key=x.key._replace(bias=None)) for x in (grads, grads_))
    assert_alike((out, grads, dx), (out_, grads_, dx_))


def one_sum(found: list[Collective], size: int) -> bool:
    """True if there is one all-reduce, of the output."""
    return [(c.kind, c.bytes, c.times) for c in found] == [("all-reduce", size, 1)]


def sums_of(found: list[Collective], shape: str) -> int:
    return sum(c.times * c.shapes.count(shape) for c in found)


@pytest.mark.parametrize(
    "explicit",
    [pytest.param(False, id="auto", marks=pytest.mark.slow), pytest.param(True, id="explicit")],
)
def test_layer(explicit: bool) -> None:
    devices, weights = mesh(explicit, data=2, tensor=4), params()
    run = with_gradients(layer())
    expected = jax.jit(run)(weights, X, COTANGENT)
    arrays = placed(devices, weights, **NAMES)
    with entered(devices, **NAMES):
        forward = jax.jit(layer()).lower(*arrays[:2]).compile()
        both = jax.jit(run).lower(*arrays).compile()
        assert one_sum(collectives(forward), B // 2 * T * D * 4)
        assert {c.kind for c in collectives(both)} == {"all-reduce"}
        # Of activations the output and the gradient of the input; gradients of weights over the data.
        assert sums_of(collectives(both), f"f32[{B // 2},{T},{D}]") == 2
        got = both(*arrays)
    assert got[0].sharding.is_equivalent_to(arrays[1].sharding, 3)
    assert got[1].query.kernel.sharding.spec[1] == "tensor"
    assert_layer(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    ("N", "K", "tensor"), [(4, 1, 4), (8, 2, 4), (12, 3, 2), (12, 6, 4), (4, 4, 4)]
)
def test_heads(N: int, K: int, tensor: int, explicit: bool) -> None:
    """Key/value heads that the axis does not divide are on every device."""
    devices, weights = mesh(explicit, data=8 // tensor, tensor=tensor), params(N, K)
    arrays = placed(devices, weights, **NAMES)
    run = with_gradients(layer())
    with entered(devices, **NAMES):
        forward = jax.jit(layer()).lower(*arrays[:2]).compile()
        assert one_sum(collectives(forward), B // (8 // tensor) * T * D * 4)
        got = jax.jit(run)(*arrays)
    assert_layer(got, jax.jit(run)(weights, X, COTANGENT))


@pytest.mark.slow
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("inputs", "sums"), [(1, 1), (2, 2), (3, 3)])
def test_one_sum_each_way(inputs: int, sums: int, padded: bool, explicit: bool) -> None:
    """Tensor parallel alone: the output forward, and each input's gradient backward."""
    devices, weights = mesh(explicit, tensor=4), params()
    mask = Mask.padding(key_value=to_jax(RNG.random((B, T)) < 0.7)) if padded else None

    def run(params: MHAParams, *features: Any) -> Any:
        return jaxmha.multi_head_attention(params, *features, mask=mask)

    def both(params: MHAParams, grad: Any, *features: Any) -> Any:
        out, pull = jax.vjp(run, params, *features)
        return out, pull(grad)

    placed_weights, x, grad = placed(devices, weights, tensor="tensor")
    features = [x, *(put(devices, X * i, *sharding.activations()) for i in (2, 3))][:inputs]
    with entered(devices, tensor="tensor"):
        forward = jax.jit(run).lower(placed_weights, *features).compile()
        backward = jax.jit(both).lower(placed_weights, grad, *features).compile()
    shape = f"f32[{B},{T},{D}]"
    assert one_sum(collectives(forward), B * T * D * 4)
    assert {c.kind for c in collectives(backward)} == {"all-reduce"}
    assert sums_of(collectives(backward), shape) == 1 + sums
    assert sum(c.bytes for c in collectives(backward)) == (1 + sums) * B * T * D * 4


@pytest.mark.slow
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_features_are_split_too(explicit: bool) -> None:
    names = {"data": None, "fsdp": "fsdp", "tensor": "tensor"}
    devices, weights = mesh(explicit, fsdp=4, tensor=2), params()
    arrays = placed(devices, weights, **names)
    assert arrays[0].query.kernel.sharding.spec == P("fsdp", "tensor", None)
    run = with_gradients(layer())
    with entered(devices, **names):
        got = jax.jit(run)(*arrays)
    assert_layer(got, jax.jit(run)(weights, X, COTANGENT))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["blocked", "reference"])
@pytest.mark.parametrize("shared", [(), ("B", "N")])
def test_dropout(implementation: str, shared: tuple[str, ...]) -> None:
    """Every device drops what one alone drops there."""
    devices, weights = mesh(data=2, tensor=4), params()
    run = with_gradients(
        layer(
            semantics=Semantics(dropout_rate=0.3, dropout_broadcast=shared),
            dropout_key=jax.random.key(7),
            implementation=implementation,
        )
    )
    arrays = placed(devices, weights, **NAMES)
    with entered(devices, **NAMES):
        got = jax.jit(run)(*arrays)
    assert_layer(got, jax.jit(run)(weights, X, COTANGENT))


HEADS = [to_jax(RNG.standard_normal((B, T, n, H)), jnp.float32) for n in (8, 4, 4, 8)]
CASES: dict[str, dict[str, Any]] = {
    "padded": {"key_value_seq_lengths": jnp.asarray([31, 47, 0, 1]), "fully_masked": "mean"},
    "window": {"local_window_size": (7, 3)},
    "segments": {"segment_ids": to_jax(np.sort(RNG.integers(0, 4, (B, T)), 1))},
    "padding": {"mask": Mask.padding(key_value=to_jax(RNG.random((B, T)) < 0.7))},
    "dense": {"mask": to_jax(RNG.random((B, 8, T, T)) < 0.7)},
    "bias": {"bias": to_jax(RNG.standard_normal((1, 8, T, T)), jnp.float32)},
    "weights": {"return_weights": True, "return_lse": True, "is_causal": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", CASES)
def test_heads_alone(name: str, explicit: bool) -> None:
    """Without projections nothing travels at all, but the gradient of a bias that rows share."""
    devices = mesh(explicit, data=2, tensor=4)

    def run(q: Any, k: Any, v: Any, grad: Any) -> Any:
        def out(*heads: Any) -> Any:
            return jaxmha.dot_product_attention(*heads, **CASES[name])

        found, pull = jax.vjp(out, q, k, v)
        first, rest = (found[0], found[1:]) if isinstance(found, tuple) else (found, None)
        grads = grad if rest is None else (grad, *(jnp.zeros_like(x) for x in rest))
        return found, first, pull(grads)

    expected = jax.jit(run)(*HEADS)
    arrays = [put(devices, x, "data", None, "tensor") for x in HEADS]
    with entered(devices, **NAMES):
        compiled = jax.jit(run).lower(*arrays).compile()
        assert collectives(compiled) == []
        assert_alike(compiled(*arrays), expected)


@pytest.mark.slow
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_flax(kind: str, explicit: bool) -> None:
    from jaxmha.flax import linen as own_linen
    from jaxmha.flax import nnx as own_nnx

    devices, weights = mesh(explicit, data=2, tensor=4), params(8, 8)
    arrays = placed(devices, weights, **NAMES)
    mask = to_jax(np.tril(np.ones((T, T), bool)))[None, None]
    if kind == "linen":

        def run(params: MHAParams, x: Any) -> Any:
            module, variables = own_linen.MultiHeadDotProductAttention.from_params(params)
            return module.apply(variables, x, mask=mask)

    else:

        def run(params: MHAParams, x: Any) -> Any:
            module = own_nnx.MultiHeadAttention.from_params(params, decode=False)
            return module(x, mask=mask)

    both = with_gradients(run)
    with entered(devices, **NAMES):
        forward = jax.jit(run).lower(*arrays[:2]).compile()
        got = jax.jit(both)(*arrays)
    assert one_sum(collectives(forward), B // 2 * T * D * 4)
    assert_layer(got, jax.jit(with_gradients(layer()))(weights, X, COTANGENT))


@pytest.mark.parametrize(
    ("device", "platform", "call"),
    [("h200", "cuda", "__cudnn$fmhaSoftmax"), ("tpu", "tpu", "tpu_custom_call")],
)
def test_kernels_see_one_device(
    device: str, platform: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel is called on the batch rows and heads of one device, in a manual computation."""
    from jax._src.cudnn import fused_attention_stablehlo as private

    monkeypatch.setattr(private, "check_cudnn_version", lambda: 91900)
    make: Any = jax.ShapeDtypeStruct
    devices = mesh(data=2, tensor=4)
    place = sharding.named(devices, sharding.spec("data", None, "tensor"))
    heads = [make((6, 256, n, 64), jnp.bfloat16, sharding=place) for n in (12, 4, 4)]

    def run(q: Any, k: Any, v: Any) -> Any:
        name = {"cuda": "cudnn", "tpu": "splash"}[platform]
        return jaxmha.dot_product_attention(q, k, v, is_causal=True, implementation=name)

    with sharding.use(devices, **NAMES), jaxmha.lowering_for(device):
        text = jax.jit(run).trace(*heads).lower(lowering_platforms=(platform,)).as_text()
    lines = [line for line in text.splitlines() if call in line]
    assert lines
    assert "sdy.manual_computation" in text
    sizes = {"cuda": "tensor<3x256x3x64xbf16>", "tpu": "tensor<3x3x256x64xbf16>"}[platform]
    assert any(sizes in line for line in text.splitlines() if call in line), lines[0][:2000]


def test_specs() -> None:
    grouped, weights = params(8, 4), params(8, 1)
    make: Any = AbstractMesh
    sizes = make((3, 4), ("fsdp", "tensor"))
    found = sharding.specs(weights, mesh=sizes, data=None, fsdp="fsdp", tensor="tensor")
    assert found.query.kernel == P("fsdp", "tensor", None)
    assert found.query.bias == P("tensor", None)
    assert found.key == found.value
    assert found.key.kernel == P("fsdp", None, None)
    assert found.out == jaxmha.Projection(P("tensor", None, "fsdp"), P(None))
    found = sharding.specs(grouped, mesh=sizes, tensor="tensor")
    assert found.value == jaxmha.Projection(P(None, "tensor", None), P("tensor", None))
    # An axis that does not divide stays whole: D = 24 by 7.
    found = sharding.specs(grouped, mesh=make((7, 4), ("fsdp", "tensor")), fsdp="fsdp")
    assert found.query.kernel == P(None, None, None)
    stacked = jax.tree.map(lambda x: jnp.stack([x] * 3), grouped)
    found = sharding.specs(stacked, mesh=sizes, tensor="tensor")
    assert found.out is not None
    assert found.out.kernel == P(None, "tensor", None, None)
    with pytest.raises(ValueError, match="N=8 query heads are not a multiple"):
        sharding.specs(grouped, mesh=sizes, tensor=("fsdp", "tensor"))
    with pytest.raises(ValueError, match=r"the mesh has axes .*, not 'heads'"):
        sharding.specs(grouped, mesh=sizes, tensor="heads")
    for known in (sizes, None):
        with pytest.raises(ValueError, match="each mesh axis may be given once"):
            sharding.specs(grouped, mesh=known, fsdp="fsdp", tensor="fsdp")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"data": "rows"}, "the mesh has axes"),
        ({"data": "data", "tensor": "data"}, "may be given once"),
        ({"data": "data", "zigzag": True}, "zigzag needs context"),
        ({"context": ("data", "tensor")}, "context must be one mesh axis, got"),
        ({"data": 0}, "must be given by name, .* got int"),
    ],
)
def test_names_that_do_not_fit(names: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        sharding.use(mesh(data=2, tensor=4), **names)
    with pytest.raises(ValueError, match="devices must be an integer of at least 1, got 0"):
        sharding.zigzag(np.arange(8), 0, axis=0)


@pytest.mark.slow_variants("other0")
@pytest.mark.parametrize("other", [{"rows": 2}, {"data": 4}])
def test_two_meshes(other: Any) -> None:
    """Axes that the mesh in force lacks, or has in another size, are not left out silently."""
    with (
        jax.set_mesh(mesh(**other)),
        sharding.use(mesh(data=2), data="data"),
        pytest.raises(ValueError, match="one mesh to both"),
    ):
        jaxmha.multi_head_attention(params(), X)


@pytest.mark.parametrize(("letter", "spec"), [("B", P("tensor")), ("T", P(None, "tensor"))])
def test_an_axis_of_two_purposes(letter: str, spec: Any) -> None:
    devices = mesh(True, tensor=4)
    weights, _, _ = placed(devices, params(), tensor="tensor")
    message = (
        f"{letter} and heads are both sharded over axis 'tensor' of the mesh: make {letter} of the"
    )
    with jax.set_mesh(devices):
        x = put(devices, X[:, :44], *spec)
        for run in (jaxmha.multi_head_attention, jaxmha.project):
            with pytest.raises(ValueError, match=message):
                run(weights, x)
        with pytest.raises(ValueError, match=message):
            jaxmha.project(weights, put(devices, X), x)


@pytest.mark.slow
def test_nothing_is_declared_and_all_is_right() -> None:
    """Without `use` the compiler chooses what to send; outputs are the same."""
    devices, weights = mesh(data=2, tensor=4), params()
    run = with_gradients(layer())
    got = jax.jit(run)(*placed(devices, weights, **NAMES))
    assert_layer(got, jax.jit(run)(weights, X, COTANGENT))


@pytest.mark.slow
def test_inside_shard_map() -> None:
    """Axes that are manual already are left alone."""
    devices = mesh(data=2, tensor=4)

    def run(q: Any, k: Any, v: Any) -> Any:
        return jaxmha.dot_product_attention(q, k, v, is_causal=True)

    spec = P("data", None, "tensor")
    with sharding.use(devices, **NAMES):
        mapped = jax.shard_map(run, mesh=devices, in_specs=(spec,) * 3, out_specs=spec)
        assert_alike(jax.jit(mapped)(*HEADS[:3]), run(*HEADS[:3]))


@pytest.mark.parametrize("kind", ["score_mod", "mask_mod"])
def test_functions_are_traced_without_the_explicit_mesh(kind: str) -> None:
    """They run on the arrays of one device: their own types have no explicit axes."""
    heads = X.reshape(B, T, 8, 3)[:, :7]
    functions: dict[str, Any] = {
        "score_mod": lambda x, b, n, i, j: x - (n * (i - j)).astype(x.dtype),
        "mask_mod": lambda b, n, i, j: i - j < 2,
    }

    def attend(x: Any, function: Any) -> Any:
        call: Any = jaxmha.dot_product_attention
        return call(x, x, x, **{kind: function})

    explicit = mesh(explicit=True, data=2)
    with jax.set_mesh(explicit):  # first: the trace of a function is kept
        found = attend(put(explicit, heads, "data"), functions[kind])
    assert_alike(np.asarray(found), attend(heads, functions[kind]))


@pytest.mark.parametrize("rows", [[0, 0, 3, 1], [2, 1, 3]])
def test_rows_of_a_cache_on_an_explicit_mesh(rows: list[int]) -> None:
    """They stay sharded if the mesh divides their number."""
    drawn_keys = np.asarray(RNG.standard_normal((4, 2, 7, 3)), np.float32)
    lengths, explicit = np.asarray([3, 1, 7, 5], np.int32), mesh(explicit=True, data=2)
    with jax.set_mesh(explicit):
        keys, counts = put(explicit, drawn_keys, "data"), put(explicit, lengths, "data")
        cache = jaxmha.KVCache(keys, keys, counts)
        for taken in (cache.take(np.asarray(rows)), jax.jit(cache.take)(to_jax(rows))):
            np.testing.assert_array_equal(taken.value, drawn_keys[rows])
            np.testing.assert_array_equal(taken.lengths, lengths[rows])
            sharded = jax.typeof(taken.key).sharding.spec[0]
            assert sharded == ("data" if len(rows) % 2 == 0 else None)
