"""A cache keeps what it is given, in the dtype and the lengths that it is given, or refuses it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

import jaxmha
import jaxmha.flax.nnx
from jaxmha import KVCache, Mask, Semantics, latent
from tests import drawn, tolerance
from tests.drawn import to_jax
from tests.test_cache import B, D, T, make

FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e3m4")
NO_STORAGE = (
    "int8", "uint8", "int32", "bool", "complex64", "int4", "float8_e8m0fnu", "float4_e2m1fn",
    "float6_e2m3fn",
)  # fmt: skip


def hand_made(cache: KVCache, dtype: Any) -> KVCache:
    return cache._replace(key=cache.key.astype(dtype), value=cache.value.astype(dtype))


FORGOTTEN = {
    "query lengths": Mask.lengths(query=np.array([4, 2])),
    "query padding": Mask.padding(query=np.arange(4) < np.array([[4], [2]])),
    "segments": Mask.segments(query_ids=np.zeros((2, 4), int), key_value_ids=np.zeros((2, 4), int)),
    "packed": Mask.packed(np.array([[2, 2], [4, 0]]), size=4),
    "an offset": Mask.causal(-1),
}


@pytest.mark.parametrize("name", FORGOTTEN)
@pytest.mark.parametrize("kind", ["heads", "latent"])
def test_conditions_that_a_cache_does_not_keep(name: str, kind: str) -> None:
    """The next step would attend the padding, or another segment."""
    x = jnp.zeros((2, 4, 6))
    if kind == "heads":
        params: Any = drawn.params(num_heads=2, features=6)
        cache: Any = KVCache.empty(params, 2, 7)
        prefill: Any = jaxmha.prefill
    else:
        sizes: Any = {
            "num_heads": 2,
            "features": 6,
            "latent_dim": 5,
            "rotary_dim": 4,
            "head_dim": 3,
        }
        params = drawn.latent_params(**sizes)
        cache, prefill = latent.LatentCache.empty(params, 2, 7), latent.prefill
    with pytest.raises(ValueError, match=r"mask: a cache keeps the lengths of prompts, and not "):
        prefill(params, x, cache, mask=FORGOTTEN[name])
    kept = (Mask.lengths(key_value=np.array([4, 2])), Mask.causal())
    for mask in (*kept, Mask.causal(np.int64(0))):
        jax.eval_shape(partial(prefill, params, mask=mask), x, cache)


def test_integers_need_the_scales_of_a_paged_cache() -> None:
    params, _ = make()
    with pytest.raises(TypeError, match="use a paged cache"):
        KVCache.empty(params, 2, 7, "int8")


@pytest.mark.everyday(dtype=["int8", "float8_e8m0fnu", "float6_e2m3fn"])
@pytest.mark.parametrize("dtype", NO_STORAGE)
def test_dtypes_that_hold_no_keys(dtype: str) -> None:
    """Keys cut to integers would attend in silence."""
    params, x = make()
    with pytest.raises(TypeError, match=f"dtype.*{dtype}"):
        KVCache.empty(params, B, T, dtype)
    if dtype not in ("float8_e8m0fnu", "float6_e2m3fn"):
        cache = hand_made(KVCache.empty(params, B, T), dtype)
        for run in (jaxmha.prefill, jaxmha.decode_step):
            with pytest.raises(TypeError, match=rf"cache\.key.*{dtype}"):
                run(params, x[:, :1], cache)


def test_float64_is_not_rounded() -> None:
    params, x = make()
    with pytest.raises(TypeError, match="jax_enable_x64"):
        KVCache.empty(params, B, T, np.float64)
    cache = KVCache.empty(params, B, T)
    cache = cache._replace(key=np.zeros(cache.key.shape), value=np.zeros(cache.value.shape))
    for run in (jaxmha.prefill, jaxmha.decode_step):
        with pytest.raises(TypeError, match=r"cache\.key is float64"):
            run(params, x[:, :1], cache)


@pytest.mark.parametrize("run", [jaxmha.prefill, jaxmha.decode_step])
def test_float64_inputs_and_parameters_are_not_rounded(run: Any) -> None:
    params, x = make()
    cache = KVCache.empty(params, B, T)
    with pytest.raises(TypeError, match="x is float64"):
        run(params, np.asarray(x[:, :1], np.float64), cache)
    assert params.out is not None
    wide = params._replace(out=jaxmha.Projection(np.asarray(params.out.kernel, np.float64)))
    with pytest.raises(TypeError, match=r"params\.out\.kernel is float64"):
        run(wide, x[:, :1], cache)


@pytest.mark.everyday(dtype=["float8_e4m3fn"], new=[3])
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("dtype", [*FLOAT8, "float16", "bfloat16"])
def test_small_dtypes_are_rounded_once(dtype: str, new: int) -> None:
    """A step attends the rounded keys and values exactly."""
    params, x = make()
    small = KVCache.empty(params, B, T, dtype)
    _, cache = jaxmha.prefill(params, x[:, :5], small)
    assert cache.key.dtype == cache.value.dtype == dtype
    out, longer = jaxmha.decode_step(params, x[:, 5 : 5 + new], cache)
    assert longer.key.dtype == dtype
    assert out.dtype == x.dtype

    query, key, value = jaxmha.project(params, x[:, : 5 + new])
    key, value = (y.astype(dtype).astype(y.dtype) for y in (key, value))
    heads = jaxmha.dot_product_attention(
        query[:, 5:], key, value, mask=Mask.causal(5), implementation="reference"
    )
    tolerance.assert_close(out, np.asarray(jaxmha.combine(params, heads)), factor=2)


def test_keys_and_values_of_two_dtypes() -> None:
    params, x = make()
    cache = KVCache.empty(params, B, T)
    mixed = cache._replace(key=cache.key.astype(jnp.float8_e5m2), value=cache.value.astype("f2"))
    _, mixed = jaxmha.prefill(params, x[:, :5], mixed)
    out, mixed = jaxmha.decode_step(params, x[:, 5:6], mixed)
    assert np.isfinite(np.asarray(out)).all()
    assert (mixed.key.dtype, mixed.value.dtype) == (jnp.float8_e5m2, jnp.float16)


def test_negative_lengths_are_empty() -> None:
    params, x = make()
    lengths = np.asarray([-2, 3, 0], np.int32)
    mask = Mask.lengths(key_value=to_jax(lengths))
    _, cache = jaxmha.prefill(params, x[:, :4], KVCache.empty(params, B, T), mask=mask)
    assert cache.lengths.tolist() == [0, 3, 0]
    taken_back = cache._replace(lengths=cache.lengths - 2)
    out, longer = jaxmha.decode_step(params, x[:, :1], taken_back)
    want, _ = jaxmha.decode_step(params, x[:, :1], cache._replace(lengths=np.array([0, 1, 0])))
    tolerance.assert_same(out, want)
    assert longer.lengths.tolist() == [1, 2, 1]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64", "uint64"])
def test_lengths_of_any_integer_dtype(dtype: str) -> None:
    params, x = make()
    _, cache = jaxmha.prefill(
        params, x[:, :3], KVCache.empty(params, B, T), mask=Mask.lengths(key_value=np.full(B, 2))
    )
    want, longer = jaxmha.decode_step(params, x[:, 3:4], cache)
    out, same = jaxmha.decode_step(params, x[:, 3:4], cache._replace(lengths=np.full(B, 2, dtype)))
    tolerance.assert_same(out, want)
    assert same.lengths.dtype == longer.lengths.dtype == np.int32


@pytest.mark.parametrize("huge", [2**31, 2**32, 2**63 - 1])
def test_lengths_of_any_size(huge: int) -> None:
    """More than there is room for."""
    params, x = make()
    lengths = np.full(B, huge)
    _, cache = jaxmha.prefill(params, x[:, :4], KVCache.empty(params, B, T))
    out, _ = jaxmha.decode_step(params, x[:, :1], cache._replace(lengths=lengths))
    assert np.isnan(np.asarray(out)).all()


@pytest.mark.parametrize(("row", "length"), [(0, 9), (1, -1), (2, 2**40)])
def test_known_lengths_of_prompts_are_refused(row: int, length: int) -> None:
    """Lengths that lie on the device are clipped instead, as `extend` clips its counts."""
    params, x = make()
    latents = drawn.latent_params(num_heads=3, features=D, latent_dim=5, rotary_dim=2, head_dim=3)
    lengths = np.where(np.arange(B) == row, length, 2)
    for run in (
        lambda mask: jaxmha.prefill(params, x[:, :3], KVCache.empty(params, B, T), mask=mask),
        lambda mask: latent.prefill(
            latents, x[:, :3], latent.LatentCache.empty(latents, B, T), mask=mask
        ),
    ):
        with pytest.raises(ValueError, match=rf"lengths\[{row}\] is .*: expected 0 to 3, of the T"):
            run(Mask.lengths(key_value=lengths))
        _, cache = run(Mask.lengths(key_value=to_jax(lengths.clip(-9, 9))))
        assert cache.lengths[row] == (0 if length < 0 else 3)


@pytest.mark.usefixtures("no_shape_hook")
def test_a_rotation_that_is_no_function() -> None:
    params, x = make()
    rotate: Any = "rope"
    cache = KVCache.empty(params, B, T)
    for run in (
        lambda: jaxmha.prefill(params, x, cache, rotate=rotate),
        lambda: jaxmha.decode_step(params, x[:, :1], cache, rotate=rotate),
        lambda: jaxmha.flax.nnx.MultiHeadAttention(2, 6, rotate=rotate, rngs=nnx.Rngs(0)),
    ):
        with pytest.raises(TypeError, match=r"^rotate must be a function .*, got 'rope'"):
            run()


def of_each_kind(kind: str, slots: int = 8) -> Any:
    """A cache, and `append` as a function of it, of tokens that are broadcast to what it stores,
    of counts and of a window."""
    params, _ = make()
    made: dict[str, Any] = {
        "dense": lambda: KVCache.empty(params, B, slots),
        "paged": lambda: jaxmha.PagedKVCache.empty(params, B, slots, pages=9, page_size=2),
        "int8": lambda: jaxmha.PagedKVCache.empty(
            params, B, slots, pages=9, page_size=2, dtype="int8"
        ),
        "latent": lambda: latent.LatentCache(jnp.zeros((B, slots, 5)), jnp.zeros(B, np.int32)),
    }
    K, H, h = 2, 5, 7

    def append(cache: Any, x: Any, counts: Any, left: Any = None) -> Any:
        if kind == "latent":
            return cache.append(x[..., 0, :], counts, left)
        return cache.append(x, np.zeros((*x.shape[:3], h), x.dtype), counts, left)

    return made[kind](), jnp.ones((B, 3, K, H)), append


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize("kind", ["dense", "paged", "int8", "latent"])
def test_append_refuses_before_it_writes(kind: str) -> None:
    cache, x, append = of_each_kind(kind)
    fine, short = np.asarray([3, 0, 1]), np.ones(2, int)
    wrong: list[tuple[Any, Any, str]] = [
        (x, np.asarray([3, 4, 0]), r"counts\[1\] is 4: expected 0 to 3"),
        (x, jnp.asarray([3, 0, -1]), r"counts\[2\] is -1: expected 0 to 3"),
        (x, np.asarray([2**32, 0, 0]), r"counts\[0\] is 4294967296"),
        (x, np.ones(B), "counts must be an integer array, got float64"),
        (x, short, r"counts: expected axes \(B\) with B=3"),
        (x, [3, 0, 1], "counts must be an array, got list"),
        (x.astype(int), fine, "must be a floating array, got int32"),
        (np.asarray(x, np.float64), fine, "is float64, which JAX would round"),
        (x[:2], fine, "expected axes"),
        (x[..., :1], fine, "expected axes"),
        (x[:, :, :1], fine, "expected axes"),
    ]
    for tokens, counts, problem in wrong[: -1 if kind == "latent" else None]:
        with pytest.raises((ValueError, TypeError), match=problem):
            append(cache, tokens, counts)
    for left in (-1, 1.5, True):
        with pytest.raises(ValueError, match="left must be an integer of at least 0"):
            append(cache, x, fine, left)
    with pytest.raises(TypeError, match=r"cache\.lengths must be an integer array"):
        append(cache._replace(lengths=np.ones(B)), x, fine)
    longer, lacking = jax.jit(lambda cache, x: append(cache, x, fine, 2**31 - 1))(cache, x)
    assert longer.lengths.tolist() == [3, 0, 1]
    assert not np.asarray(lacking).any()


@pytest.mark.parametrize("kind", ["dense", "paged", "int8", "latent"])
def test_append_clips_traced_counts_and_negative_lengths(kind: str) -> None:
    cache, x, append = of_each_kind(kind)
    run, counts = jax.jit(append), np.asarray([7, -1, 2])
    longer, _ = run(cache, x, counts)
    want, _ = run(cache, x, counts.clip(0, 3))
    assert want.lengths.tolist() == [3, 0, 2]
    jax.tree.map(tolerance.assert_same, longer, want)
    negative, _ = run(cache._replace(lengths=np.asarray([-5, 0, -1])), x, counts.clip(0, 3))
    jax.tree.map(tolerance.assert_same, negative, want)


@pytest.mark.parametrize("kind", ["dense", "latent"])
def test_a_cache_without_slots_is_full(kind: str) -> None:
    cache, x, append = of_each_kind(kind, slots=0)
    longer, full = append(cache, x, np.asarray([3, 0, 1]))
    assert full.tolist() == [True, False, True]
    assert longer.lengths.tolist() == [3, 0, 1]


@pytest.mark.parametrize("size", [-1, 2.0, True, 2**30 + 1])
@pytest.mark.usefixtures("no_shape_hook")
def test_sizes_of_a_cache(size: Any) -> None:
    params, _ = make()
    with pytest.raises(ValueError, match=r"^length must be (an integer of at least 0|at most)"):
        KVCache.empty(params, B, size)
    if size != 2**30 + 1:
        with pytest.raises(ValueError, match=r"batch_size must be an integer of at least 0"):
            KVCache.empty(params, size, T)


@pytest.mark.usefixtures("no_shape_hook")
def test_sizes_of_a_cache_may_be_symbols() -> None:
    params, _ = make()
    b, s = export.symbolic_shape("b, s")
    run = export.export(jax.jit(lambda x: KVCache.empty(params, x.shape[0], x.shape[1])))
    x = jax.ShapeDtypeStruct((b, s), np.float32)  # type: ignore[no-untyped-call]
    cache = run(x).out_avals[0]
    assert (cache.shape[0], cache.shape[2]) == (b, s)


def test_lengths_that_are_none() -> None:
    params, x = make()
    cache = KVCache.empty(params, B, T)
    lengths: Any = [1, 2, 3]
    for run in (jaxmha.prefill, jaxmha.decode_step):
        with pytest.raises(TypeError, match=r"cache\.lengths must be an array, got list"):
            run(params, x[:, :1], cache._replace(lengths=lengths))
        with pytest.raises(TypeError, match=r"cache\.lengths must be .*integer.*float32"):
            run(params, x[:, :1], cache._replace(lengths=np.ones(B, np.float32)))


@pytest.mark.slow_variants("*", "!0-1-7-True", "!2-0-7-False", "!2-0-0-True")
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize(("b", "t", "s"), [(0, 1, 7), (2, 0, 7), (0, 0, 7), (2, 0, 0), (0, 0, 0)])
def test_empty_sizes(b: int, t: int, s: int, window: bool) -> None:
    params, _ = make(use_bias_kv=True)
    mask = Mask.window(2, None) if window else None
    cache = KVCache.empty(params, b, s)
    for run in (jaxmha.prefill, jaxmha.decode_step):
        out, longer = run(params, jnp.zeros((b, t, D)), cache, mask=mask)
        assert out.shape == (b, t, D)
        assert longer.lengths.tolist() == [t] * b


def test_equal_rotations_are_one_program() -> None:
    """`partial(rope, ...)` written in the call is a new object in every step."""
    params = drawn.params(num_heads=2, head_dim=6, features=D)
    cache, x = KVCache.empty(params, 1, 7), jnp.ones((1, 1, D))
    traced = []

    def turn(x: Any, positions: Any, base: float, dims: int) -> Any:
        traced.append(base)
        return jaxmha.rope(x, positions, base=base, rotary_dim=dims)

    for options in ({"base": 9.0, "dims": 4}, {"base": 9.0, "dims": 4}, {"dims": 4, "base": 9.0}):
        given: Any = options
        _, cache = jaxmha.decode_step(params, x, cache, rotate=partial(turn, **given))
    assert traced == [9.0, 9.0]  # queries and keys, once
    jaxmha.decode_step(params, x, cache, rotate=partial(turn, base=8.0, dims=4))
    assert traced[2:] == [8.0, 8.0]


def test_a_rotation_with_an_array_is_no_key_of_a_program() -> None:
    params, x = make()

    def turn(by: Any, x: Any, positions: Any) -> Any:
        return x * by

    cache = KVCache.empty(params, B, T)
    out, _ = jaxmha.prefill(params, x, cache, rotate=partial(turn, jnp.float32(1.0)))
    want, _ = jaxmha.prefill(params, x, cache)
    tolerance.assert_same(out, want)


@pytest.mark.slow  # every operation is a program
def test_no_nan_is_made_to_be_thrown_away() -> None:
    """`jax_debug_nans` finds NaN of the user's."""
    params, x = make()
    _, cache = jaxmha.prefill(params, x[:, :5], KVCache.empty(params, B, 64))
    want, _ = jaxmha.decode_step(params, x[:, 5:6], cache)
    with jax.debug_nans(True), jax.disable_jit():
        out, _ = jaxmha.decode_step(params, x[:, 5:6], cache)
    tolerance.assert_close(out, np.asarray(want), factor=2)


