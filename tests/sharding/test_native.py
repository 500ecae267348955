"""The native CPU kernels on sharded arrays: no device gathers what another has."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmha
from jaxmha import sharding
from tests import conformance
from tests.drawn import to_jax
from tests.sharding.devices import assert_alike, mesh, put
from tests.sharding.hlo import collectives

pytestmark = conformance.native_built
RNG = np.random.default_rng(0)
Q, K, V, COTANGENT = (
    to_jax(RNG.standard_normal((4, size, heads, 16)), jnp.float32)
    for size, heads in ((70, 8), (90, 4), (90, 4), (70, 8))
)
LENGTHS = jnp.asarray([90, 31, 5, 64], jnp.int32)


def both(
    q: Any, k: Any, v: Any, cotangent: Any, lengths: Any, *, implementation: Any = None
) -> Any:
    attend = partial(
        jaxmha.dot_product_attention,
        key_value_seq_lengths=lengths,
        is_causal=True,
        implementation=implementation,
    )
    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(cotangent)


def test_no_device_gathers() -> None:
    """Where axes are named, each device runs the kernels on its own batch rows and heads."""
    found = mesh(data=2, tensor=4)
    spec = "data", None, "tensor", None
    arrays = *(put(found, x, *spec) for x in (Q, K, V, COTANGENT)), put(found, LENGTHS, "data")
    with sharding.use(found, data="data", tensor="tensor"):
        run = partial(both, implementation=["native", "blocked"])
        program = jax.jit(run).lower(*arrays).compile()
        result = program(*arrays)
    assert not collectives(program)
    assert "jaxmha_cpu_attend_backward" in str(program.as_text())
    assert_alike(
        result, jax.jit(partial(both, implementation="reference"))(Q, K, V, COTANGENT, LENGTHS)
    )


def test_xla_has_nothing_to_gather() -> None:
    """Without names XLA partitions the program, which it can do with plain XLA alone."""
    shown = jaxmha.explain(Q, K, V, implementation=["native", "blocked"])
    assert shown.chosen == "blocked"
    assert "jaxmha.sharding.use" in str(shown.reasons[0][1])


def test_a_map_of_the_caller() -> None:
    found = mesh(data=8)
    spec: Any = jax.sharding.PartitionSpec
    x = jnp.concatenate([Q, Q])
    attend = partial(jaxmha.dot_product_attention, implementation="native")
    run = jax.shard_map(lambda x: attend(x, x, x), mesh=found, in_specs=spec("data"),
                        out_specs=spec("data"))  # fmt: skip
    program = jax.jit(run).lower(x).compile()
    assert "jaxmha_cpu_attend" in str(program.as_text())
    want = jaxmha.dot_product_attention(x, x, x, implementation="reference")
    assert_alike(program(put(found, x, "data")), want)
