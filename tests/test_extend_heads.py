"""Steps over heads of one's own, and rotations by positions of one's own."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmha
from jaxmha import KVCache, Mask, Semantics, extend_heads, latent, rope
from jaxmha.flax import linen
from jaxmha.flax.latent.nnx import LatentAttention
from jaxmha.flax.nnx import MultiHeadAttention
from tests import test_latent, tolerance
from tests.drawn import to_jax
from tests.paged import LONGEST, ROWS, empty, run
from tests.test_cache import B, D, N, T, make

PADS = np.asarray([3, 0, 1])  # tokens of padding to the left of each row
ROTATE = partial(rope, base=100.0)


def rotary_params() -> Any:
    return jaxmha.init_params(
        jax.random.key(5), num_heads=N, num_kv_heads=2, head_dim=6, features=D
    )


def test_one_step_with_positions_of_its_own() -> None:
    """A step of the layer, and a step of its projected heads, at the same positions."""
    params, x = rotary_params(), make()[1][:, :1]
    rng, empty = np.random.default_rng(0), KVCache.empty(params, B, 7)
    key, value = (to_jax(rng.standard_normal(a.shape), np.float32) for a in empty[:2])
    cache, at = KVCache(key, value, jnp.asarray([4, 0, 6])), np.asarray([[9], [2], [0]])
    want, longer = jaxmha.decode_step(params, x, cache, rotate=ROTATE, positions=at)
    q, k, v = jaxmha.project(params, x)
    out, own = extend_heads(ROTATE(q, at), ROTATE(k, at), v, cache)
    tolerance.assert_close(jaxmha.combine(params, out), np.asarray(want, np.float64), factor=2)
    tolerance.assert_close(own.key, np.asarray(longer.key, np.float64))
    assert own.lengths.tolist() == longer.lengths.tolist() == [5, 1, 7]
    turned = jaxmha.decode_step(params, x, cache, rotate=ROTATE)[0]
    assert tolerance.error(turned, np.asarray(want)) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "pages"])
def test_heads_are_those_of_the_layer(kind: str) -> None:
    params, x = make()
    params = params._replace(sinks=jnp.asarray([0.3, -1.0, 2.0, 0.0, 1.0, -0.5]))
    cache: Any = KVCache.empty(params, B, LONGEST) if kind == "whole" else empty(params)
    options: dict[str, Any] = {
        "mask": Mask.window(2, 0),
        "semantics": Semantics(logits_soft_cap=0.7, scale=0.9),
        "mask_mod": lambda b, n, i, j: (j + n) % 4 != 1,
    }
    own = cache
    for counts in ([5, 2, 0], [1, 2, 2]):
        given = {**options, "q_lengths": np.asarray(counts)}
        want, cache = run(params, cache, x[:, : max(counts)], **given)
        heads = jaxmha.project(params, x[:, : max(counts)])
        out, own = extend_heads(*heads, own, sinks=params.sinks, **given)
        assert not np.any(np.asarray(out)[np.arange(max(counts)) >= np.asarray(counts)[:, None]])
        found = jaxmha.combine(params, out)
        for row, count in enumerate(counts):
            expected = np.asarray(want, np.float64)[row, :count]
            tolerance.assert_close(found[row, :count], expected, factor=2)
    assert own.lengths.tolist() == cache.lengths.tolist()


def test_an_excluded_score_that_overflows_has_no_derivative() -> None:
    """The key of the second token, times the query of the first, is inf; the function reads 0."""
    query, key, value = (
        np.asarray(x, np.float32).reshape(1, 2, 1, 1)
        for x in ((1e30, 1e-30), (1e-30, 1e30), (1, 2))
    )
    empty = jnp.zeros((1, 1, 3, 1))
    cache = KVCache(empty, empty, jnp.zeros(1, np.int32))

    @jax.grad
    def derivative(t: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"semantics": Semantics(scale=1.0)}
        options["score_mod"] = lambda score, *_: score * t
        return extend_heads(query, key, value, cache, **options)[0].sum()

    odds = np.exp(1.0)  # of the second token, in its own row
    tolerance.assert_close(derivative(jnp.float32(1)), np.asarray(odds / (1 + odds) ** 2))


@pytest.mark.usefixtures("no_shape_hook")
def test_wrong_heads() -> None:
    params, x = make()
    cache, (q, k, v) = KVCache.empty(params, B, T), jaxmha.project(params, x[:, :2])
    calls: list[tuple[Any, str]] = [
        (lambda: extend_heads(q, k, v[:, :1], cache), r"value: expected axes \(B, T, K, h\)"),
        (lambda: extend_heads(q[:, :, :5], k, v, cache), "N=5 must be a multiple of .* K=2"),
        (lambda: extend_heads(q, k[..., :3], v, cache), r"key: expected axes \(B, T, K, H\)"),
        (lambda: extend_heads(q, k, v[..., :3], cache), r"cache.value: expected axes"),
        (lambda: extend_heads(q, k, v, q), "cache must be a jaxmha.KVCache"),  # type: ignore[type-var]
        (lambda: extend_heads(q.astype(int), k, v, cache), "query must be a floating array"),
        (lambda: extend_heads(q, k, v, cache, sinks=jnp.ones(2)), r"sinks: expected axes \(N\)"),
        (
            lambda: extend_heads(q, k, v, cache, semantics=Semantics(add_zero_attn=True)),
            "without extra positions: use jaxmha.extend",
        ),
        (
            lambda: extend_heads(q, k, v, cache, q_lengths=np.asarray([3, 0, 0])),
            r"q_lengths\[0\] is 3: expected 0 to 2",
        ),
        (
            lambda: extend_heads(q, k, v, cache, semantics=Semantics(fully_masked="mean")),
            "'mean' is the mean over all keys",
        ),
    ]
    for call, problem in calls:
        with pytest.raises((ValueError, TypeError), match=problem):
            call()


@pytest.mark.slow
def test_prompts_padded_on_the_left_have_positions_of_their_own() -> None:
    """Every row is the row without its padding, which starts at position 0."""
    params, x = rotary_params(), make()[1]
    at = np.arange(T)[None] - PADS[:, None]
    valid = at >= 0
    cache = KVCache.empty(params, B, T)
    out, cache = jaxmha.prefill(
        params,
        x[:, :5],
        cache,
        rotate=ROTATE,
        positions=at[:, :5],
        mask=Mask.padding(key_value=valid[:, :5]),
    )
    outs, padding = [out], Mask.padding(key_value=valid)
    for rows in (slice(5, 7), slice(7, 8)):
        step = jaxmha.extend if rows.start == 5 else jaxmha.decode_step
        out, cache = step(
            params, x[:, rows], cache, rotate=ROTATE, positions=at[:, rows], mask=padding
        )
        outs.append(out)
    found = np.concatenate(outs, 1)
    for row, pad in enumerate(PADS):
        alone = x[row : row + 1, pad:8]
        want = jaxmha.prefill(params, alone, KVCache.empty(params, 1, T), rotate=ROTATE)[0]
        tolerance.assert_close(found[row, pad:], np.asarray(want[0], np.float64), factor=4)


@pytest.mark.slow
def test_positions_of_several_kinds() -> None:
    """Time, row and column, which `rope` takes with `sections`."""
    params, x = rotary_params(), make()[1]
    at = np.random.default_rng(0).integers(0, 30, (3, B, T))
    rotate = partial(rope, sections=(1, 1, 1))
    q, k, v = jaxmha.project(params, x)
    heads = jaxmha.dot_product_attention(rotate(q, at), rotate(k, at), v, is_causal=True)
    want = np.asarray(jaxmha.combine(params, heads))
    cache = KVCache.empty(params, B, T)
    first, cache = jaxmha.prefill(params, x[:, :7], cache, rotate=rotate, positions=at[..., :7])
    last, cache = jaxmha.extend(params, x[:, 7:], cache, rotate=rotate, positions=at[..., 7:])
    tolerance.assert_close(np.concatenate([first, last], 1), want, factor=4)


@pytest.mark.slow
def test_positions_of_latents() -> None:
    params, x = test_latent.made(), test_latent.inputs()
    at = np.random.default_rng(0).integers(0, 30, x.shape[:2])
    want = latent.latent_attention(
        params, x, positions=at, rotate=test_latent.ROTATE, is_causal=True
    )
    layer = LatentAttention.from_params(params, rotate=test_latent.ROTATE)
    cache = latent.LatentCache.empty(params, test_latent.B, test_latent.T)
    first, cache = layer.prefill(x[:, :7], cache, positions=at[:, :7])
    last, cache = layer.extend(x[:, 7:], cache, positions=at[:, 7:])
    tolerance.assert_close(np.concatenate([first, last], 1), np.asarray(want), factor=4)


@pytest.mark.usefixtures("no_shape_hook")
def test_wrong_positions() -> None:
    params, x = make()
    cache = KVCache.empty(params, B, T)
    for rotate, positions, problem in (
        (None, np.arange(2), "positions: nothing is rotated; give rotate"),
        (rope, np.arange(3), r"positions: expected axes \(T\) with T=2"),
        (rope, np.ones((B + 1, 2), int), r"positions: expected axes \(.*#B, T\) with B=3, T=2"),
        (rope, np.ones(2), "positions must be an integer array"),
    ):
        for step in (jaxmha.prefill, jaxmha.decode_step):
            with pytest.raises((ValueError, TypeError), match=problem):
                step(params, x[:, :2], cache, rotate=rotate, positions=positions)


@pytest.mark.slow_variants("*", "!nnx-extend")
@pytest.mark.parametrize("name", ["prefill", "extend", "decode_step"])
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_layers_take_functions_and_positions(kind: str, name: str) -> None:
    params, x = rotary_params(), make()[1]
    cache = KVCache.empty(params, ROWS, T)
    more: dict[str, Any] = {
        "positions": np.arange(2)[None] - PADS[:, None],
        "score_mod": lambda s, b, n, i, j: s + (j * (n + 1) % 5).astype(s.dtype) / 10,
        "mask_mod": lambda b, n, i, j: (j + n) % 4 != 1,
    }
    if name == "extend":
        more["q_lengths"] = np.asarray([2, 1, 0])
    if kind == "linen":
        module, variables = linen.MultiHeadAttention.from_params(params, rotate=ROTATE)
        step: Any = partial(module.apply, variables, method=name)
    else:
        layer = MultiHeadAttention.from_params(params, rotate=ROTATE, rngs=nnx.Rngs(0))
        step = getattr(layer, name)
    out, found = step(x[:, :2], cache, **more)
    want, longer = getattr(jaxmha, name)(params, x[:, :2], cache, rotate=ROTATE, **more)
    tolerance.assert_close(out, np.asarray(want, np.float64), factor=2)
    assert found.lengths.tolist() == longer.lengths.tolist()