def test_strict_promotion_of_a_small_cache() -> None:
    params, x = make()
    cache = KVCache.empty(params, B, T, jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        _, cache = jaxmha.prefill(params, x[:, :5], cache)
        out, _ = jaxmha.decode_step(params, x[:, 5:6], cache, semantics=Semantics(scale=0.3))
    assert out.dtype == x.dtype


def test_dtypes_without_a_common_one() -> None:
    """float8 is promoted to nothing."""
    params, x = make()
    params = params._replace(key=jax.tree.map(lambda a: a.astype(jnp.float8_e5m2), params.key))
    q, k = jnp.ones((1, 2, 1, 3)), jnp.ones((1, 2, 1, 3), jnp.float8_e4m3fn)
    with pytest.raises(TypeError, match="no common dtype: query is float32, key is float8_e4m3fn"):
        jaxmha.dot_product_attention(q, k, k)
    with pytest.raises(TypeError, match="no common dtype"):
        jaxmha.multi_head_attention(params, x)
    with pytest.raises(TypeError, match="no common dtype"):
        jaxmha.decode_step(params, x[:, :1], KVCache.empty(make()[0], B, T))


def test_the_cache_of_a_module() -> None:
    layer = jaxmha.flax.nnx.MultiHeadAttention(2, 6, decode=True, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="dtype must be floating, got int8"):
        layer.init_cache((3, 5, 6), np.int8)
    with pytest.raises(TypeError, match="jax_enable_x64"):
        layer.init_cache((3, 5, 6), np.float64)
