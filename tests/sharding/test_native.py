"""The native CPU kernels on sharded arrays: no device gathers what another has."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from experiments.scaling.hlo import collectives
from jaxmha import sharding
from tests import conformance
from tests.sharding.devices import assert_alike, mesh, put

pytestmark = pytest.mark.skipif("native" in conformance.ABSENT, reason="jaxmha-cpu is not built")
RNG = np.random.default_rng(0)
Q, K, V, SLOPE = (
    jnp.asarray(RNG.standard_normal((4, size, heads, 16)), jnp.float32)
    for size, heads in ((70, 8), (90, 4), (90, 4), (70, 8))
)
LENGTHS = jnp.asarray([90, 31, 5, 64], jnp.int32)


def both(q: Any, k: Any, v: Any, slope: Any, lengths: Any, *, implementation: Any = None) -> Any:
    attend = partial(
        jaxmha.dot_product_attention,
        key_value_seq_lengths=lengths,
        is_causal=True,
        implementation=implementation,
    )
    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(slope)


@pytest.mark.parametrize("named", [False, True], ids=["by XLA", "by use"])
def test_no_device_gathers(named: bool) -> None:
    """XLA cuts the portable kernels; where axes are named, each device runs the native ones."""
    found = mesh(data=2, tensor=4)
    spec = "data", None, "tensor", None
    arrays = *(put(found, x, *spec) for x in (Q, K, V, SLOPE)), put(found, LENGTHS, "data")
    with sharding.use(found, **({"data": "data", "tensor": "tensor"} if named else {})):
        program, without = (
            jax.jit(partial(both, implementation=name)).lower(*arrays).compile()
            for name in (None, "blocked")
        )
        result = program(*arrays)
    moved = collectives(program.as_text())
    assert sum(x.bytes for x in moved) <= sum(x.bytes for x in collectives(without.as_text()))
    assert not (named and moved)
    assert ("jaxmha_cpu_attend_backward" in program.as_text()) == named
    assert_alike(
        result, jax.jit(partial(both, implementation="reference"))(Q, K, V, SLOPE, LENGTHS)
    )
