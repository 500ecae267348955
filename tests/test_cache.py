"""Decoding with a cache is full attention, token by token."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import KVCache, Mask, MHAParams, Projection, Semantics, decoding
from jaxmha.cached_attention import attend_cache
from tests import drawn, jit_cache, tolerance
from tests.drawn import to_jax

B, T, D, N, K, H, h = 3, 11, 17, 6, 2, 5, 7
LENGTHS = np.asarray([4, 1, 3], np.int32)  # of the prompts


@cache
def make(dtype: str = "float32", *, use_bias_kv: bool = False) -> tuple[MHAParams, Any]:
    """Parameters and inputs from NumPy, so that nothing is compiled for them."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return to_jax(rng.standard_normal(shape).astype(jnp.dtype(dtype)) / 2)

    def projection(*kernel: int, bias: tuple[int, ...]) -> Projection:
        return Projection(normal(*kernel), normal(*bias))

    params = MHAParams(
        projection(D, N, H, bias=(N, H)),
        projection(D, K, H, bias=(K, H)),
        projection(D, K, h, bias=(K, h)),
        projection(N, h, D, bias=(D,)),
        *((normal(K, H), normal(K, h)) if use_bias_kv else ()),
    )
    return params, normal(B, T, D)


def full(params: MHAParams, x: Any, **options: Any) -> Any:
    mask = options.pop("mask", Mask())
    return jaxmha.multi_head_attention(params, x, mask=mask, is_causal=True, **options)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "mask": Mask.window(2, None),
        "semantics": Semantics(logits_soft_cap=0.7, scale=0.9, add_zero_attn=True),
    },
}


@pytest.mark.everyday(what=["everything"])
@pytest.mark.parametrize("what", CASES)
def test_steps_are_full_attention(what: str) -> None:
    params, x = make(use_bias_kv=what == "everything")
    want = full(params, x, **CASES[what])
    prompt = 4
    out, cache = jaxmha.prefill(params, x[:, :prompt], KVCache.empty(params, B, T), **CASES[what])
    tolerance.assert_close(out, np.asarray(want[:, :prompt]), "prompt", factor=2)
    for t in range(prompt, T):
        out, cache = jaxmha.decode_step(params, x[:, t : t + 1], cache, **CASES[what])
        tolerance.assert_close(out[:, 0], np.asarray(want[:, t]), f"token {t}", factor=2)
    assert cache.lengths.tolist() == [T] * B


