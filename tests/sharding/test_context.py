"""Positions on many devices: the same outputs as on one, and only keys and values are sent."""

import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxmha
from jaxmha import Mask, Semantics, mods, sharding
from tests import conformance, drawn
from tests.drawn import to_jax
from tests.sharding.devices import assert_alike, mesh, put
from tests.sharding.hlo import collectives

B, T, N, K, H, h = 2, 56, 6, 2, 5, 7
RNG = np.random.default_rng(1)
HEADS = [
    to_jax(RNG.standard_normal(shape), jnp.float32)
    for shape in ((B, T, N, H), (B, T, K, H), (B, T, K, h), (B, T, N, h))
]
IDS = to_jax(np.sort(RNG.integers(0, 4, (B, T)), 1))
# A dense mask of one row or of one key is a condition, which every order and implementation has.
ONE = {"BS": (B, 1, 1, T), "1S": (1, 1, 1, T), "S": (T,), "BT": (B, 1, T, 1), "1T": (1, 1, T, 1)}
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (9, 3)},
    "causal window": {"is_causal": True, "local_window_size": (5, 0)},
    "padded": {
        "key_value_seq_lengths": jnp.asarray([37, T]),
        "query_seq_lengths": jnp.asarray([T, 50]),
        "is_causal": True,
    },
    "segments": {"segment_ids": IDS, "is_causal": True},
    "padding": {"mask": Mask.padding(key_value=to_jax(RNG.random((B, T)) < 0.7))},
    "offset": {"mask": Mask.causal(jnp.asarray([3, -7]))},
    "offset behind": {"mask": Mask.causal(-20), "local_window_size": (30, 0)},
    "dropout": {"is_causal": True, "dropout_rate": 0.3, "dropout_key": jax.random.key(3)},
    "dropout shared": {
        "dropout_rate": 0.3,
        "dropout_key": jax.random.key(3),
        "dropout_broadcast": ("B", "N"),
    },
    "lse": {"is_causal": True, "return_lse": True},
    "mean": {
        "logits_soft_cap": 2.0,
        "fully_masked": "mean",
        "key_value_seq_lengths": jnp.asarray([0, T]),
        "query_seq_lengths": jnp.asarray([T, 50]),
    },
    **{f"mask {axes}": {"mask": to_jax(RNG.random(s) < 0.6)} for axes, s in ONE.items()},
    "mask mean": {"mask": jnp.zeros((B, 1, 1, T), bool).at[0].set(True), "fully_masked": "mean"},
    "mask nan": {"mask": to_jax(RNG.random((B, 1, T, 1)) < 0.6), "fully_masked": "nan"},
    "bias of keys": {"bias": to_jax(RNG.standard_normal((B, 1, 1, T)), jnp.float32)},
    "bias of heads": {"bias": to_jax(RNG.standard_normal((N, 1, T)), jnp.float32)},
    "mask of heads": {"mask": to_jax(RNG.random((B, N, 1, T)) < 0.6)},
    "bias": {"bias": to_jax(RNG.standard_normal((1, N, T, T)), jnp.float32)},
    "dense": {"mask": to_jax(RNG.random((B, 1, T, T)) < 0.6)},
    "everything": {
        "key_value_seq_lengths": jnp.asarray([37, T]),
        "query_seq_lengths": jnp.asarray([T, 50]),
        "local_window_size": (30, 9),
        "dropout_rate": 0.3,
        "dropout_key": jax.random.key(3),
        "bias": to_jax(RNG.standard_normal((B, 1, 1, T)), jnp.float32),
        "rates": to_jax(RNG.random(N), jnp.float32),
    },
}
DENSE = ("bias", "dense")
GATHERED = (*DENSE, "bias of keys", "bias of heads", "mask of heads", "everything")
ORDERS = {"natural": False, "zigzag": True}
EVERYDAY = ("ring-zigzag-mask BS", "allgather-zigzag-everything")
VARIANTS = [
    f"{implementation}-{order}-{case}"
    for implementation in ("ring", "allgather")
    for order in ORDERS
    for case in CASES
    if (implementation == "allgather" or case not in GATHERED)
    and (order == "natural" or case not in DENSE)
]


def gradients(**options: Any) -> Any:
    """Output, everything else that is returned, and gradients of heads, a bias and rates of ALiBi."""
    learned = {name: options.pop(name) for name in ("bias", "rates") if name in options}

    def run(q: Any, k: Any, v: Any, grad: Any) -> Any:
        def of(heads: Any, learned: Any) -> Any:
            given = options | learned
            if "rates" in given:
                given["score_mod"] = mods.alibi(given.pop("rates"))
            found = jaxmha.dot_product_attention(*heads, **given)
            out, *lse = found if isinstance(found, tuple) else (found,)
            # Gradients of results other than the output are those of the first feature.
            more = [(x * jnp.moveaxis(grad[..., 0], 1, 2)).sum() for x in lse]
            return (out * grad).sum() + sum(more), found

        grads, found = jax.grad(of, (0, 1), has_aux=True)((q, k, v), learned)
        return found, grads

    return run


