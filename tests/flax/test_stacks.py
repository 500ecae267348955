"""Stacks of layers by nn.scan, nnx.scan and nnx.vmap: dropout, metadata, caches and gradients."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from jaxmha import Mask
from jaxmha.flax import linen as ours_linen
from jaxmha.flax import nnx as ours_nnx
from tests.flax.common import normal, plain, randomise, shapes, state_of, structure, theirs
from tests.tolerance import assert_close, assert_same

B, T, D, LAYERS = 2, 5, 6, 3
X = normal("stacked", (B, T, D))
MASK = Mask.causal() & Mask.lengths(key_value=jnp.array([3, 5]))


class Draws(nn.Module):  # type: ignore[misc]
    """One layer of a scan, whose output is kept and whose input goes on."""

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Any) -> Any:
        layer = ours_linen.MultiHeadAttention(num_heads=2, dropout_rate=0.5, deterministic=False)
        return x, layer(x)


def drawing(split: bool, wrap: Any = lambda block: block) -> tuple[Any, Any]:
    """A stack whose layers share parameters, so that outputs differ by their draws alone."""
    stack = nn.scan(
        wrap(Draws), variable_broadcast="params", length=LAYERS,
        split_rngs={"params": False, "dropout": split},
    )()  # fmt: skip
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return stack, {"params": randomise(jax.eval_shape(stack.init, rngs, X)["params"])}


@pytest.mark.parametrize("split", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_layers_of_linen_draw_as_their_rngs_are_split(split: bool) -> None:
    stack, variables = drawing(split)
    _, outs = jax.jit(stack.apply)(variables, X, rngs={"dropout": jax.random.key(5)})
    assert outs.shape == (LAYERS, B, T, D)
    for i in range(1, LAYERS):
        assert np.array_equal(outs[0], outs[i]) != split


@pytest.mark.slow
def test_remat_of_linen_repeats_its_draws() -> None:
    def grads(stack: Any, variables: Any) -> Any:
        def loss(variables: Any) -> Any:
            _, outs = stack.apply(variables, X, rngs={"dropout": jax.random.key(5)})
            return jnp.square(outs).sum(), outs

        return jax.jit(jax.grad(loss, has_aux=True))(variables)

    (expected, outs), (actual, others) = grads(*drawing(True)), grads(*drawing(True, nn.remat))
    assert_close(others, outs)
    for (name, a), e in zip(plain(actual).items(), plain(expected).values(), strict=True):
        if "key" not in name or "bias" not in name:  # whose gradient is 0 but for noise
            assert_close(a, e, name, factor=2 * LAYERS)


def stacked(**settings: Any) -> Any:
    """LAYERS layers of nnx along a leading axis."""

    @nnx.vmap(in_axes=0, out_axes=0)  # type: ignore[untyped-decorator]
    def create(rngs: Any) -> Any:
        return ours_nnx.MultiHeadAttention(2, D, rngs=rngs, **settings)

    return create(nnx.Rngs(0).split(LAYERS))


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda body: body, nnx.remat], ids=["plain", "remat"])
def test_layers_of_nnx_draw_from_their_own_streams(wrap: Any) -> None:
    layers = stacked(dropout_rate=0.5, deterministic=False)
    alike = jax.tree.map(lambda x: jnp.stack([x[0]] * LAYERS), nnx.state(layers, nnx.Param))
    nnx.update(layers, alike)
    reference = nnx.clone(layers)

    def losses(body: Any) -> Any:
        each = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))

        def loss(layers: Any) -> Any:
            outs = each(X, layers)[1]
            return jnp.square(outs).sum(), outs

        return nnx.jit(nnx.grad(loss, has_aux=True))

    def body(x: Any, layer: Any) -> Any:
        return x, layer(x, mask=MASK)

    grads, outs = losses(wrap(body))(layers)
    expected, others = losses(body)(reference)
    for i in range(LAYERS):
        for j in range(i):
            assert not np.array_equal(outs[i], outs[j])
    assert_close(outs, others)
    for (name, a), e in zip(plain(grads).items(), plain(expected).values(), strict=True):
        if "key" not in name or "bias" not in name:
            assert_close(a, e, name, factor=4)
    for count in state_of(layers, nnx.RngCount).values():
        assert count.tolist() == [1] * LAYERS


@pytest.mark.slow
def test_gradients_through_a_stack_of_nnx() -> None:
    """Values of layers that are called one after another; a vmap gives each layer its own."""
    layers = stacked()
    kernels = state_of(layers, nnx.Param)["query/kernel"]
    assert not (kernels[0] == kernels[1]).any()
    nnx.update(layers, randomise(nnx.state(layers, nnx.Param)))
    graph, state = nnx.split(layers)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)  # type: ignore[untyped-decorator]
    def in_turn(x: Any, layer: Any) -> Any:
        return x + layer(x, mask=MASK)

    @nnx.vmap(in_axes=(None, 0), out_axes=0)  # type: ignore[untyped-decorator]
    def side_by_side(x: Any, layer: Any) -> Any:
        return layer(x, mask=MASK)

    def unrolled(state: Any, turns: bool) -> Any:
        x, outs = X, []
        for i in range(LAYERS):
            layer = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[i], state))  # noqa: B023
            outs.append(layer(x, mask=MASK))
            x = x + outs[-1] if turns else x
        return jnp.square(x if turns else jnp.stack(outs)).sum()

    for forward in (in_turn, side_by_side):
        found = nnx.jit(nnx.grad(lambda layers: jnp.square(forward(X, layers)).sum()))(layers)  # noqa: B023
        expected = jax.jit(jax.grad(unrolled), static_argnums=1)(state, forward is in_turn)
        for (name, a), e in zip(plain(found).items(), plain(expected).values(), strict=True):
            if "key" not in name or "bias" not in name:
                assert_close(a, e, name, factor=2 * LAYERS)


class Block(nn.Module):  # type: ignore[misc]
    """One layer of a scan, as flax or jaxmha computes it."""

    module: Any
    settings: Any

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Any) -> Any:
        return x + self.module.MultiHeadAttention(**self.settings, name="attention")(x), None


def scanned(module: Any, **settings: Any) -> Any:
    stack = nn.scan(
        Block, variable_axes={"params": 0, "cache": 0}, split_rngs={"params": True},
        length=LAYERS, metadata_params={nn.PARTITION_NAME: "layers"},
    )  # fmt: skip
    return stack(module, nn.FrozenDict({"num_heads": 2, **settings}))


@pytest.mark.slow
def test_metadata_of_a_stack_has_the_axis_of_layers() -> None:
    names = ("embed", "heads", "kv")
    boxes = {
        "kernel_init": nn.with_partitioning(nn.initializers.lecun_normal(), names),
        "out_kernel_init": nn.with_partitioning(nn.initializers.lecun_normal(), names[::-1]),
        "bias_init": nn.with_partitioning(nn.initializers.ones_init(), names[1:]),
        "out_bias_init": nn.initializers.ones_init(),
    }
    flax, ours = (scanned(module, **boxes) for module in (nn, ours_linen))
    expected = theirs(jax.eval_shape, flax.init, jax.random.key(0), X)
    actual = jax.eval_shape(ours.init, jax.random.key(0), X)
    assert shapes(actual) == shapes(expected)
    assert structure(actual) == structure(expected)
    specs = nn.get_partition_spec(actual)
    assert specs == nn.get_partition_spec(expected)
    assert specs["params"]["attention"]["query"]["kernel"] == (
        PartitionSpec("layers", *names)  # type: ignore[no-untyped-call]
    )


@pytest.mark.slow
def test_a_cache_in_every_layer_of_linen() -> None:
    flax, ours = (scanned(module, decode=True) for module in (nn, ours_linen))
    made = theirs(jax.eval_shape, flax.init, jax.random.key(0), X)
    assert shapes(jax.eval_shape(ours.init, jax.random.key(0), X)) == shapes(made)
    params = randomise(made["params"])
    caches = [jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made["cache"])] * 2
    steps = [jax.jit(partial(module.apply, mutable=["cache"])) for module in (flax, ours)]
    for t in range(T):
        token = X[:, t : t + 1]
        ((out, _), left), ((mine, _), right) = (
            theirs(step, {"params": params, "cache": cache}, token)
            for step, cache in zip(steps, caches, strict=True)
        )
        caches = [left["cache"], right["cache"]]
        assert_close(mine, np.asarray(out), f"step {t}", factor=2 * LAYERS)
    for (name, a), e in zip(plain(caches[1]).items(), plain(caches[0]).values(), strict=True):
        if a.dtype == np.float32:
            assert_close(a, e, name, factor=2 * LAYERS)
        else:
            assert_same(a, e, name)


@pytest.mark.slow
def test_initialisers_with_partitioning_of_nnx() -> None:
    names = ("embed", "heads")
    settings = {
        "num_heads": 2, "in_features": D, "qkv_features": 10, "decode": False,
        "kernel_init": nnx.with_partitioning(nnx.initializers.lecun_normal(), names),
        "bias_init": nnx.with_partitioning(nnx.initializers.ones_init(), names[1:]),
    }  # fmt: skip
    found = []
    mesh = jax.make_mesh((1, 1), names, axis_types=(AxisType.Auto,) * 2)
    for module in (nnx, ours_nnx):
        with jax.set_mesh(mesh):
            layer = theirs(module.MultiHeadAttention, rngs=nnx.Rngs(0), **settings)
        flat = nnx.to_flat_state(nnx.state(layer, nnx.Param))
        found.append({path: variable.get_metadata() for path, variable in flat})
    assert found[0] == found[1]
    assert names in found[1]["query", "kernel"].values()