@pytest.mark.everyday(dtype=["float64"])
@pytest.mark.slow_variants("float64")
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_dtypes(dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        params, x = make(dtype)
        cache = KVCache.empty(params, B, T)
        assert cache.key.dtype == dtype
        out, cache = jaxmha.prefill(params, x[:, :5], cache)
        out, cache = jaxmha.decode_step(params, x[:, 5:7], cache)
        assert out.dtype == cache.value.dtype == dtype
        with jax.enable_x64(True):
            exact = jax.tree.map(lambda a: np.asarray(a, np.float64), (params, x))
            want = full(*exact)[:, 5:7]
        tolerance.assert_close(out, np.asarray(want), factor=tolerance.LAYER)


@pytest.mark.slow_variants("1-semantics1", "3-semantics0")
@pytest.mark.parametrize("semantics", [Semantics(), Semantics(scale=-11.0, logits_soft_cap=30.0)])
@pytest.mark.parametrize("new", [1, 3])
def test_products_of_bfloat16(semantics: Semantics, new: int) -> None:
    """As devices that multiply it run them; queries that were scaled and rounded would differ."""
    params, _ = make("bfloat16", use_bias_kv=True)
    rng = np.random.default_rng(5)
    shapes = (B, new, N, H), (B, K, T, H), (B, K, T, h)
    arrays: Any = params, *(to_jax(rng.standard_normal(s), jnp.bfloat16) for s in shapes)
    lengths = to_jax(LENGTHS + new, jnp.int32)
    positions = to_jax(LENGTHS[:, None] + np.arange(new, dtype=np.int32))

    def attend(params: MHAParams, query: Any, key: Any, value: Any) -> Any:
        cache = KVCache(key, value, lengths)
        return attend_cache(params, query, cache, positions, Mask(), semantics, block=4)

    with jax.enable_x64(True):
        want = jax.jit(attend)(*jax.tree.map(lambda a: np.asarray(a, np.float64), arrays))
    with jaxmha.lowering_for("tpu"), jax.default_matmul_precision(None):
        tolerance.assert_close(jax.jit(attend)(*arrays), np.asarray(want))


def _scalar_layer(logit: float, value: float) -> MHAParams:
    """One feature: whatever comes in, queries are 1, and keys and values those given."""

    def always(x: float) -> Projection:
        return Projection(jnp.zeros((1, 1, 1)), jnp.full((1, 1), x, jnp.float32))

    out = Projection(jnp.ones((1, 1, 1)), jnp.zeros(1))
    return MHAParams(always(1.0), always(logit), always(value), out)


@pytest.mark.parametrize("new", [1, 2])
@pytest.mark.parametrize("logit", [-1e38, -2.25e38, float(np.finfo(np.float32).min)])
def test_live_logits_of_any_size_beat_masked_ones(logit: float, new: int) -> None:
    """Slots beyond the length, of padding and of a later token hold far larger ones."""
    params, slots = _scalar_layer(logit, 1.0), 7
    live = np.arange(slots) == 0
    cache = KVCache.empty(params, 1, slots)
    cache = cache._replace(
        key=to_jax(np.where(live, logit, -logit).reshape(cache.key.shape), jnp.float32),
        value=to_jax(np.where(live, 1.0, 7.0).reshape(cache.value.shape), jnp.float32),
        lengths=jnp.asarray([2], np.int32),
    )
    mask = Mask.padding(key_value=to_jax(np.arange(slots) != 1).reshape(1, slots))
    out, _ = jaxmha.decode_step(
        params, jnp.ones((1, new, 1)), cache, mask=mask, semantics=Semantics(scale=1.0)
    )
    assert np.array_equal(out, np.ones((1, new, 1)))


@pytest.mark.slow_variants("*", "!*rocm")
@pytest.mark.parametrize(
    ("new", "left", "slots", "platform"), [(1, 3, 4, "cpu"), (2, 3, 5, "cpu"), (2, 1, 7, "rocm")]
)
def test_a_window_goes_round(new: int, left: int, slots: int, platform: str) -> None:
    """left + T slots hold all that a window sees, whatever the length."""
    params, x = make()
    options: dict[str, Any] = {"mask": Mask.window(left, None)}
    want = full(params, x, **options)
    cache = KVCache.empty(params, B, slots)
    out, cache = jaxmha.prefill(params, x[:, :7], cache, **options)
    tolerance.assert_close(out, np.asarray(want[:, :7]), factor=2)
    for t in range(7, T - new + 1, new):
        with jaxmha.lowering_for(platform):
            out, cache = jaxmha.decode_step(params, x[:, t : t + new], cache, **options)
        tolerance.assert_close(out, np.asarray(want[:, t : t + new]), f"token {t}", factor=2)


@pytest.mark.parametrize(("new", "slots"), [(1, 8), (2, 4)])
def test_padding_stays_with_its_tokens_when_a_ring_goes_round(new: int, slots: int) -> None:
    """Its slots hold later tokens; 4 slots hold fewer tokens than a row has padding."""
    params, x = make()
    pads, prompt, window = np.asarray([[2], [5], [99]]), 7, Mask.window(3, None)

    def mask(size: int) -> Mask:
        return window & Mask.padding(key_value=np.arange(size) >= pads)

    want = np.asarray(full(params, x, mask=mask(T)))
    x = jnp.where((np.arange(T) >= pads)[..., None], x, np.nan)
    cache = KVCache.empty(params, B, slots)
    out, cache = jaxmha.prefill(params, x[:, :prompt], cache, mask=mask(prompt))
    tolerance.assert_close(out, want[:, :prompt], factor=2)
    for t in range(prompt, T - new + 1, new):
        step, repeated = x[:, t : t + new], mask(max(slots, prompt))
        out, cache = jaxmha.decode_step(params, step, cache, mask=repeated)
        tolerance.assert_close(out, want[:, t : t + new], f"token {t}", factor=2)


@pytest.mark.slow
def test_long_caches_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that do not divide S, of which the first ones are out of the window."""
    monkeypatch.setenv("JAXMHA_NATIVE", "0")
    monkeypatch.setattr(decoding, "BLOCK", 3)
    params, x = make()
    for mask in (Mask(), Mask.window(2, None)):
        want, cache = full(params, x, mask=mask), KVCache.empty(params, B, T)
        for t in range(T):
            out, cache = jaxmha.decode_step(params, x[:, t : t + 1], cache, mask=mask)
            tolerance.assert_close(out[:, 0], np.asarray(want[:, t]), f"token {t}", factor=2)


@pytest.mark.slow_variants("read in blocks")
@pytest.mark.parametrize("length", [7, 4096], ids=["read whole", "read in blocks"])
def test_what_is_beyond_the_length_says_nothing(length: int) -> None:
    params, x = make()
    _, cache = jaxmha.prefill(params, x[:, :5], KVCache.empty(params, B, length))
    step = jax.jit(jaxmha.decode_step)
    key, value = to_jax(cache.key), to_jax(cache.value)
    spoiled = cache._replace(key=key.at[:, :, 6:].set(np.nan), value=value.at[:, :, 6:].set(np.inf))
    outs = [step(params, x[:, 5:6], c)[0] for c in (cache, spoiled)]
    tolerance.assert_close(outs[1], np.asarray(outs[0]))


def test_work_is_bounded_by_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long caches with little in them are never read whole."""
    from jaxmha import cached_step as module

    monkeypatch.setenv("JAXMHA_NATIVE", "0")
    folded = []
    query_key = module._query_key

    def spy(rows: Any, keys: Any, *others: Any) -> Any:
        jax.debug.callback(lambda: folded.append(keys.shape[2]))
        return query_key(rows, keys, *others)

    monkeypatch.setattr(module, "_query_key", spy)
    jit_cache.forget()
    params, x = make()
    _, cache = jaxmha.prefill(params, x[:, :5], KVCache.empty(params, B, 2048))
    np.asarray(jaxmha.decode_step(params, x[:, 5:6], cache)[0])
    jax.effects_barrier()  # type: ignore[no-untyped-call]
    assert folded == [module.BLOCK]


def test_scan_and_donation() -> None:
    params, x = make()
    want = full(params, x)

    @partial(jax.jit, donate_argnums=0)
    def decode(cache: KVCache, x: Any) -> Any:
        def step(cache: KVCache, token: Any) -> Any:
            out, cache = jaxmha.decode_step(params, token[:, None], cache)
            return cache, out[:, 0]

        return jax.lax.scan(step, cache, jnp.swapaxes(x, 0, 1))

    first = KVCache.empty(params, B, T)
    cache, outs = decode(first, x)
    assert isinstance(first.key, jax.Array)
    assert first.key.is_deleted()
    tolerance.assert_close(jnp.swapaxes(outs, 0, 1), np.asarray(want), factor=2)
    assert cache.lengths.tolist() == [T] * B


@pytest.mark.slow
def test_rollback() -> None:
    """Tokens tried and taken back leave no trace."""
    params, x = make()
    _, cache = jaxmha.prefill(params, x[:, :4], KVCache.empty(params, B, T))
    _, tried = jaxmha.decode_step(params, -x[:, 5:9], cache)
    back = tried._replace(lengths=cache.lengths)
    want, _ = jaxmha.decode_step(params, x[:, 4:5], cache)
    got, _ = jaxmha.decode_step(params, x[:, 4:5], back)
    tolerance.assert_same(got, want)


@pytest.mark.parametrize(("taken_back", "present"), [(2, True), (3, False)])
def test_rollback_of_a_cache_that_has_gone_round(taken_back: int, present: bool) -> None:
    """Up to S - left tokens; beyond, slots hold later ones."""
    params, x = make()
    left = 3
    window = Mask.window(left, None)
    cache = KVCache.empty(params, B, left + 2)
    for t in range(T):
        _, cache = jaxmha.decode_step(params, x[:, t : t + 1], cache, mask=window)
    back = cache._replace(lengths=cache.lengths - taken_back)
    at = slice(T - taken_back, T - taken_back + 1)
    out, _ = jaxmha.decode_step(params, x[:, at], back, mask=window)
    want = np.asarray(full(params, x, mask=window)[:, at])
    assert (tolerance.error(out, want) < tolerance.FLOORS["float32"] * 2) == present


@pytest.mark.everyday(policy=["zero"])
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["zero", "nan"])
def test_nothing_left(policy: Any) -> None:
    params, x = make()
    semantics = Semantics(fully_masked=policy)
    mask = Mask.padding(key_value=np.zeros((B, T), bool))
    out, _ = jaxmha.decode_step(
        params, x[:, :1], KVCache.empty(params, B, T), mask=mask, semantics=semantics
    )
    want = full(params, x[:, :1], mask=Mask.dense(np.zeros((1, 1), bool)), semantics=semantics)
    tolerance.assert_close(out, np.asarray(want))