def placed(devices: int, zigzag: bool, arrays: Any, m: Any, *names: Any) -> list[Any]:
    ordered = [sharding.zigzag(x, devices) if zigzag else x for x in arrays]
    return [put(m, x, *names) for x in ordered]


def true_order(devices: int, got: Any) -> Any:
    """Every array with an axis of positions, by true position, in which that of a bias is."""
    found, (grads, learned) = got

    def turned(x: Any) -> Any:
        axis = x.shape.index(T) if T in x.shape else None
        return x if axis is None else sharding.unzigzag(x, devices, axis)

    found, grads = jax.tree.map(turned, (found, grads))
    return found, (grads, learned)


@pytest.mark.everyday(variant=EVERYDAY)
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients(variant: str) -> None:
    implementation, order, case = variant.split("-")
    zigzag, options = ORDERS[order], CASES[case]
    expected = jax.jit(gradients(**options))(*HEADS)
    devices = mesh(data=2, context=4)
    arrays = placed(4, zigzag, HEADS, devices, "data", "context")
    with sharding.use(devices, data="data", context=("context",), zigzag=zigzag):
        run = jax.jit(gradients(**options, implementation=implementation))
        got, again = run(*arrays), run(*arrays)
    chex.assert_trees_all_equal(got, again, strict=True)
    assert_alike(true_order(4, got) if zigzag else got, expected, variant)


SUMS = [f"{x}-{y}" for x in ("ring", "allgather") for y in ("full", "causal")]


