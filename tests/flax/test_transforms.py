"""Partitioning metadata, mixed precision, and the transformations of linen, nnx and jax."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jaxmha import Mask
from jaxmha.flax import linen as ours_linen
from jaxmha.flax import nnx as ours_nnx
from tests.flax.common import normal, plain, randomise, shapes, state_of, structure, theirs
from tests.tolerance import assert_close, assert_same

pytestmark = pytest.mark.slow
B, T, D, LAYERS = 2, 5, 6, 3
X = normal("x", (B, T, D))
MASK = Mask.causal() & Mask.lengths(key_value=jnp.array([3, 5]))


def boxed(init: Any) -> dict[str, Any]:
    names = ("embed", "heads", "kv")
    return {
        "kernel_init": nn.with_partitioning(init, names),
        "out_kernel_init": nn.with_partitioning(init, names[::-1]),
        "bias_init": nn.with_logical_partitioning(nn.initializers.ones_init(), ("heads", "kv")),
    }


def test_partitioning_of_linen() -> None:
    settings = {"num_heads": 2, **boxed(nn.initializers.lecun_normal())}
    flax, ours = (module.MultiHeadAttention(**settings) for module in (nn, ours_linen))
    expected = theirs(jax.eval_shape, flax.init, jax.random.key(0), X)
    variables = jax.eval_shape(ours.init, jax.random.key(0), X)
    assert structure(variables) == structure(expected)
    assert nn.get_partition_spec(variables) == nn.get_partition_spec(expected)
    assert nn.get_partition_spec(variables)["params"]["query"]["kernel"] == (
        PartitionSpec("embed", "heads", "kv")  # type: ignore[no-untyped-call]
    )
    variables = randomise(variables)
    out = ours.apply(variables, X)
    assert_same(ours.apply(nn.meta.unbox(variables), X), out)
    assert_same(
        ours.to_params(variables)[0].query.kernel, variables["params"]["query"]["kernel"].value
    )


SHARDED = """
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jaxmha import Mask
from jaxmha.flax import linen, nnx as modules

mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
x = jax.random.normal(jax.random.key(0), (2, 6, 8))
mask = Mask.lengths(key_value=jnp.array([4, 6]))
rows = NamedSharding(mesh, P("data"))


def boxed(*names):
    return nn.with_partitioning(nn.initializers.lecun_normal(), names)


gated = {"extra_params": ("gate_heads.kernel",)}  # which has no third axis
layer = linen.MultiHeadAttention(
    4, kernel_init=boxed(None, "model", None), out_kernel_init=boxed("model", None, None), **gated
)
variables = nn.meta.unbox(layer.init(jax.random.key(1), x))
shapes = jax.eval_shape(layer.init, jax.random.key(1), x)
placed = jax.device_put(variables, nn.meta.unbox(nn.get_sharding(shapes, mesh)))
assert placed["params"]["query"]["kernel"].sharding.spec == P(None, "model", None)
assert placed["params"]["gate"]["kernel"].sharding.spec == P(None, "model")
out = jax.jit(layer.apply, out_shardings=rows)(placed, jax.device_put(x, rows), mask=mask)
np.testing.assert_allclose(out, layer.apply(variables, x, mask=mask), atol=1e-6)

metadata = {
    "kernel_metadata": {"out_sharding": (None, "model", None)},
    "out_kernel_metadata": {"out_sharding": ("model", None, None)},
}
alone = modules.MultiHeadAttention(4, 8, rngs=nnx.Rngs(1), **gated)
with jax.set_mesh(mesh):
    module = modules.MultiHeadAttention(4, 8, rngs=nnx.Rngs(1), **metadata, **gated)
    assert module.gate.kernel[...].sharding.spec == P(None, "model")
    assert module.query.kernel[...].sharding.spec == P(None, "model", None)
    out = nnx.jit(lambda module, x: module(x, mask=mask))(module, jax.device_put(x, rows))
