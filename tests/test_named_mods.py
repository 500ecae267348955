"""Named score and mask functions against the frameworks and papers that define them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import mods
from jaxmha.implementations.tiled import attention
from tests.drawn import to_jax
from tests.test_mods import SMALL_TILES, relative_error

B, T, N, H = 2, 19, 4, 6
RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = (to_jax(RNG.standard_normal((B, T, N, H)), "float32") for _ in range(3))
I, J = np.ogrid[:T, :T]


def oracle(bias: Any, allowed: Any, scale: float = H**-0.5) -> Any:
    """Attention in float64 with a materialised bias and mask."""
    q, k, v = (np.asarray(x, np.float64) for x in (QUERY, KEY, VALUE))
    scores = np.einsum("btnh,bsnh->bnts", q, k) * scale + np.asarray(bias, np.float64)
    exps = np.where(allowed, np.exp(scores), 0.0)
    total = exps.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", exps / np.where(total == 0, 1, total), v)


IMPLEMENTATIONS = ("reference", "blocked")


def check(
    bias: Any,
    allowed: Any,
    *,
    scale: float | None = None,
    implementations: tuple[str, ...] = IMPLEMENTATIONS,
    **options: Any,
) -> None:
    want = oracle(bias, allowed, H**-0.5 if scale is None else scale)
    for implementation in implementations:
        got = jaxmha.dot_product_attention(
            QUERY, KEY, VALUE, scale=scale, implementation=implementation, **options
        )
        assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize("heads", [4, 6])
def test_alibi_of_bloom_and_mpt(heads: int) -> None:
    torch = pytest.importorskip("torch")
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    biases = {
        "bloom": bloom.build_alibi_tensor(torch.ones(1, T), heads, torch.float32).numpy(),
        "mpt": mpt.build_mpt_alibi_tensor(heads, T).numpy(),
    }
    for kind, bias in biases.items():
        rates = mods.alibi_slopes(heads, kind)  # type: ignore[arg-type]
        # Their biases count from another position, which no softmax sees.
        steps = np.diff(bias.reshape(heads, T))
        np.testing.assert_allclose(steps, np.broadcast_to(rates[:, None], steps.shape), rtol=1e-4)
        if heads == N:
            check(bias.reshape(1, N, 1, T), J <= I, is_causal=True, score_mod=mods.alibi(rates))


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (16, 40), (8, 1000), (64, 256)])
def test_buckets_of_t5(bidirectional: bool, buckets: int, most: int) -> None:
    torch = pytest.importorskip("torch")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = np.arange(-2 * most, 2 * most + 1)
    want = t5.T5Attention._relative_position_bucket(
        torch.from_numpy(distances), bidirectional, buckets, most
    ).numpy()
    bucket = mods.t5(bidirectional=bidirectional, num_buckets=buckets, max_distance=most)
    got = jax.jit(jax.vmap(lambda j: bucket(jnp.int32(0), j)))(to_jax(distances, "int32"))
    np.testing.assert_array_equal(got, want)


def test_relative_bias_of_t5() -> None:
    transformers = pytest.importorskip("transformers")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = transformers.T5Config(d_model=N * H, d_kv=H, num_heads=N)
    layer = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    table = to_jax(layer.relative_attention_bias.weight.detach().numpy())
    bias = layer.compute_bias(T, T).detach().numpy()
    score_mod = mods.relative_bias(table, bucket=mods.t5())
    check(bias, J < T, scale=1.0, score_mod=score_mod)


def test_relative_bias_of_swin() -> None:
    swin = pytest.importorskip("transformers.models.swin.modeling_swin")
    layer = swin.SwinRelativePositionBias(N, (5, 5))
    index = layer.relative_position_index.numpy().reshape(25, 25)
    rows, columns = np.ogrid[:25, :25]
    bucket = mods.swin(5)
    np.testing.assert_array_equal(bucket(to_jax(rows), to_jax(columns)), index)
    table = to_jax(RNG.standard_normal((81, N)), "float32")
    mod = mods.relative_bias(table, bucket=bucket)
    x = to_jax(RNG.standard_normal((B, 25, N, H)), "float32")
    want = jaxmha.dot_product_attention(
        x, x, x, jnp.moveaxis(table[to_jax(index)], 2, 0)[None], implementation="reference"
    )
    assert relative_error(jaxmha.dot_product_attention(x, x, x, score_mod=mod), want) < 1e-6


IDS = np.sort(RNG.integers(0, 3, (B, T)), 1)
LAYOUT = RNG.random((N, 3, 3)) < 0.4
MASKS: dict[str, tuple[Any, Any]] = {
    "causal": (mods.causal(2), J <= I + 2),
    "window": (mods.window(3, 1), (J >= I - 3) & (J <= I + 1)),
    "document": (mods.document(IDS), (IDS[:, :, None] == IDS[:, None])[:, None]),
    "shuffled document": (mods.document(IDS[0, ::-1] % 2), (IDS[0] % 2 == IDS[0][:, None] % 2)[::-1, ::-1]),
    "prefix": (mods.prefix_lm(5), (J <= I) | (J < 5)),
    "prefixes": (
        mods.prefix_lm(jnp.asarray([3, 11])),
        (J <= I) | (np.array([3, 11]).reshape(2, 1, 1, 1) > J),
    ),
    "dilated": (mods.dilated(3, 4, 2), ((J - I) % 3 == 0) & (J >= I - 12) & (J <= I + 6)),
    "block-sparse": (mods.block_sparse(LAYOUT, 7), LAYOUT[:, I // 7, J // 7]),
    "all": (mods.all_of(mods.causal(), mods.window(4, 4)), (J <= I) & (J >= I - 4)),
    "any": (mods.any_of(mods.prefix_lm(2), mods.window(0, 3)), (J <= I + 3)  & ((J <= I) | (J < 2) | (J >= I))),
}  # fmt: skip


@pytest.mark.slow_variants(
    "document-blocked", "window-blocked", "prefix*", "shuffled*", "any-*", "dilated-*"
)
@pytest.mark.everyday(implementation=["blocked"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SIZES", SMALL_TILES)
    mask_mod, allowed = MASKS[name]
    check(0.0, allowed, mask_mod=mask_mod, implementations=(implementation,))


@pytest.mark.everyday(implementation=["blocked"])
@pytest.mark.slow_variants(
    "blocked-alone-10-dilated",
    "blocked-causal-10-document",
    "*causal-4-*",
    "*traced-10-*",
    "*-document",
    "!*causal-10-document",
    "*-dilated",
    "!*alone-10-dilated",
    "*-4-block-sparse",
    "*causal-10-block-sparse",
)
@pytest.mark.parametrize("name", ["document", "block-sparse", "dilated"])
@pytest.mark.parametrize("block", [4, 10])  # no multiples of tiles of 9 keys
@pytest.mark.parametrize("how", ["alone", "causal", "traced"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_block_mask_is_its_function(
    name: str, block: int, how: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SIZES", SMALL_TILES)
    mask_mod, allowed = MASKS[name]
    allowed = np.broadcast_to(allowed, (B, N, T, T))
    made = mods.block_mask(mask_mod, T, B=B, N=N, block=block)
    starts = np.arange(0, T, block)
    some, every = (
        np.add.reduceat(np.add.reduceat(x, starts, 2), starts, 3)
        for x in (allowed.astype(int), np.ones_like(allowed, int))
    )
    want = (some > 0).any(1), (some == every).all(1)
    for got, expected in zip(made.blocks[1:3], want, strict=True):
        np.testing.assert_array_equal(np.broadcast_to(got, expected.shape), expected)
    options: dict[str, Any] = {"mask_mod": made, "implementations": (implementation,)}
    if how == "traced":
        jitted = jax.jit(
            lambda made: jaxmha.dot_product_attention(
                QUERY, KEY, VALUE, mask_mod=made, implementation=implementation
            )
        )
        assert relative_error(jitted(made), oracle(0.0, allowed)) < 1e-6
    else:
        causal = how == "causal"
        check(0.0, allowed & (J <= I) if causal else allowed, is_causal=causal, **options)


def test_a_block_mask_of_other_sizes_is_refused() -> None:
    made = mods.block_mask(mods.causal(), T + 1)
    with pytest.raises(ValueError, match=f"made for T={T + 1}, S={T + 1}"):
        jaxmha.dot_product_attention(QUERY, KEY, VALUE, mask_mod=made)


def test_soft_cap_after_a_bias() -> None:
    bias = to_jax(RNG.standard_normal((1, N, T, T)), "float32")
    q, k, v = (np.asarray(x, np.float64) for x in (QUERY, KEY, VALUE))
    scores = np.einsum("btnh,bsnh->bnts", q, k) * H**-0.5 + np.asarray(bias, np.float64)
    weights = np.exp(2.0 * np.tanh(scores / 2.0))
    want = np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)
    for cap in (2.0, jnp.float32(2.0)):
        got = jaxmha.dot_product_attention(QUERY, KEY, VALUE, bias, score_mod=mods.soft_cap(cap))
        assert relative_error(got, want) < 1e-6


def test_gradients_of_named_arrays() -> None:
    """Slopes and tables, by blocked tiles, as `reference` has them."""
    rates, table = mods.alibi_slopes(N), to_jax(RNG.standard_normal((32, N)), "float32")

    def total(implementation: str, rates: jax.Array, table: jax.Array) -> jax.Array:
        both = mods.alibi(rates), mods.relative_bias(table, bucket=mods.t5(bidirectional=False))
        outs = [
            jaxmha.dot_product_attention(
                QUERY, KEY, VALUE, is_causal=True, score_mod=mod, implementation=implementation
            )
            for mod in both
        ]
        return sum((out**2).sum() for out in outs)  # type: ignore[return-value]

    gradients = jax.jit(jax.grad(total, (1, 2)), static_argnums=0)
    want, got = (gradients(x, rates, table) for x in ("reference", "blocked"))
    for x, y in zip(got, want, strict=True):
        assert relative_error(x, y) < 3e-6