@pytest.mark.everyday(variant=["ring-full"])
@pytest.mark.parametrize("size", [300.0, pytest.param(1e9, marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", SUMS)
def test_weights_of_the_gradient_sum_to_one(variant: str, size: float) -> None:
    """Products round large logits by their shape, which queries and keys of a device have."""
    implementation, case = variant.split("-")
    options = CASES[case]
    devices, rng = mesh(data=1, context=4), np.random.default_rng(0)
    t, s = 4 * 499, 4 * 431
    q, k = (rng.standard_normal((1, n, 1, 40)).astype("f") for n in (t, s))
    arrays = (
        put(devices, x, "data", "context")
        for x in (q * np.float32(size), k, np.zeros_like(k), np.ones_like(q))
    )

    def of(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
        def attend(v: Any) -> Any:
            return jaxmha.dot_product_attention(q, k, v, implementation=implementation, **options)

        return jax.vjp(attend, v)[1](cotangent)[0]

    with sharding.use(devices, data="data", context="context"):
        dv = np.asarray(jax.jit(of)(*arrays), np.float64)
    np.testing.assert_allclose(dv.sum(1), t, rtol=2e-6)


LIVE = [
    f"{order}-{kind}"
    for order in ("ring-natural", "ring-zigzag", "allgather-natural")
    for kind in ("lengths", "padding", "causal")
]


@pytest.mark.everyday(variant=["ring-zigzag-padding", "allgather-natural-lengths"])
@pytest.mark.parametrize("variant", LIVE)
def test_live_logits_of_any_size_beat_masked_ones(variant: str) -> None:
    """Down to the lowest float32, of the only key that is left, wherever the others lie."""
    name, order, kind = variant.split("-")
    lowest = float(np.finfo(np.float32).min)
    logits = np.array([-1.0, -1e38, -2.25e38, lowest], np.float32)
    t, live = 8, np.arange(8) == 0
    query, value = np.ones((4, t, 1, 1), np.float32), np.where(live, 1.0, 7.0).astype("f")
    key = np.where(live, logits[:, None], -logits[:, None]).reshape(4, t, 1, 1)
    value = np.broadcast_to(value.reshape(1, t, 1, 1), query.shape)
    conditions: dict[str, dict[str, Any]] = {
        "lengths": {"key_value_seq_lengths": jnp.ones(4, np.int32)},
        "padding": {"mask": Mask.padding(key_value=jnp.broadcast_to(live, (4, t)))},
        "causal": {"mask": Mask.causal(1 - t)},  # the last row alone has a key
    }
    rows = np.arange(t) == t - 1 if kind == "causal" else np.ones(t, bool)
    devices = mesh(data=2, context=4)

    def of(*heads: Any) -> Any:
        return jaxmha.dot_product_attention(
            *heads, scale=1.0, return_lse=True, implementation=name, **conditions[kind]
        )

    def run(*heads: Any) -> Any:
        (out, lse), back = jax.vjp(of, *heads)
        return out, lse[:, 0, :, None, None], *back((jnp.ones_like(out), jnp.zeros_like(lse)))

    zigzag = ORDERS[order]
    with sharding.use(devices, data="data", context="context", zigzag=zigzag):
        arrays = placed(4, zigzag, (query, key, value), devices, "data", "context")
        found = jax.jit(run)(*arrays)
    out, lse, dq, dk, dv = (
        np.asarray(sharding.unzigzag(x, 4) if zigzag else x)[..., 0, 0] for x in found
    )
    assert np.array_equal(out, np.broadcast_to(np.where(rows, 1.0, 0.0), out.shape))
    assert np.array_equal(lse, np.where(rows, logits[:, None], -np.inf))
    assert np.array_equal(dv, np.broadcast_to(np.where(live, rows.sum(), 0.0), dv.shape))
    assert not np.any(dq)
    assert not np.any(dk)


def test_blocks_of_the_gradient_are_those_across_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = conformance.tilings_of_gradients(monkeypatch)
    conformance.tune(monkeypatch, shard_side=16, shard_tile_bytes=None)
    devices = mesh(data=2, context=4)
    arrays = [jnp.ones((2, T, heads, 3)) for heads in (N, K, K, N)]
    with sharding.use(devices, data="data", context="context"):
        run = jax.jit(gradients(local_window_size=(9, 3), implementation="allgather"))
        jax.eval_shape(run, *placed(4, False, arrays, devices, "data", "context"))
    assert [plan.keys for plan in plans] == [14]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["causal", "causal window", "full"])
@pytest.mark.parametrize("zigzag", [False, True], ids=["natural", "zigzag"])
def test_ring_moves_keys_and_values(case: str, zigzag: bool) -> None:
    """Forward: keys and values to each device they meet; backward: once more, and their gradients
    all the way round and home."""
    devices, P = mesh(data=1, context=8), 8
    t = 2 * 8 * 5
    shapes = (B, t, N, H), (B, t, K, H), (B, t, K, h), (B, t, N, h)
    arrays = [put(devices, jnp.ones(x, jnp.float32), "data", "context") for x in shapes]
    with sharding.use(devices, data="data", context="context", zigzag=zigzag):
        run = gradients(**CASES[case], implementation="ring")
        found = collectives(jax.jit(run).lower(*arrays).compile())
    moved = [c for c in found if c.kind != "all-reduce"]
    assert {c.kind for c in moved} == {"collective-permute"}
    # Else only the value that is differentiated is summed.
    assert all(c.bytes <= 8 for c in found if c.kind == "all-reduce")
    # A window of 6 keys reaches the device before (10 positions each), and in zig-zag order (5
    # each) the one after too. Moves outside of loops that are the same forward and backward are
    # made once.
    hops = (2 if zigzag else 1) if "window" in case else P - 1
    moves = hops * (2 if "window" in case else 3) + 1
    assert sum(c.bytes for c in moved) == moves * B * t // P * K * (H + h) * 4


@pytest.mark.slow
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("implementation", ["ring", "allgather"])
def test_mixed(implementation: str, explicit: bool) -> None:
    """A layer with data, tensor and context parallel at once."""
    D = 16
    names: dict[str, Any] = {"data": "data", "tensor": "tensor"}
    devices = mesh(explicit, data=2, tensor=2, context=2)
    weights = drawn.params(num_heads=4, num_kv_heads=2, features=D)
    x, grad = (to_jax(RNG.standard_normal((B, T, D)), jnp.float32) for _ in range(2))

    def run(params: Any, x: Any, grad: Any, implementation: Any = None) -> Any:
        def out(x: Any, kernels: Any) -> Any:
            own = jax.tree.map(lambda x: x, params)
            own = own._replace(query=own.query._replace(kernel=kernels))
            return jaxmha.multi_head_attention(
                own, x, is_causal=True, semantics=Semantics(dropout_rate=0.2),
                dropout_key=jax.random.key(1), implementation=implementation,
            )  # fmt: skip

        found, pull = jax.vjp(out, x, params.query.kernel)
        return found, pull(grad)

    expected = jax.jit(run)(weights, x, grad)
    specs = sharding.specs(weights, mesh=devices, **names)
    placed = jax.device_put(weights, sharding.named(devices, specs))
    arrays = [put(devices, y, *sharding.activations(**names, context="context")) for y in (x, grad)]
    with jax.set_mesh(devices) if explicit else sharding.use(devices, **names, context="context"):
        got = jax.jit(run, static_argnums=3)(placed, *arrays, implementation)
        moved = collectives(
            jax.jit(lambda p, x: run(p, x, x, implementation)[0]).lower(placed, arrays[0]).compile()
        )
    kinds = {"ring": {"collective-permute"}, "allgather": {"all-gather"}}[implementation]
    assert {c.kind for c in moved} == {"all-reduce"} | kinds
    assert_alike(got, expected)


def test_explain() -> None:
    q, k, v, _ = HEADS
    reasons = dict(jaxmha.explain(q, k, v, implementation=("ring", "allgather")).reasons)
    assert all(
        reason is not None and "jaxmha.sharding.use" in reason for reason in reasons.values()
    )
    with sharding.use(mesh(data=2, context=4), data="data", context="context"):
        assert jaxmha.explain(q, k, v, is_causal=True).chosen == "ring"
        assert jaxmha.explain(q, k, v, **CASES["bias"]).chosen == "allgather"
        assert "allgather takes both" in str(jaxmha.explain(q, k, v, **CASES["bias of heads"]))
        odd = jaxmha.explain(
            *(x[:, 1:] for x in (q, k, v)), implementation=("ring", "allgather", "blocked")
        )
        assert odd.chosen == "blocked"
        assert "T=55" in str(odd)
        none = jaxmha.explain(q[:, :0], k, v, implementation=("ring", "blocked"))
        assert "T=0 and S=56 must be positive multiples of 4" in str(none)
    with sharding.use(mesh(data=2, context=4), data="data", context="context", zigzag=True):
        for case in DENSE:
            rows = jaxmha.explain(q, k, v, **CASES[case])
            assert rows.chosen is None
            assert "rows of biases and dense masks are not in zig-zag order" in str(rows)
        assert jaxmha.explain(q, k, v, is_causal=True).chosen == "ring"
        with pytest.raises(ValueError, match="zig-zag order"):
            jaxmha.dot_product_attention(q, k, v, return_weights=True)


@pytest.mark.parametrize("kind", ["learned", "zero"])
def test_extra_positions_have_no_place_in_zigzag_order(kind: str) -> None:
    params = drawn.params(num_heads=2, features=6, use_bias_kv=kind == "learned")
    semantics = Semantics(add_zero_attn=kind == "zero")
    with (
        sharding.use(mesh(context=2), context="context", zigzag=True),
        pytest.raises(ValueError, match="cannot be in zig-zag order: leave zigzag out"),
    ):
        jaxmha.multi_head_attention(
            params, jnp.ones((2, 8, 6)), is_causal=True, semantics=semantics
        )


def test_types_without_an_axis_of_zigzag_order() -> None:
    devices = mesh(True, context=2)
    with jax.set_mesh(devices), sharding.use(devices, context="context", zigzag=True):
        q = put(devices, jnp.ones((2, 8, 2, 6)))
        with pytest.raises(ValueError, match="T=8 positions in zig-zag order are sharded over"):
            jaxmha.dot_product_attention(q, q, q, is_causal=True)


@pytest.mark.slow
def test_long_contexts_hold_no_scores() -> None:
    """131072 positions on 8 devices; memory of a device falls as devices are added."""
    t, N, H = 131072, 8, 64

    def compiled(count: int, t: int) -> Any:
        m = jax.make_mesh((count,), ("context",), devices=jax.devices()[:count])
        make: Any = jax.ShapeDtypeStruct
        place = sharding.named(m, sharding.spec(None, "context"))
        heads = [make((1, t, N, H), jnp.bfloat16, sharding=place)] * 4
        with sharding.use(m, context="context"):
            run = gradients(is_causal=True, implementation="ring")
            return jax.jit(run).lower(*heads).compile()

    text = compiled(8, t).as_text()
    longest = max(
        np.prod([int(x) for x in sizes.split(",")])
        for sizes in re.findall(r"\w+\[([\d,]+)\]", text)
    )
    assert longest < t * t // 8
    sizes = {}
    for count in (1, 2, 8):
        m = compiled(count, t // 4).memory_analysis()
        sizes[count] = m.temp_size_in_bytes + m.argument_size_in_bytes + m.output_size_in_bytes
    assert sizes[1] / sizes[8] >= 0.9 * 8, sizes
    assert sizes[2] / sizes[8] >= 0.9 * 4, sizes


def test_what_turns_out_constant_is_not_sorted_while_it_compiles() -> None:
    """Offsets in a ring of one device; at T = 131072 XLA would take half a minute."""
    devices = jax.make_mesh((1,), ("context",), (AxisType.Auto,), devices=jax.devices()[:1])
    shape: Any = jax.ShapeDtypeStruct
    heads = shape((1, 2048, 2, 8), jnp.float32)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jaxmha.dot_product_attention(q, k, v, is_causal=True, implementation="ring")

    with sharding.use(devices, context="context"):
        text = jax.jit(attend).lower(heads, heads, heads).compile().as_text()
    assert " sort(" in str(text)