np.testing.assert_allclose(out, alone(x, mask=mask), atol=1e-6)
print("sharded")
"""


def test_parameters_that_lie_on_several_devices() -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-c", SHARDED]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, cwd=root
    )
    assert (done.returncode, done.stdout) == (0, "sharded\n"), done.stderr


def test_metadata_of_nnx() -> None:
    metadata = {
        "kernel_metadata": {"name": "k"},
        "bias_metadata": {"name": "b"},
        "out_kernel_metadata": {"name": "ok"},
        "out_bias_metadata": {"name": "ob"},
        "query_ln_scale_metadata": {"name": "q"},
        "key_ln_scale_metadata": {"name": "kk"},
    }
    settings = {"num_heads": 2, "in_features": D, "normalize_qk": True, **metadata}
    found = []
    names = {"extra_params": ("query_norm_heads", "key_norm_heads")}
    for module, more in ((nnx, {}), (ours_nnx, {}), (ours_nnx, names)):
        layer = theirs(
            nnx.eval_shape,
            lambda: module.MultiHeadAttention(rngs=nnx.Rngs(0), **settings, **more),  # noqa: B023
        )
        flat = nnx.to_flat_state(nnx.state(layer, nnx.Param))
        found.append({path: variable.get_metadata() for path, variable in flat})
    assert found[0] == found[1] == found[2]
    assert found[1]["out", "kernel"]["name"] == "ok"


class Block(nn.Module):  # type: ignore[misc]
    """One step of a scan over layers."""

    module: Any

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Any, mask: Any) -> Any:
        layer = self.module.MultiHeadAttention(
            num_heads=2, dropout_rate=0.5, deterministic=True, name="attention"
        )
        return x + layer(x, mask=mask, sow_weights=True), None


def test_scan_and_remat_of_linen() -> None:
    def stack(module: Any, wrap: Any = lambda block: block) -> Any:
        return nn.scan(
            wrap(Block),
            variable_axes={"params": 0, "intermediates": 0},
            split_rngs={"params": True, "dropout": True},
            length=LAYERS,
            in_axes=nn.broadcast,
        )(module)

    mask = MASK.to_array(T, T)
    flax, ours = stack(nn), stack(ours_linen, nn.remat)
    expected = theirs(jax.eval_shape, flax.init, jax.random.key(0), X, mask)
    assert shapes(jax.eval_shape(ours.init, jax.random.key(0), X, MASK)) == shapes(expected)
    variables = {"params": randomise(expected["params"])}

    def run(module: Any, mask: Any) -> Any:
        def loss(v: Any) -> Any:
            (out, _), sown = module.apply(v, X, mask, mutable=["intermediates"])
            return jnp.square(out).sum(), (out, sown)

        return jax.jit(jax.grad(loss, has_aux=True))(variables)

    wanted, actual = theirs(run, flax, mask), run(ours, MASK)
    assert structure(actual) == structure(wanted)
    for (name, a), e in zip(plain(actual).items(), plain(wanted).values(), strict=True):
        if "key" not in name or "bias" not in name:  # whose gradient is 0 but for noise
            assert_close(a, e, name, factor=2 * LAYERS)


def test_training_step_of_nnx() -> None:
    layer = ours_nnx.MultiHeadAttention(
        2, D, dropout_rate=0.5, deterministic=False, rngs=nnx.Rngs(0)
    )
    other = nnx.clone(layer)

    def loss(layer: Any) -> Any:
        return jnp.square(layer(X, mask=MASK)).sum()

    expected = nnx.jit(nnx.grad(loss))(layer)
    actual = nnx.jit(nnx.grad(nnx.remat(loss)))(other)
    for (name, a), e in zip(plain(actual).items(), plain(expected).values(), strict=True):
        assert_close(a, e, name, factor=4)
    counts = [state_of(module, nnx.RngCount) for module in (other, layer)]
    assert [[int(x) for x in count.values()] for count in counts] == [[1], [1]]


def test_vmap_of_jax_over_a_module() -> None:
    layer = ours_linen.MultiHeadAttention(num_heads=2)
    variables = randomise(jax.eval_shape(layer.init, jax.random.key(0), X))
    many = jnp.stack([X, 2 * X, X + 1])
    out = jax.vmap(lambda x: layer.apply(variables, x, is_causal=True))(many)
    assert_close(out, layer.apply(variables, many, is_causal=True))
