"""Latent attention against a float64 oracle of loops over heads, in both forms and over a cache."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask, Semantics, latent, mods, rope
from jaxmha.latent.cache import as_heads
from jaxmha.latent.params import leaves
from tests import drawn
from tests.drawn import to_jax
from tests.tolerance import assert_close

B, T, N, D, L, R, H, h, P = 2, 13, 3, 7, 11, 4, 5, 2, 6
ROTATE = partial(rope, base=100.0, interleaved=True)
SCALED: Any = latent.ScaledQueries(ROTATE, beta=0.7, floor=3.0, first=1)
SIZES: dict[str, Any] = {
    "num_heads": N, "features": D, "latent_dim": L, "rotary_dim": R, "head_dim": H,
    "value_head_dim": h, "out_features": 17,
}  # fmt: skip


def made(low_rank: bool = True, dtype: Any = "float32", use_bias: bool = True) -> Any:
    params = drawn.latent_params(
        query_latent_dim=P if low_rank else None, use_bias=use_bias, **SIZES
    )
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: to_jax(np.asarray(x) + 0.3 * rng.standard_normal(x.shape), dtype), params
    )


def inputs(dtype: Any = "float32", size: int = T) -> jax.Array:
    return to_jax(np.random.default_rng(1).standard_normal((B, size, D)), dtype)


def turned(x: Any, positions: Any) -> Any:
    angle = positions[..., None] * 100.0 ** (-np.arange(0, R, 2) / R)
    a, b = x[..., ::2], x[..., 1::2]
    pairs = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    return np.stack(pairs, -1).reshape(x.shape)


def oracle(params: Any, x: Any, allowed: Any, rotate: Any = ROTATE) -> Any:
    """The output in float64, head by head."""
    p = {name: np.asarray(a, np.float64) for name, a in leaves(params).items()}
    x, at = np.asarray(x, np.float64), np.arange(np.shape(x)[1])
    factors = 1 + 0.7 * np.log(1 + (at + 1) // 3) if rotate is SCALED else np.ones(len(at))

    def norm(y: Any, scale: Any) -> Any:
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * scale

    latents = norm(x @ p["latent.kernel"] + p.get("latent.bias", 0.0), p["latent_norm"])
    shared = turned(x @ p["rotary_key.kernel"] + p.get("rotary_key.bias", 0.0), at)
    if "query_latent.kernel" in p:
        low = x @ p["query_latent.kernel"] + p.get("query_latent.bias", 0.0)
        x = norm(low, p["query_latent_norm"])
    out = p.get("out.bias", np.zeros(1))
    for n in range(N):
        query = x @ p["query.kernel"][:, n] * factors[:, None]
        key = latents @ p["key.kernel"][:, n]
        scores = query[..., :H] @ key.swapaxes(1, 2)
        scores += turned(query[..., H:], at) @ shared.swapaxes(1, 2)
        exps = np.where(allowed, np.exp(scores * (H + R) ** -0.5), 0.0)
        total = exps.sum(-1, keepdims=True)
        weights = exps / np.where(total == 0, 1.0, total)
        out = out + weights @ (latents @ p["value.kernel"][:, n]) @ p["out.kernel"][n]
    return out


CAUSAL = np.tri(T, dtype=bool)


@pytest.mark.slow_variants("False-rotate1")
@pytest.mark.parametrize(("low_rank", "rotate"), [(True, ROTATE), (False, SCALED)])
def test_both_forms_are_the_oracle(low_rank: bool, rotate: Any) -> None:
    params, x = made(low_rank), inputs()
    want = oracle(params, x, CAUSAL, rotate)

    @jax.jit
    def forms(params: Any, x: Any) -> list[Any]:
        query, keys = latent.absorb(params, x, rotate=rotate)
        absorbed = jaxmha.dot_product_attention(
            query, keys[:, :, None], keys[:, :, None, :L], scale=(H + R) ** -0.5, is_causal=True
        )
        expanded = latent.project(params, x, rotate=rotate)
        heads = jaxmha.dot_product_attention(*expanded, is_causal=True)
        return [
            latent.latent_attention(params, x, rotate=rotate, is_causal=True),
            latent.combine(params, absorbed, absorbed=True),
            latent.combine(params, heads),
        ]

    for got in forms(params, x):
        assert_close(got, want)


def test_batch_axes_and_positions() -> None:
    params, x = made(), inputs()
    call = partial(latent.latent_attention, params, rotate=ROTATE)
    later = partial(call, positions=np.arange(5, T + 5).reshape(1, 1, T))
    want, one, wide = jax.jit(lambda x: (call(x), call(x[1]), later(x[:, None])))(x)
    assert_close(one, np.asarray(want[1]))
    assert_close(wide[:, 0], np.asarray(want))  # only differences of positions count


@pytest.mark.slow_variants("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prefill_and_steps(dtype: str) -> None:
    params, x = made(dtype=dtype), inputs(dtype)
    want = oracle(params, x, CAUSAL)
    cache = latent.LatentCache.empty(params, B, T)
    out, cache = latent.prefill(params, x[:, :5], cache, rotate=ROTATE)
    outs = [out]
    for start, end in ((5, 6), (6, 9), (9, T)):
        out, cache = latent.decode_step(params, x[:, start:end], cache, rotate=ROTATE)
        outs.append(out)
    assert_close(jnp.concatenate(outs, 1), want, factor=1.0 if dtype == "float32" else 8.0)
    assert cache.lengths.tolist() == [T, T]
    out, _ = latent.decode_step(params, x[:, :1], cache, rotate=ROTATE)
    assert bool(jnp.isnan(out).all())  # no slot is left


@pytest.mark.slow_variants("0-3-True", "2-0-False")
@pytest.mark.parametrize("out", [True, False])
@pytest.mark.parametrize(("batch", "tokens"), [(2, 0), (0, 3)])
def test_no_tokens_and_no_rows(batch: int, tokens: int, out: bool) -> None:
    params = made() if out else made()._replace(out=None)
    x = jnp.zeros((batch, tokens, inputs().shape[-1]))
    whole = latent.latent_attention(params, x, is_causal=True)
    assert whole.shape[:2] == (batch, tokens)
    cache = latent.LatentCache.empty(params, batch, T)
    for step in (latent.prefill, latent.decode_step):
        assert step(params, x, cache)[0].shape == whole.shape
    value = latent.project(params, x)[2]
    assert latent.combine(params, value).shape == whole.shape
    heads = latent.absorb(params, x)[0][..., : params.key.kernel.shape[0]]
    assert latent.combine(params, heads, absorbed=True).shape == whole.shape


def test_ragged_sequences_and_rings() -> None:
    params, x, pads = made(), inputs(), np.asarray([[2], [0]])
    window = np.tri(T, dtype=bool) & ~np.tri(T, k=-4, dtype=bool)
    want = oracle(params, x, window & (np.arange(T) >= pads)[:, None], SCALED)
    mask = Mask.window(3, None) & Mask.padding(key_value=np.arange(6) >= pads)
    cache = latent.LatentCache.empty(params, B, 6)
    cache = cache._replace(latents=jnp.full_like(cache.latents, jnp.nan))
    cache = cache._replace(lengths=np.zeros(B, np.int64))
    at = np.zeros(B, int)
    for counts in ([3, 1], [0, 2], [2, 0], [1, 3], [3, 3], [2, 2], [2, 2]):
        rows = np.stack([x[b, np.minimum(at[b] + np.arange(3), T - 1)] for b in range(B)])
        out, cache = latent.extend(
            params, to_jax(rows), cache, q_lengths=np.asarray(counts), mask=mask, rotate=SCALED
        )
        found = np.asarray(out)
        for b, count in enumerate(counts):
            assert_close(found[b, :count], want[b, at[b] : at[b] + count])
            assert not found[b, count:].any()
        at += counts
    assert at.tolist() == [13, 13]


@pytest.mark.slow_variants("int8")
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_pages(dtype: str | None) -> None:
    """Ragged steps, a shared prefix and a rollback over pages, whose free slots hold poison.

    Rotations count positions from 5: only their differences matter, and no later token is attended.
    """
    params, x = made(), inputs()
    want = oracle(params, x, CAUSAL)
    cache: Any = latent.paged_cache(params, 3, 16, pages=11, page_size=4, dtype=dtype)
    poison: Any = {"key": jnp.full_like(cache.key, jnp.nan)}
    if dtype is not None:
        poison = {"key_scale": jnp.full_like(cache.key_scale, jnp.nan)}
    cache, pool = cache._replace(**poison), jaxmha.PagePool(cache)
    rows = to_jax(np.concatenate([x, x[:1]]))
    # int8: numbers of latents are off by 1 / 254 of the largest of their vector, once as keys and once
    # as values; that is 2 ** 24 / 254 floors of 32 in a tolerance each, doubled for the largest output.
    factor = 1.0 if dtype is None else 4 * 2**24 / 254 / 32

    def step(cache: Any, counts: list[int], tokens: Any) -> tuple[Any, Any]:
        at = np.asarray(pool.lengths)[:, None] + np.arange(5, 10)
        pool.extend(counts)
        out, cache = latent.extend(
            params, tokens, cache, q_lengths=np.asarray(counts), rotate=ROTATE, positions=at
        )
        pool.require_same(cache)
        return np.asarray(out), cache

    out, cache = step(cache, [5, 3, 0], rows[:, :5])
    assert_close(out[0], want[0, :5], factor=factor)
    assert_close(out[1, :3], want[1, :3], factor=factor)
    pool.fork(0, 2)
    pool.rollback([5, 2, 5])
    cache = cache.fork(0, 2).rollback(np.asarray([5, 2, 5]))
    tokens = np.stack([x[0, 5:10], x[1, 2:7], x[0, 5:10]])
    out, cache = step(cache, [3, 3, 2], to_jax(tokens))
    for row, at, count in ((0, 5, 3), (1, 2, 3), (2, 5, 2)):
        assert_close(out[row, :count], want[row % 2, at : at + count], factor=factor)
    assert dtype is None or np.abs(out[0, :3].astype(np.float64) - want[0, 5:8]).max() > 1e-5
    pool.free(0, 1, 2)
    cache = cache.free(np.ones(3, bool))
    assert int(cache.free_pages()) == pool.free_pages == 11
    out, cache = latent.prefill(params, rows, cache, rotate=ROTATE)
    assert bool(jnp.isnan(out[2]).all())  # 3 rows of 13 tokens need 12 pages
    assert_close(out[:2], want, factor=1.0)


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_values_of_pages_are_their_keys(dtype: str | None) -> None:
    cache: Any = latent.paged_cache(made(), 3, 16, pages=11, page_size=4, dtype=dtype)
    heads: Any = as_heads(cache)
    assert heads.value is heads.key is cache.key
    assert heads.value_scale is heads.key_scale is cache.key_scale


def test_gradients_of_every_leaf() -> None:
    with jax.enable_x64(True):
        params, x = made(dtype="float64"), inputs("float64")
        weight = np.random.default_rng(2).standard_normal((B, T, 17))

        def total(params: Any, x: Any) -> Any:
            out = latent.latent_attention(params, x, rotate=SCALED, is_causal=True)
            return (out * weight).sum()

        found = jax.jit(jax.grad(total, (0, 1)))(params, x)
        rng = np.random.default_rng(3)
        for place, grads in enumerate(found):
            given = (params, x)[place]
            for index, (leaf, grad) in enumerate(
                zip(jax.tree.leaves(given), jax.tree.leaves(grads), strict=True)
            ):
                step = rng.standard_normal(leaf.shape)
                values = []
                for sign in (1e-5, -1e-5):
                    moved, tree = jax.tree.flatten(given)
                    moved[index] = np.asarray(leaf) + sign * step
                    both = [params, x]
                    both[place] = jax.tree.unflatten(tree, moved)
                    values.append((oracle(both[0], both[1], CAUSAL, SCALED) * weight).sum())
                want = (values[0] - values[1]) / 2e-5
                assert abs((np.asarray(grad) * step).sum() - want) < 1e-7 * max(1.0, abs(want))


def test_poison_in_dead_places() -> None:
    params, x = made(), inputs()
    lengths = jnp.asarray([9, 4])
    poisoned = jnp.where(jnp.arange(T)[None, :, None] < lengths[:, None, None], x, jnp.nan)
    mask = Mask.lengths(query=lengths, key_value=lengths)

    def total(params: Any, x: Any) -> Any:
        out = latent.latent_attention(params, x, rotate=ROTATE, is_causal=True, mask=mask)
        return jnp.where(jnp.arange(T)[None, :, None] < lengths[:, None, None], out, 0.0).sum()

    both = jax.jit(jax.value_and_grad(total, (0, 1)))
    got = both(params, poisoned)
    want = both(params, np.where(np.isnan(poisoned), 0.0, x))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.isfinite(np.asarray(a)).all()
        assert_close(a, np.asarray(b))


@pytest.mark.slow
def test_functions_masks_and_weights() -> None:
    params, x = made(), inputs()
    ids = np.sort(np.random.default_rng(4).integers(0, 3, (B, T)), 1)
    allowed = (ids[:, :, None] == ids[:, None]) & CAUSAL
    want = oracle(params, x, allowed)
    for given in (
        {"mask_mod": mods.document(ids)},
        {"mask": Mask.segments(query_ids=ids, key_value_ids=ids)},
    ):
        got = latent.latent_attention(params, x, rotate=ROTATE, is_causal=True, **given)
        assert_close(got, want)
    out, weights = latent.latent_attention(
        params, x, rotate=ROTATE, mask=allowed[:, None], return_weights=True
    )
    assert_close(out, want)
    assert weights.shape == (B, N, T, T)
    rates = mods.alibi_slopes(4)[:N]
    cache = latent.LatentCache.empty(params, B, T)
    options: dict[str, Any] = {"rotate": ROTATE, "score_mod": mods.alibi(rates)}
    whole = latent.latent_attention(params, x, is_causal=True, **options)
    out, cache = latent.prefill(params, x[:, :6], cache, **options)
    rest, cache = latent.extend(params, x[:, 6:], cache, **options)
    assert_close(jnp.concatenate([out, rest], 1), np.asarray(whole))


def test_jit_and_vmap() -> None:
    params, x = made(), inputs()
    want = np.asarray(latent.latent_attention(params, x, rotate=ROTATE, is_causal=True))
    call = partial(latent.latent_attention, rotate=ROTATE, is_causal=True)
    assert_close(jax.jit(call)(params, x), want)
    assert_close(jax.vmap(call, (None, 0))(params, x), want)


def test_norms_of_tokens_that_nothing_attends() -> None:
    """Their features are zeroed, and zeros have no direction: an epsilon of 0 divides 0 by 0."""
    params, x = made(use_bias=False), inputs(size=4)

    def gradients(x: Any, epsilon: float, mask: Mask) -> Any:
        semantics = Semantics(qk_norm_epsilon=epsilon)

        def loss(params: Any) -> Any:
            return (latent.latent_attention(params, x, mask=mask, semantics=semantics) ** 2).sum()

        return jax.jit(jax.grad(loss))(params)

    lengths = np.asarray([3] * B)
    mask = Mask.lengths(query=lengths, key_value=lengths)
    found, want = gradients(x, 0.0, mask), gradients(x[:, :3], 1e-12, Mask())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize(
    ("change", "error", "printed"),
    [
        ({"semantics": Semantics(qk_norm="rms")}, ValueError, "qk_norm='rms'.*norms of latents"),
        ({"semantics": Semantics(add_zero_attn=True)}, ValueError, "add_zero_attn"),
        ({"x": np.zeros((2, 3, 5), "float32")}, ValueError, r"x: expected axes .*Dq=7"),
        ({"params": None}, TypeError, "LatentParams, got NoneType"),
        ({"x": np.zeros((2, 3, D), "int32")}, TypeError, "x must be a floating array"),
        ({"positions": np.zeros((3, T), int)}, ValueError, r"positions: expected axes \(\*B, T\)"),
        ({"positions": np.zeros((T,), "float32")}, TypeError, "positions must be an integer"),
        ({"dropout_key": np.zeros(3)}, TypeError, "dropout_key must be one PRNG key"),
        ({"rotate": SCALED._replace(rotate=3)}, TypeError, "rotate must be a function"),
        ({"rotate": SCALED._replace(beta=jnp.ones(()))}, TypeError, "ScaledQueries.beta must be"),
        ({"rotate": SCALED._replace(floor=0)}, ValueError, "ScaledQueries must have floor > 0"),
        ({"rotate": SCALED._replace(first=-1)}, ValueError, "floor > 0 and first >= 0, got"),
    ],
)
def test_wrong_arguments(change: Any, error: Any, printed: str) -> None:
    arguments: dict[str, Any] = {"params": made(), "x": inputs()} | change
    with pytest.raises(error, match=printed):
        latent.latent_attention(arguments.pop("params"), arguments.pop("x"), **arguments)


def test_wrong_parameters() -> None:
    params, x = made(), inputs()
    wrong = [
        (params._replace(query=jaxmha.Projection(np.zeros((P, N, 8), "f"))), "E=8 .*H \\+ R = 5 \\+ 4"),
        (params._replace(latent_norm=np.zeros(3, "f")), r"latent_norm: expected axes \(L\)"),
        (params._replace(key=params.key._replace(bias=np.zeros((N, H), "f"))), "key has a bias"),
        (params._replace(query_latent=None), "query_latent is None"),
    ]  # fmt: skip
    for given, printed in wrong:
        with pytest.raises(ValueError, match=printed):
            latent.latent_attention(given, x)


@pytest.mark.usefixtures("no_shape_hook")
def test_wrong_caches() -> None:
    params, x = made(), inputs()
    cache = latent.LatentCache.empty(params, B, 4)
    with pytest.raises(ValueError, match="'mean' is the mean over all keys"):
        latent.extend(params, x[:, :1], cache, semantics=Semantics(fully_masked="mean"))
    with pytest.raises(ValueError, match=r"T=13 tokens are more than the S=4 slots"):
        latent.prefill(params, x, cache)
    with pytest.raises(ValueError, match=r"T=13 new tokens do not fit into the S=4"):
        latent.decode_step(params, x, cache)
    with pytest.raises(ValueError, match=r"cache.latents: expected axes \(B, S, C\)"):
        latent.decode_step(params, x[:1, :1], cache)
    pages = latent.paged_cache(params, B, 4, pages=3, page_size=2)
    with pytest.raises(ValueError, match=r"T=13 new tokens do not fit into the S=4"):
        latent.decode_step(params, x, pages)
    with pytest.raises(ValueError, match=r"cache.value: expected axes \(P, K, page, h\)"):
        latent.decode_step(params, x[:, :1], pages._replace(value=pages.key))
    with pytest.raises(TypeError, match=r"cache must be a jaxmha\.LatentCache"):
        latent.decode_step(params, x[:, :1], jaxmha.KVCache(x, x, x))  # type: ignore[type-var]
    other: Any = jaxmha.init_params(jax.random.key(0), num_heads=2, features=6)
    with pytest.raises(TypeError, match=r"got MHAParams: .*a cache from jaxmha\.KVCache\.empty"):
        latent.LatentCache.empty(other, B, 4)
