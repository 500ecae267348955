"""Attention inside a `jax.shard_map` of the caller, which checks what differs between devices."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxmha
from jaxmha import KVCache, Mask, MHAParams, Projection, Semantics, mods
from jaxmha.implementations import small_query
from jaxmha.implementations.tiled import attention
from tests import drawn, jit_cache
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
    "functions": {
        "score_mod": mods.alibi(RNG.random(N).astype(np.float32)),
        "mask_mod": mods.dilated(2, 3, 4),
    },
}
# Keys of every device's own batch rows, or the same keys everywhere.
OWN = {"own keys": "x", "shared keys": None}


@pytest.mark.slow_variants("blocked-functions-shared bias-own keys")
@pytest.mark.everyday(
    keys=["own keys"], bias=[True], name=["functions"], implementation=["blocked"]
)
@pytest.mark.parametrize("keys", OWN)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "shared bias"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", ["blocked", "few_queries"])
def test_outputs_and_gradients(
    implementation: str, name: str, bias: bool, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SIZES", {"target": 2**7, "least_rows": 1, "side": 4})
    monkeypatch.setattr(small_query, "LEAST_KEYS", 0)
    # Sizes are read while a program is traced.
    jit_cache.forget()
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


DECODING: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"mask": Mask.window(3, None)},
    "extra positions, soft cap": {"semantics": Semantics(add_zero_attn=True, logits_soft_cap=3.0)},
    "padding": {"mask": Mask.padding(key_value=np.arange(S)[None] != 1)},
    "functions": {
        "score_mod": lambda score, b, n, i, j: (
            jax.nn.relu(score) * 1.5 + (j - i).astype(score.dtype)
        ),
        "mask_mod": mods.window(2, 0),
    },
}


@pytest.mark.everyday(name=["window"], split=["rows, shared cache"], length=[S])
@pytest.mark.parametrize("length", [S, 2048], ids=["read whole", "read in blocks"])
@pytest.mark.parametrize("split", ["rows", "rows, shared cache", "heads"])
@pytest.mark.parametrize("name", DECODING)
def test_decoding(name: str, split: str, length: int) -> None:
    """A step reads its cache by branches and loops, whose states differ between devices."""
    options = dict(DECODING[name])
    if name == "padding":
        visible = np.arange(length)[None] != 1
        options["mask"] = Mask.padding(key_value=visible)
    params = drawn.params(num_heads=4, num_kv_heads=2, features=8)
    x = RNG.standard_normal((2, 4, 8)).astype(np.float32)
    spec: Any = PartitionSpec
    rows, head = spec("x"), spec(None, "x")
    cache = KVCache.empty(params, 2, length)
    in_specs: Any = (spec(), rows, rows)
    out_specs: Any = (rows, rows)
    if split == "heads":
        assert params.out is not None
        params = params._replace(out=params.out._replace(bias=None))
        inputs = Projection(head, spec("x"))
        weights = MHAParams(inputs, inputs, inputs, Projection(spec("x")))
        own = KVCache(head, head, spec())
        in_specs, out_specs = (weights, spec(), own), (spec(), own)
    if split == "rows, shared cache":
        cache = KVCache(*(part[:1] for part in cache))
        in_specs = (spec(), rows, spec())

    summed: Any = partial(jax.lax.psum, axis_name="x")

    def run(params: Any, x: Any, cache: Any) -> Any:
        outs = []
        for step in (x[:, :3], x[:, 3:]):
            out, cache = jaxmha.decode_step(params, step, cache, **options)
            outs.append(out)
        out = jnp.concatenate(outs, 1)
        return (summed(out) if split == "heads" else out), cache

    mapped = jax.jit(jax.shard_map(run, mesh=mesh(x=2), in_specs=in_specs, out_specs=out_specs))
    out, longer = mapped(params, x, cache)
    whole = KVCache.empty(params, 2, length)
    want, kept = run_alone(params, x, whole, options)
    assert_alike(out, want)
    assert_alike(longer.key, kept.key)


def run_alone(params: Any, x: Any, cache: Any, options: Any) -> Any:
    out, cache = jaxmha.decode_step(params, x[:, :3], cache, **options)
    last, cache = jaxmha.decode_step(params, x[:, 3:], cache, **options)
    return jnp.concatenate((out, last), 1), cache