@pytest.mark.slow
def test_rotary_model() -> None:
    params, x = make()
    H = 6
    params = drawn.params(num_heads=N, head_dim=H, features=D)
    rotate = partial(jaxmha.rope, base=100.0)
    q, k, v = jaxmha.project(params, x)
    places = jnp.arange(T)
    heads = jaxmha.dot_product_attention(rotate(q, places), rotate(k, places), v, is_causal=True)
    want = jaxmha.combine(params, heads)
    out, cache = jaxmha.prefill(params, x[:, :5], KVCache.empty(params, B, T), rotate=rotate)
    tolerance.assert_close(out, np.asarray(want[:, :5]), factor=2)
    out, _ = jaxmha.decode_step(params, x[:, 5:8], cache, rotate=rotate)
    tolerance.assert_close(out, np.asarray(want[:, 5:8]), factor=2)


@pytest.mark.slow
def test_no_room_is_never_silent() -> None:
    params, x = make()
    with pytest.raises(ValueError, match=r"T=11 tokens are more than the S=7 slots"):
        jaxmha.prefill(params, x, KVCache.empty(params, B, 7))
    _, cache = jaxmha.prefill(
        params, x[:, :7], KVCache.empty(params, B, 7), mask=Mask.lengths(key_value=LENGTHS)
    )
    out, _ = jaxmha.decode_step(params, x[:, 7:11], cache)
    assert np.isnan(np.asarray(out)).all((1, 2)).tolist() == [True, False, False]
    with pytest.raises(ValueError, match=r"T=8 new tokens do not fit into the S=7 slots"):
        jaxmha.decode_step(params, x[:, :8], cache)


