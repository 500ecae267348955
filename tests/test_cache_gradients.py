"""Gradients through caches: those of full attention, and none of what is not attended."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import KVCache, PagedKVCache, latent
from jaxmha.implementations import online_softmax
from tests import drawn, jit_cache, tolerance
from tests.drawn import to_jax
from tests.test_cache import B, K, N, T, full, make


@pytest.mark.slow_variants("read in blocks")
@pytest.mark.parametrize("length", [T, 4096], ids=["read whole", "read in blocks"])
def test_steps_have_gradients(length: int) -> None:
    """The gradients of full attention; slots that no query attends have none, even if they hold NaN."""
    params, x = make()
    empty = KVCache.empty(params, B, length)
    spoiled = [jnp.full_like(a, np.nan) for a in (empty.key, empty.value)]
    cache = empty._replace(key=spoiled[0], value=spoiled[1])

    def steps(x: jax.Array) -> jax.Array:
        return (jaxmha.extend(params, x, cache)[0] ** 2).sum()

    def whole(x: jax.Array) -> jax.Array:
        return jnp.asarray(full(params, x, implementation="reference") ** 2).sum()

    found, want = (jax.jit(jax.grad(f))(x[:, :5]) for f in (steps, whole))
    tolerance.assert_close(found, np.asarray(want), factor=2)


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8 pages"])
def test_no_gradient_passes_tokens_in_8_bits(
    kind: str, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rule for native kernels, plain XLA and pages, whose scales would pass a part of it."""
    monkeypatch.setenv("JAXMHA_NATIVE", native)
    jit_cache.forget()
    params, x = make()
    cache: Any = KVCache.empty(params, B, 5, dtype=jnp.float8_e4m3fn)
    if kind == "int8 pages":
        cache = jaxmha.PagedKVCache.empty(params, B, 5, pages=2 * B, page_size=4, dtype=jnp.int8)

    @jax.jit
    def gradients(params: Any) -> Any:
        return jax.grad(lambda p: (jaxmha.decode_step(p, x[:, :3], cache)[0] ** 2).sum())(params)

    found = gradients(params)
    assert not np.any(found.key.kernel)
    assert not np.any(found.value.kernel)
    assert np.any(found.query.kernel)
    assert np.any(found.out.kernel)


PARAMS = drawn.params(num_heads=2, features=6)
LATENT = drawn.latent_params(num_heads=2, features=6, latent_dim=5, rotary_dim=2, head_dim=3)
FEW: dict[str, Any] = {"pages": 1, "page_size": 4}  # for two rows
FULL: dict[str, tuple[Any, Any, Any]] = {
    "step": (jaxmha.extend, PARAMS, lambda: KVCache.empty(PARAMS, 2, 3)),
    "prompts": (jaxmha.prefill, PARAMS, lambda: PagedKVCache.empty(PARAMS, 2, 4, **FEW)),
    "latent step": (latent.extend, LATENT, lambda: latent.LatentCache.empty(LATENT, 2, 3)),
    "latent prompts": (latent.prefill, LATENT, lambda: latent.paged_cache(LATENT, 2, 4, **FEW)),
}


@pytest.mark.parametrize("name", FULL)
def test_a_row_without_room_spoils_no_gradient(name: str) -> None:
    """Its outputs are NaN, and a loss over the other rows has gradients."""
    call, params, empty = FULL[name]
    cache = empty()
    if name.endswith("step"):
        cache = cache._replace(lengths=to_jax(np.asarray([2, 1], np.int32)))

    @jax.jit
    def gradients(params: Any) -> Any:
        def loss(params: Any) -> Any:
            out, _ = call(params, jnp.ones((2, 2, 6)), cache)
            spoiled = jnp.isnan(out)
            return jnp.where(spoiled, 0.0, out).sum(), spoiled.all((1, 2)).sum()

        return jax.grad(loss, has_aux=True)(params)

    found, spoiled = gradients(params)
    assert spoiled == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert np.any(found.out.kernel)


def test_steps_with_score_functions_have_gradients() -> None:
    """Also where XLA rounds logits anew in the backward pass, so that none equals the row max."""
    params, x = make()

    def score(s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        return s - np.float32(0.1) * (i - j).astype(s.dtype)

    def steps(x: jax.Array) -> jax.Array:
        cache, total = KVCache.empty(params, B, 9), jnp.zeros(())
        for first, stop in ((0, 6), (6, 8), (8, 9)):
            out, cache = jaxmha.decode_step(params, x[:, first:stop], cache, score_mod=score)
            total += (out**2).sum()
        return total

    def whole(x: jax.Array) -> jax.Array:
        out = full(params, x, implementation="reference", score_mod=score)
        return jnp.asarray(out**2).sum()

    found, want = (jax.jit(jax.grad(f))(x[:, :9]) for f in (steps, whole))
    tolerance.assert_close(found, np.asarray(want), factor=2)


def test_the_row_max_passes_no_gradient() -> None:
    """Nor is it divided by the number of logits that equal it."""

    def total(logits: jax.Array) -> jax.Array:
        return online_softmax.fold(logits, lambda exps: exps, None).row_max.sum()

    found = jax.grad(total)(to_jax(np.random.default_rng(0).normal(size=(2, 3, 5)).astype("f")))
    assert not np.any(found)


def test_slots_that_one_key_head_leaves_out_have_no_gradient() -> None:
    """A mask may differ between heads: NaN in a slot of a key head that no query of it attends."""
    params, x = make()
    _, cache = jaxmha.prefill(params, x[:, :3], KVCache.empty(params, B, 6))
    mask = np.ones((1, N, 1, 6), bool)
    mask[:, : N // K, :, 1] = False
    key, value = to_jax(cache.key), to_jax(cache.value)
    spoiled = [a.at[:, 0, 1].set(np.nan) for a in (key, value)]

    @jax.jit
    def gradients(params: Any, key: Any, value: Any) -> Any:
        def total(params: Any) -> Any:
            out, _ = jaxmha.decode_step(
                params, x[:, 3:4], cache._replace(key=key, value=value), mask=mask
            )
            return (out**2).sum()

        return jax.grad(total)(params)

    want, got = gradients(params, key, value), gradients(params, *spoiled)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))
    jax.tree.map(lambda a, b: tolerance.assert_close(a, np.asarray(b)), got, want)
