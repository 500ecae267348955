"""`jaxmha.equinox` in the place of equinox's own layer."""

from functools import partial
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask, MHAParams, Projection, Semantics
from jaxmha.converters import equinox as converter
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.equinox import MultiheadAttention
from tests.drawn import to_jax
from tests.masks.draws import numbers
from tests.promotion import foreign
from tests.tolerance import assert_close, assert_same

N, T, S = 2, 5, 7
SIZES = {"query_size": 11, "key_size": 13, "value_size": 3, "output_size": 17, "qk_size": 19}
BIASES = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
RNG = np.random.default_rng(0)
MASKS = {"TS": RNG.random((T, S)) < 0.6, "NTS": RNG.random((N, T, S)) < 0.6}
for _mask in MASKS.values():
    _mask[..., 2, :] = False  # with nothing to attend


def inputs() -> list[jax.Array]:
    widths = (11, 13, 3)
    made = [numbers(x, w, seed=i) for i, (x, w) in enumerate(zip((T, S, S), widths, strict=True))]
    return [to_jax(x, jnp.float32) for x in made]


def layers(**settings: Any) -> tuple[MultiheadAttention, eqx.nn.MultiheadAttention]:
    """One of jaxmha and one of equinox, with the same random weights."""
    arguments: dict[str, Any] = {
        "num_heads": N,
        **SIZES,
        "vo_size": 23,
        **BIASES,
        "key": jax.random.key(0),
    }
    own = MultiheadAttention(**arguments, semantics=Semantics.equinox(), **settings)
    return own, eqx.nn.MultiheadAttention(**arguments, **settings)


def with_numbers(module: Any) -> Any:
    """Its arrays drawn anew: biases too, which differ then from each other."""
    arrays, rest = eqx.partition(module, eqx.is_array)
    leaves, tree = jax.tree.flatten(arrays)
    drawn = [jnp.asarray(0.3 * numbers(*x.shape, seed=i), x.dtype) for i, x in enumerate(leaves)]
    return eqx.combine(jax.tree.unflatten(tree, drawn), rest)


@pytest.mark.parametrize("form", [None, *MASKS])
def test_the_same_as_equinox(form: str | None) -> None:
    mask = None if form is None else MASKS[form]
    own, other = map(with_numbers, layers())
    given = None if mask is None else to_jax(mask)
    with foreign():
        expected = eqx.filter_jit(other)(*inputs(), given)
    if form is None:
        assert_close(own(*inputs(), given), np.asarray(expected))
    assert_close(eqx.filter_jit(own)(*inputs(), given), np.asarray(expected))


def test_a_batch_and_gradients() -> None:
    """Under vmap, with a mask per row; the zero gradient of key biases counts with the others."""
    pair = [with_numbers(layer) for layer in layers()]
    batch = [np.stack([x, 2 * x, -x]) for x in map(np.asarray, inputs())]
    masks = to_jax(np.stack([MASKS["TS"], ~MASKS["TS"], np.ones((T, S), bool)]))

    def loss(layer: Any) -> jax.Array:
        return jnp.sum(jax.vmap(layer)(*batch, masks) ** 2)

    with foreign():
        found = [jax.tree.leaves(eqx.filter_jit(eqx.filter_grad(loss))(layer)) for layer in pair]
    assert len(found[0]) == 8
    actual, expected = (np.concatenate([np.ravel(x) for x in leaves]) for leaves in found)
    assert_close(actual, expected)


def test_weights_start_and_are_saved_alike() -> None:
    own, other = layers(dropout_p=0.5)
    assert own.num_kv_heads == N
    for actual, expected in zip(*map(jax.tree.leaves, (own, other)), strict=True):
        assert np.array_equal(actual, expected)
    moved = eqx.tree_at(lambda m: m.query_proj.weight, own, other.key_proj.weight[:, :11])
    assert isinstance(eqx.nn.inference_mode(moved), MultiheadAttention)


