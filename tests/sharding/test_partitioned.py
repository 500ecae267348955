"""Plain sharded jit, without `sharding.use`: no device gathers the queries, keys or values of others."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from tests.drawn import to_jax
from tests.sharding.devices import assert_alike, mesh, put
from tests.sharding.hlo import collectives

RNG = np.random.default_rng(0)
B, T, S, N = 4, 70, 90, 8


def normal(*shape: int) -> Any:
    return to_jax(RNG.standard_normal(shape), jnp.float32)


IDS = np.sort(RNG.integers(0, 3, (2, B, S)).astype(np.int32))
# Options of a call; a bias is an array of these sizes, which has a gradient.
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True, "K": 4},
    "one key head": {"K": 1},
    "two key heads": {"K": 2, "is_causal": True},
    "lengths": {"key_value_seq_lengths": np.array([90, 31, 0, 64]), "return_lse": True},
    "segments": {"segment_ids": (IDS[0, :, :T], IDS[1])},
    "padding": {"mask": jaxmha.Mask.padding(key_value=IDS[0] > 0)},
    "dense mask": {"mask": RNG.random((B, 1, T, S)) < 0.5},
    "bias": {"bias": (1, N, T, S)},
    "bias of rows": {"bias": (B, 1, 1, S)},
    "bias of none": {"bias": (1, 1, T, S), "is_causal": True},
}


@pytest.mark.everyday(name=["lengths", "bias of rows"], spec=[("data", "tensor")])
@pytest.mark.parametrize("spec", [("data", None), (None, "tensor"), ("data", "tensor")])
@pytest.mark.parametrize("name", CALLS)
def test_each_device_attends_its_own(name: str, spec: tuple[Any, Any]) -> None:
    options = dict(CALLS[name])
    K, bias = options.pop("K", N), options.pop("bias", None)
    found = mesh(data=2, tensor=4)
    arrays = [normal(B, size, heads, 16) for size, heads in ((T, N), (S, K), (S, K))]
    arrays += [] if bias is None else [normal(*bias)]
    sharded = [
        put(found, x, spec[0], None, spec[1] if x.shape[2] >= 4 else None) for x in arrays[:3]
    ] + [put(found, x) for x in arrays[3:]]

    def run(implementation: str, *arrays: Any) -> Any:
        attend = partial(jaxmha.dot_product_attention, implementation=implementation, **options)
        out, pull = jax.vjp(attend, *arrays)
        cotangents = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), jnp.cos(x), 0), out)
        return out, pull(cotangents)

    program = jax.jit(partial(run, "blocked")).lower(*sharded).compile()
    moved = [x for x in collectives(program) if x.kind != "all-reduce"]
    assert not moved
    # Gradients of what several devices read are sums over them.
    shared = [B, K] if bias is None else [min(B, bias[0]), min(K, bias[1])]
    summed = any(
        names and size < found.shape[names] for size, names in zip(shared, spec, strict=True)
    )
    assert bool(collectives(program)) == summed
    assert_alike(program(*sharded), jax.jit(partial(run, "reference"))(*arrays))


@pytest.mark.slow_variants("20-*", "12-6")
@pytest.mark.parametrize(("N", "K"), [(12, 3), (12, 6), (20, 2), (20, 10)])
def test_sizes_that_devices_do_not_divide(N: int, K: int) -> None:
    """B = 3 on two devices; K on four, where each cuts groups of query heads: only sums move."""
    found = mesh(data=2, tensor=4)
    arrays = normal(3, T, N, 16), normal(3, S, K, 16), normal(3, S, K, 16)
    sharded = put(found, arrays[0], None, None, "tensor"), *(put(found, x) for x in arrays[1:])

    def run(implementation: str, *arrays: Any) -> Any:
        attend = partial(jaxmha.dot_product_attention, implementation=implementation)
        out, pull = jax.vjp(partial(attend, is_causal=True), *arrays)
        return out, pull(jnp.cos(out))

    program = jax.jit(partial(run, "blocked")).lower(*sharded).compile()
    assert {x.kind for x in collectives(program)} == {"all-reduce"}
    assert_alike(program(*sharded), jax.jit(partial(run, "reference"))(*arrays))


@pytest.mark.slow_variants("spec0")
@pytest.mark.parametrize("spec", [("data", None, None, "tensor"), (None, "data", None, "tensor")])
def test_mapped_attention_is_split_too(spec: tuple[Any, ...]) -> None:
    """`vmap` of a gradient, over an axis that devices split, and over one that each has whole."""
    found = mesh(data=2, tensor=4)
    arrays = tuple(normal(6, B, size, heads, 16) for size, heads in ((T, N), (S, 4), (S, 4)))

    def run(implementation: str, *arrays: Any) -> Any:
        attend = partial(jaxmha.dot_product_attention, implementation=implementation)

        def both(*arrays: Any) -> Any:
            out, pull = jax.vjp(attend, *arrays)
            return out, pull(jnp.cos(out))

        return jax.vmap(both)(*arrays)

    sharded = [put(found, x, *spec) for x in arrays]
    program = jax.jit(partial(run, "blocked")).lower(*sharded).compile()
    assert not collectives(program)
    assert_alike(program(*sharded), jax.jit(partial(run, "reference"))(*arrays))


def test_transformations() -> None:
    """In second derivatives, and with a mapped axis that devices do not divide."""
    found = mesh(data=8)
    x = 0.3 * normal(8, 13, 2, 16)

    def value(x: Any, *, implementation: str) -> Any:
        out = jaxmha.dot_product_attention(x, x, x, implementation=implementation)
        return (out * out).sum()

    def run(x: Any, *, implementation: str) -> Any:
        one = partial(value, implementation=implementation)
        mapped = jax.vmap(jax.grad(one))(jnp.stack([x, -x]))
        second = jax.grad(lambda x: (jax.grad(one)(x) ** 2).sum())(x)
        return mapped, second

    got = jax.jit(partial(run, implementation="blocked"))(put(found, x, "data"))
    assert_alike(got, jax.jit(partial(run, implementation="reference"))(x))


@pytest.mark.slow_variants("positions")
@pytest.mark.parametrize(
    "names", [(), ("data",), (None, "data")], ids=["none", "rows", "positions"]
)
def test_eager_gradients_of_explicit_types(names: tuple[str | None, ...]) -> None:
    """JAX refuses one with `custom_partitioning`; types leave nothing to the partitioner."""
    x, devices = normal(B, 6, N, 3), mesh(explicit=True, data=2, tensor=4)
    grad = jax.grad(lambda x: jaxmha.dot_product_attention(x, x, x, implementation="blocked").sum())
    with jax.set_mesh(devices):
        found = grad(put(devices, x, *names))
    assert_alike(np.asarray(found), grad(x))
