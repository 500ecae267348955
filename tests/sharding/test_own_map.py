"""Attention inside a `jax.shard_map` of the caller, which checks what differs between devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxmha
from jaxmha import Mask
from jaxmha.implementations import blocked, few_queries
from tests.everyday import everyday
from tests.sharding.devices import assert_alike, mesh

B, T, S, K, N, H = 2, 5, 13, 2, 6, 3
RNG = np.random.default_rng(0)
HEADS = [
    RNG.standard_normal(shape).astype(np.float32)
    for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, H))
]
BIAS = RNG.standard_normal((1, N, T, S)).astype(np.float32)
CASES: dict[str, dict[str, Any]] = {
    "no condition": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (4, 3), "logits_soft_cap": 0.9},
    "offsets": {"mask": Mask.causal(np.array([3]))},
    "keys": {"mask": Mask.padding(key_value=np.arange(S)[None] % 5 < 3)},
    "dense": {"mask": RNG.random((1, N, T, S)) < 0.6},
}
# Keys of every device's own batch rows, or the same keys everywhere.
OWN = {"own keys": "x", "shared keys": None}


@pytest.mark.parametrize("keys", everyday(OWN, "own keys"))
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "shared bias"])
@pytest.mark.parametrize("name", everyday(CASES, "window"))
@pytest.mark.parametrize("implementation", everyday(["blocked", "few_queries"], "blocked"))
def test_answers_and_gradients(
    implementation: str, name: str, bias: bool, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "SIZES", {"target": 2**7, "least_rows": 1, "side": 4})
    monkeypatch.setattr(few_queries, "LEAST_KEYS", 0)
    # Sizes are read while a program is traced.
    jax.clear_caches()  # type: ignore[no-untyped-call]
    own = OWN[keys]
    arrays = [x if own else x[:1] for x in HEADS]
    arrays = [HEADS[0], *arrays[1:], *([BIAS] if bias else [])]

    def attend(implementation: str, heads: Any) -> Any:
        query, key, value, *more = heads
        key, value = (jnp.broadcast_to(x, (len(query), *x.shape[1:])) for x in (key, value))
        return jaxmha.dot_product_attention(
            query, key, value, *more, implementation=implementation, **CASES[name]
        )

    spec: Any = PartitionSpec
    mapped: Any = jax.shard_map(
        lambda *heads: attend(implementation, heads),
        mesh=mesh(x=2),
        in_specs=(spec("x"), spec(own), spec(own), *([spec()] if bias else [])),
        out_specs=spec("x"),
    )

    def of(function: Any) -> Any:
        def value(heads: Any) -> Any:
            out = function(heads)
            return (out * jnp.cos(out)).sum(), out

        return jax.jit(jax.grad(value, has_aux=True))(arrays)

    assert_alike(of(lambda heads: mapped(*heads)), of(lambda x: attend("reference", x)))