def test_dropout() -> None:
    own, _ = layers(dropout_p=0.5)
    key = jax.random.key(1)
    first, again = own(*inputs(), key=key), own(*inputs(), key=key)
    assert_same(first, again)
    assert not np.array_equal(first, own(*inputs(), key=jax.random.key(2)))
    with pytest.raises(RuntimeError, match="dropout needs a key: pass key=, or inference=True"):
        own(*inputs())
    expected = own(*inputs(), inference=True)
    assert_same(eqx.nn.inference_mode(own)(*inputs(), key=key), expected)
    with pytest.warns(UserWarning, match="deterministic"):
        assert_same(own(*inputs(), deterministic=True), expected)


def test_rotary_positions_by_process_heads() -> None:
    own, other = map(with_numbers, layers())

    def turned(q: Any, k: Any, v: Any) -> Any:
        return q + 1.0, jnp.roll(k, 1, axis=0), 2.0 * v

    with foreign():
        expected = other(*inputs(), process_heads=turned)
    assert_close(own(*inputs(), process_heads=turned), np.asarray(expected))
    with pytest.raises(ValueError, match="process_heads must not change the shape of the heads"):
        own(*inputs(), process_heads=lambda q, k, v: (q, k, v[:, :1]))


@pytest.mark.parametrize("turned", [None, lambda q, k, v: (q, k, -v)], ids=["plain", "turned"])
def test_padding_may_hold_nan(turned: Any) -> None:
    """Gradients of the weights are those of zeros in the padding; heads may be processed."""
    sizes: dict[str, Any] = {**SIZES, **BIASES}
    layer = with_numbers(MultiheadAttention(N, **sizes, key=jax.random.key(0)))
    mask = Mask.lengths(query=jnp.array(4), key_value=jnp.array(3))
    gradients = eqx.filter_jit(
        eqx.filter_grad(lambda layer, *x: (layer(*x, mask, process_heads=turned) ** 2).sum())
    )
    arrays, found = [np.array(x) for x in inputs()], []
    for padding in (0.0, np.nan):
        for x, length in zip(arrays, (4, 3, 3), strict=True):
            x[length:] = padding
        found.append(jax.tree.leaves(gradients(layer, *arrays)))
    for expected, actual in zip(*found, strict=True):
        assert_same(actual, expected)


def grouped() -> MultiheadAttention:
    more: dict[str, Any] = {"num_kv_heads": 2, "vo_size": 3, **BIASES}
    return with_numbers(MultiheadAttention(4, 12, key=jax.random.key(0), **more))  # type: ignore[no-any-return]


def test_grouped_heads_masks_and_biases() -> None:
    """Options that equinox lacks, against the layer of jaxmha."""
    layer, x = grouped(), to_jax(numbers(T, 12), jnp.float32)
    bias = to_jax(numbers(4, T, T), jnp.float32)
    params, semantics = layer.to_params()
    mask = Mask.causal() & Mask.window(2, None)
    call = partial(jaxmha.multi_head_attention, mask=mask, semantics=semantics)
    expected = jax.jit(call)(params, x, bias=bias)
    found = eqx.filter_jit(layer)(x, x, x, mask, bias=bias)
    assert_close(found, np.asarray(expected))


def test_score_and_mask_functions() -> None:
    """As `multi_head_attention` applies them; under vmap b is 0."""
    own = MultiheadAttention(N, 11, vo_size=13, key=jax.random.key(0))
    params, _ = own.to_params()
    x, rates = to_jax(numbers(3, T, 11), jnp.float32), jnp.asarray([0.3, -0.7])

    def output(call: Any, rates: Any) -> Any:
        return call(
            score_mod=lambda score, b, n, i, j: (
                score - rates[n] * (i - 2 * j + 5 * b).astype("float32")
            ),
            mask_mod=lambda b, n, i, j: (i + 2 * j + n) % 3 != b,
        )

    def expected(rates: Any) -> Any:
        calls = [partial(jaxmha.multi_head_attention, params, row[None]) for row in x]
        return jnp.concatenate([output(call, rates) for call in calls])

    def actual(rates: Any) -> Any:
        return jax.vmap(lambda row: output(partial(own, row, row, row), rates))(x)

    found, want = jax.jit(lambda rates: (actual(rates), expected(rates)))(rates)
    assert_close(found, np.asarray(want))