def test_wrong_arguments() -> None:
    params, x = make()
    cache, ids = KVCache.empty(params, B, T), np.zeros((B, T), np.int32)
    packed = Mask.segments(query_ids=ids, key_value_ids=ids)
    with pytest.raises(ValueError, match=r"mask: .* got causal_offset, segments"):
        jaxmha.decode_step(params, x[:, :1], cache, mask=Mask.causal() & packed)
    with pytest.raises(ValueError, match="'mean' is the mean over all keys"):
        jaxmha.decode_step(params, x[:, :1], cache, semantics=Semantics(fully_masked="mean"))


@pytest.mark.usefixtures("no_shape_hook")
def test_wrong_shapes() -> None:
    params, x = make()
    cache = KVCache.empty(params, B, T)
    with pytest.raises(ValueError, match=r"x: expected axes \(B, T, Dq\) with Dq=17, got"):
        jaxmha.decode_step(params, x[:, 0], cache)
    other = cache._replace(key=jnp.swapaxes(cache.key, 1, 2))
    with pytest.raises(ValueError, match=r"cache.key: expected axes \(B, K, S, H\) with B=3, K=2"):
        jaxmha.prefill(params, x, other)
    cross = drawn.params(num_heads=2, features=6, key_features=5)
    with pytest.raises(ValueError, match="Dq=6, Dk=5"):
        jaxmha.prefill(cross, jnp.ones((B, 2, 6)), KVCache.empty(cross, B, 7))


def test_greedy_generation() -> None:
    """A tiny language model: the loop over a cache finds what the loop without one finds."""
    params, _ = make()
    vocabulary = jax.random.normal(jax.random.key(7), (23, D))

    def next_token(out: Any) -> Any:
        return jnp.argmax(out @ vocabulary.T, -1)

    prompt = jnp.asarray([[3, 1, 4], [1, 5, 9], [2, 6, 5]])
    tokens = jnp.pad(prompt, ((0, 0), (0, 6)))  # what follows a token does not reach it
    for t in range(3, 9):
        out = full(params, vocabulary[tokens])
        tokens = tokens.at[:, t].set(next_token(out[:, t - 1]))

    out, cache = jaxmha.prefill(params, vocabulary[prompt], KVCache.empty(params, B, 16))
    first = next_token(out[:, -1])

    def step(carry: Any, _: Any) -> Any:
        cache, token = carry
        out, cache = jaxmha.decode_step(params, vocabulary[token][:, None], cache)
        return (cache, next_token(out[:, 0])), token

    _, generated = jax.lax.scan(step, (cache, first), length=6)
    tolerance.assert_same(jnp.swapaxes(generated, 0, 1), tokens[:, 3:])
