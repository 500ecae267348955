"""Score and mask functions at the edges: wide integers, empty axes, constants, wrong arguments."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import latent, mods
from tests import drawn
from tests.drawn import to_jax

MANY = 2**31 - 1


def attend(B: int = 2, T: int = 6, N: int = 2, **options: Any) -> jax.Array:
    x = to_jax(np.random.default_rng(0).standard_normal((B, T, N, 4)), "float32")
    found: jax.Array = jaxmha.dot_product_attention(x, x, x, **options)
    return found


def allowed(mask_mod: Any, T: int = 6, b: int = 0) -> Any:
    i, j = np.ogrid[:T, :T]
    place = (to_jax(x, "int32") for x in np.broadcast_arrays(i, j))
    return np.asarray(jax.vmap(jax.vmap(lambda i, j: mask_mod(b, 0, i, j)))(*place))


@pytest.mark.parametrize("axis", ["B", "N"])
def test_a_block_mask_of_one_row_does_not_stand_for_others(axis: str) -> None:
    ids = jnp.asarray([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2]])

    def mask_mod(b: Any, n: Any, i: Any, j: Any) -> Any:
        row = b if axis == "B" else n
        return ids[row, i] == ids[row, j]

    with pytest.raises(ValueError, match=f"made for {axis}=1, its function reads"):
        attend(mask_mod=mods.block_mask(mask_mod, 6, block=2))
    made = mods.block_mask(mask_mod, 6, **{axis: 2}, block=2)
    np.testing.assert_allclose(attend(mask_mod=made), attend(mask_mod=mask_mod), atol=1e-6)
    attend(mask_mod=mods.block_mask(mods.causal(), 6, block=2))


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_wide_integers_keep_their_values(dtype: Any) -> None:
    ids = np.array([0, 2**32, 2**32, 5, 2**33, 0], dtype)
    np.testing.assert_array_equal(allowed(mods.document(ids)), ids[:, None] == ids)
    np.testing.assert_array_equal(
        allowed(mods.document(ids, ids.astype(np.int64))), ids[:, None] == ids
    )
    for prefix in (dtype(2**32), np.array([2**32, 2**32], dtype), 2**40):
        assert allowed(mods.prefix_lm(prefix), b=1).all()


def test_wide_positions_rotate() -> None:
    x = jnp.ones((3, 1, 4))
    at = np.array([2**31, 2**32, 2**40])
    slow = np.array([1e-6, 1e-9], np.float32)
    for positions in (at, at.astype(np.uint64)):
        found = jaxmha.rope(x, positions, inv_freq=slow)
        angle = at.astype(np.float32)[:, None] * slow
        want = np.cos(angle) - np.sin(angle)
        np.testing.assert_allclose(found[:, 0, :2], want, atol=1e-5)


@pytest.mark.parametrize(
    ("mask_mod", "bounds"),
    [
        (lambda: mods.window(0, MANY), (0, MANY)),
        (lambda: mods.window(MANY, np.int64(2**40)), (MANY, MANY)),
        (lambda: mods.window(2**40, np.uint8(0)), (MANY, 0)),
        (lambda: mods.window(np.uint8(2), np.int8(1)), (2, 1)),
        (lambda: mods.causal(MANY), (MANY, MANY)),
        (lambda: mods.causal(-(2**40)), (MANY, -MANY)),
        (lambda: mods.causal(np.uint8(1)), (MANY, 1)),
    ],
)
def test_bounds_do_not_overflow(mask_mod: Any, bounds: tuple[int, int]) -> None:
    distance = np.arange(6) - np.arange(6)[:, None]
    want = (distance >= -bounds[0]) & (distance <= bounds[1])
    np.testing.assert_array_equal(allowed(mask_mod()), want)
    np.testing.assert_array_equal(jax.jit(lambda mod: allowed_of(mod))(mask_mod()), want)


def allowed_of(mask_mod: Any) -> Any:
    at = jnp.arange(6)
    return jax.vmap(lambda i: jax.vmap(lambda j: mask_mod(0, 0, i, j))(at))(at)


@pytest.mark.parametrize(
    "given",
    [
        (np.uint8(2), np.uint8(2), np.uint8(1)),
        (np.int8(2), np.int8(100), np.int8(0)),
        (np.int8(3), 2**40, 2**31),
        (2, MANY, MANY),
    ],
)
def test_dilated_bounds_do_not_overflow(given: tuple[Any, ...]) -> None:
    dilation, left, right = (int(x) for x in given)
    distance = np.arange(6) - np.arange(6)[:, None]
    want = (distance % dilation == 0) & (distance >= -left * dilation)
    want &= distance <= right * dilation
    np.testing.assert_array_equal(allowed(mods.dilated(*given)), want)


@pytest.mark.parametrize("sizes", [{"B": 0}, {"T": 0}])
@pytest.mark.parametrize("implementation", ["reference", "blocked"])
def test_functions_on_empty_axes(sizes: dict[str, int], implementation: Any) -> None:
    for mask_mod in (mods.causal(), lambda b, n, i, j: j < 3, lambda b, n, i, j: n < 9):
        found = attend(**sizes, mask_mod=mask_mod, implementation=implementation)
        assert found.size == 0


@pytest.mark.slow_variants("*-reference", "!False-reference")
@pytest.mark.parametrize("implementation", ["reference", "blocked"])
@pytest.mark.parametrize("constant", [True, False, jnp.array(True), np.True_])
def test_constant_functions(implementation: Any, constant: Any) -> None:
    def mask_mod(*_: Any) -> Any:
        return constant

    want = attend() if constant else np.zeros((2, 6, 2, 4))
    for given in (mask_mod, mods.block_mask(mask_mod, 6, block=2), mods.all_of(mask_mod)):
        found = attend(mask_mod=given, implementation=implementation)
        np.testing.assert_allclose(found, want, atol=1e-6)
    zero = attend(score_mod=lambda *_: jnp.float32(0), implementation=implementation)
    assert jnp.isfinite(zero).all()


LAYOUT = np.ones((3, 3), bool)
TABLE = jnp.ones((32, 2))
WRONG: Any = mods  # takes arguments of wrong types


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WRONG.alibi_slopes(0), "num_heads must be an integer"),
        (lambda: WRONG.alibi_slopes(-3), "num_heads must be an integer"),
        (lambda: WRONG.alibi_slopes(2.5), "num_heads must be an integer"),
        (lambda: WRONG.all_of(), "all_of takes at least one mask function"),
        (lambda: WRONG.any_of(1), "any_of takes mask functions, got int"),
        (lambda: WRONG.block_mask(mods.causal(), "a"), "T must be an integer"),
        (lambda: WRONG.block_mask(mods.causal(), 2.5), "T must be an integer"),
        (lambda: WRONG.block_mask(None, 4), "mask_mod must be a function, got None"),
        (lambda: WRONG.relative_bias(TABLE, 3), "bucket must be a function, got int"),
        (lambda: WRONG.relative_bias(TABLE[:31], mods.t5()), "table: expected 32 rows"),
        (lambda: WRONG.relative_bias(TABLE, mods.swin(4)), "table: expected 49 rows"),
        (lambda: WRONG.causal("a"), "offset must be an integer, got str"),
        (lambda: WRONG.window(None, 1), "left must be an integer, got NoneType"),
        (lambda: WRONG.window(1, np.arange(2)), "right: expected one integer, got shape"),
        (lambda: WRONG.prefix_lm(2.5), "prefix must be an integer or integers, got float"),
        (lambda: WRONG.soft_cap("a"), "cap must be a Python number"),
        (lambda: WRONG.soft_cap(0.0), "cap must be positive, got 0.0"),
        (lambda: WRONG.soft_cap(np.ones(2)), "cap: expected one number"),
        (lambda: WRONG.swin(0), "height must be an integer"),
        (lambda: WRONG.swin("a"), "height must be an integer"),
        (lambda: WRONG.t5(num_buckets=32.5), "num_buckets must be an integer"),
        (lambda: WRONG.t5(max_distance=None), "max_distance must be an integer"),
        (lambda: WRONG.block_sparse(LAYOUT, 0), "block must be an integer"),
        (lambda: WRONG.dilated(0, 2), "dilation must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


IDS = np.zeros(6, int)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score_mod": mods.alibi(jnp.ones(1))}, "score_mod: slopes is for N=1, the call has N=2"),
        ({"score_mod": mods.relative_bias(TABLE[:, :1], mods.t5())}, "score_mod: table is for N=1"),
        ({"score_mod": mods.relative_bias(TABLE, mods.swin(2))}, "bucket is for T=4, .* has T=6"),
        ({"mask_mod": mods.document(IDS[:5])}, "mask_mod: query_ids is for T=5, the call has T=6"),
        ({"mask_mod": mods.document(IDS, IDS[:4])}, "key_ids is for S=4, the call has S=6"),
        ({"mask_mod": mods.document(np.stack([IDS] * 3))}, "query_ids is for B=3, .* B=2"),
        ({"mask_mod": mods.prefix_lm(np.arange(3))}, "prefix is for B=3"),
        ({"mask_mod": mods.block_sparse(LAYOUT, 1)}, "layout is for T=3"),
        ({"mask_mod": mods.block_sparse(np.stack([LAYOUT] * 3), 2)}, "layout is for N=3"),
        (
            {"mask_mod": mods.any_of(mods.causal(), mods.all_of(mods.document(IDS[:5])))},
            "query_ids is for T=5",
        ),
        ({"mask_mod": mods.block_mask(mods.document(IDS[:5]), 6)}, "query_ids is for T=5"),
    ],
)
def test_arrays_of_other_sizes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(**options)
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda given: attend(**given))(options)


def test_arrays_that_serve_all_rows_are_taken() -> None:
    ids = np.array([0, 0, 1, 1, 1, 2, 2, 2])
    want = attend(mask_mod=mods.document(ids[:6]))
    for given in (ids, ids[None], np.stack([ids, ids])):
        np.testing.assert_array_equal(attend(mask_mod=mods.document(given)), want)
    attend(mask_mod=mods.prefix_lm(np.arange(2)))


LATENT: dict[str, Any] = {
    "num_heads": 2,
    "features": 8,
    "latent_dim": 6,
    "rotary_dim": 4,
    "head_dim": 5,
}


def layer(N: int = 2, **options: Any) -> tuple[Any, jax.Array]:
    x = to_jax(np.random.default_rng(0).standard_normal((2, 6, 8)), "float32")
    return drawn.params(num_heads=N, features=8, **options), x


PER_SEQUENCE: list[tuple[dict[str, Any], str]] = [
    ({"score_mod": mods.alibi(jnp.ones(1))}, "score_mod: slopes is for N=1, the call has N=2"),
    ({"score_mod": mods.relative_bias(TABLE[:, :1], mods.t5())}, "score_mod: table is for N=1"),
    ({"mask_mod": mods.document(np.stack([IDS] * 3))}, "query_ids is for B=3, .* B=2"),
    ({"mask_mod": mods.prefix_lm(np.arange(3))}, "prefix is for B=3"),
    ({"mask_mod": mods.block_sparse(np.stack([LAYOUT] * 3), 2)}, "layout is for N=3"),
    ({"mask_mod": mods.block_mask(lambda b, n, i, j: n > 0, 6, N=3)}, "made for .*N=3, .* N=2"),
]


@pytest.mark.parametrize(("options", "message"), PER_SEQUENCE)
def test_steps_refuse_arrays_of_other_rows_and_heads(options: dict[str, Any], message: str) -> None:
    params, x = layer()
    cache = jaxmha.KVCache.empty(params, 2, 8)
    latents = drawn.latent_params(**LATENT)
    steps: list[Any] = [jaxmha.prefill, jaxmha.extend, jaxmha.decode_step]
    calls = [partial(step, params, x, cache) for step in steps]
    calls.append(partial(latent.extend, latents, x, latent.LatentCache.empty(latents, 2, 8)))
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call(**options)


def test_steps_take_arrays_of_the_whole_sequence() -> None:
    params, x = layer()
    _, cache = jaxmha.prefill(params, x[:, :5], jaxmha.KVCache.empty(params, 2, 8))
    for mask_mod in (
        mods.document(IDS),
        mods.block_sparse(LAYOUT, 2),
        mods.block_mask(mods.document(IDS), 6),
    ):
        out, _ = jaxmha.decode_step(params, x[:, 5:], cache, mask_mod=mask_mod)
        assert jnp.isfinite(out).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *PER_SEQUENCE,
        ({"mask_mod": mods.document(IDS, IDS[:5])}, "key_ids is for S=5, the call has S=6"),
        ({"mask_mod": mods.document(IDS[:5])}, "query_ids is for T=5, the call has T=6"),
        ({"mask_mod": mods.block_mask(mods.causal(), 5)}, "made for T=5, S=5, the call .* S=6:"),
    ],
)
def test_extra_positions_leave_the_sizes_checked(options: dict[str, Any], message: str) -> None:
    params, x = layer(use_bias_kv=True)
    with pytest.raises(ValueError, match=message):
        jaxmha.multi_head_attention(params, x, **options)
    params, x = layer()
    zero = jaxmha.Semantics(add_zero_attn=True)
    with pytest.raises(ValueError, match=message):
        jaxmha.prefill(params, x, jaxmha.KVCache.empty(params, 2, 8), semantics=zero, **options)


def test_a_block_mask_under_extra_positions() -> None:
    params, x = layer(use_bias_kv=True)
    want = jaxmha.multi_head_attention(params, x, mask_mod=lambda b, n, i, j: i >= j)
    made = mods.block_mask(mods.all_of(mods.causal(), mods.document(IDS)), 6, block=2)
    got = jaxmha.multi_head_attention(params, x, mask_mod=made)
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("T", [5, 7])
def test_block_masks_of_other_sizes_are_named(T: int) -> None:
    made, message = mods.block_mask(mods.causal(), T), f"made for T={T}, S={T}, the call .* T=6"
    with pytest.raises(ValueError, match=message):
        attend(mask_mod=made, scale=jnp.float32(0.5))
    params, x = layer()
    with pytest.raises(ValueError, match=message):
        jaxmha.multi_head_attention(params, x, mask_mod=made)
    latents = drawn.latent_params(**LATENT)
    with pytest.raises(ValueError, match=message):
        latent.latent_attention(latents, x, mask_mod=made)