def test_params_and_back() -> None:
    layer = grouped()
    assert eqx.tree_equal(MultiheadAttention.from_params(*layer.to_params()), layer)
    assert eqx.tree_equal(
        MultiheadAttention.from_params(*converter.from_module(layer), inference=False), layer
    )
    own, other = map(with_numbers, layers(dropout_p=0.5))
    for actual, expected in zip(
        *map(jax.tree.leaves, (converter.from_module(own)[0], converter.from_module(other)[0])),
        strict=True,
    ):
        assert_same(actual, expected)


KERNEL = np.ones((6, 2, 3), np.float32)
OUT = Projection(np.ones((2, 3, 6), np.float32))
PARAMS = MHAParams(Projection(KERNEL), Projection(KERNEL), Projection(KERNEL), OUT)


@pytest.mark.parametrize(("queries", "keys"), [(0, 2), (2, 0)])
def test_no_positions(queries: int, keys: int) -> None:
    layer = MultiheadAttention(2, 6, key=jax.random.key(0))
    y, x = jnp.ones((queries, 6)), jnp.ones((keys, 6))
    assert_same(layer(y, x, x), jnp.zeros((queries, 6)))


@pytest.mark.usefixtures("no_shape_hook")
def test_refused() -> None:
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="num_heads=4 must be a multiple of num_kv_heads=3"):
        MultiheadAttention(4, 12, num_kv_heads=3, key=key)
    with pytest.raises(ValueError, match=r"semantics may set scale, .* got .*clip_qkv=2"):
        MultiheadAttention(4, 12, key=key, semantics=Semantics(clip_qkv=2.0))
    with pytest.raises(ValueError, match="these have sinks: use jaxmha"):
        MultiheadAttention.from_params(PARAMS._replace(sinks=np.ones(2, np.float32)))
    with pytest.raises(ValueError, match="these have no output projection"):
        MultiheadAttention.from_params(PARAMS._replace(out=None))
    layer = MultiheadAttention(2, 11, key=key)
    with pytest.raises(ValueError, match="key_ and value must have the same length S"):
        layer(*[jnp.ones((n, 11)) for n in (5, 7, 6)])
    x, bias = jnp.ones((1, 11)), cast("jax.Array", [[0.0]])
    with pytest.raises(TypeError, match="bias must be an array, got list: make it one with np"):
        layer(x, x, x, bias=bias)


@pytest.mark.parametrize("form", MASKS)
def test_masks(form: str) -> None:
    mask = MASKS[form]
    read, bias = converter.import_masks(mask=mask, num_heads=N)
    assert read is not None
    assert bias is None
    assert_same(
        np.broadcast_to(read.to_array(T, S), (1, N, T, S))[0], np.broadcast_to(mask, (N, T, S))
    )
    sizes: Any = {"num_heads": N, "query_length": T, "key_length": S}
    assert_same(converter.export_masks(read, **sizes)["mask"], mask)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (np.ones((3, T, S), bool), ValueError, r"mask: expected axes \(N, T, S\).*N=2"),
        (np.ones((1, S), bool), ValueError, r"mask: expected axes .*T=5"),
        (np.ones((T, S)), TypeError, "mask must be Boolean .True means attend"),
    ],
)
def test_masks_refused(mask: NDArray, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        converter.import_masks(mask=mask, num_heads=N, query_length=T)


def test_masks_that_cannot_be_exported() -> None:
    sizes: Any = {"num_heads": N, "query_length": T, "key_length": S}
    with pytest.raises(ValueError, match="mask differs between 2 batch rows"):
        converter.export_masks(Mask.lengths(key_value=np.array([3, 4])), **sizes)
    with pytest.raises(ValueError, match="an equinox layer cannot hold additive values"):
        converter.export_masks(None, np.full((T, S), 0.5, np.float32), **sizes)
    assert converter.export_masks(None, **sizes) == {}
