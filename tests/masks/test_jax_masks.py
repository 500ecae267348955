"""Masks of jax.nn.dot_product_attention against the live function."""

import itertools
import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import seed

from jaxmha import Mask, Semantics, dot_product_attention
from jaxmha.converters.arrays import NDArray
from jaxmha.converters.masks.argument import Masks
from jaxmha.converters.masks.jax import export_masks, import_masks
from tests.converters.layers import foreign
from tests.masks.draws import (
    KINDS,
    B,
    N,
    S,
    T,
    draws,
    emptied_by_bias,
    flat,
    many,
    numbers,
    pairs,
    random_mask,
    repeated,
    stacked,
)
from tests.tolerance import assert_close

SEED = int(os.environ["JAXMHA_PROPERTY_SEED"])
H = 11
FACTOR = 0.5  # 16 floors of float32 are 1e-6 of the scale
BOTH = (False, True)
SHAPES = {"S": (S,), "TS": (T, S), "NTS": (N, T, S), "B1TS": (B, 1, T, S), "B11S": (B, 1, 1, S)}
MASKS = (None, *SHAPES, "BNTS")
BIASES = (None, "TS", "BNTS", "BNTS inf")
WINDOWS = (None, 2, (1, 3))
SIZES: Any = {"batch_size": B, "query_length": T, "key_length": S}
INPUTS: Any = [numbers(B, T, N, H), numbers(B, S, 1, H, seed=1), numbers(B, S, 1, H, seed=2)]


def boolean(form: str | None) -> NDArray | None:
    """Random; a row of queries has nothing left."""
    if form is None:
        return None
    kept = np.random.default_rng(len(form)).random(SHAPES.get(form, (B, N, T, S))) < 0.6
    if kept.ndim > 1 and kept.shape[-2] == T:
        kept[..., 2, :] = False
    return kept


def additive(form: str | None) -> NDArray | None:
    """Random; where it excludes, every row keeps a key: such a row is NaN in jax.nn."""
    if form is None:
        return None
    axes, *infinite = form.split()
    bias = numbers(*SHAPES.get(axes, (B, N, T, S)))
    if infinite:
        bias[np.random.default_rng(1).random(bias.shape) < 0.4] = -np.inf
        bias[..., 0] = 1.0
    return bias


def live(arguments: dict[str, Any]) -> Any:
    """Not jitted: every combination would be a program of its own."""
    arrays: dict[str, Any] = {
        k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()
    }
    run: Any = jax.nn.dot_product_attention
    with foreign():
        return run(*map(jnp.asarray, INPUTS), **arrays)


def compare(made: list[Masks], expected: list[Any], what: list[str]) -> None:
    """jax.nn has 0 beyond a query length, and so have we; all other empty rows are means."""
    count = len(made)
    inputs = map(flat, repeated(count, *INPUTS))
    lengths = [None if mask is None else mask.query_lengths for mask, _ in made]
    rows = np.stack([np.full(B, T) if x is None else np.asarray(x) for x in lengths])
    preset = Semantics.jax()
    ours: Any = dot_product_attention
    actual = ours(
        *inputs,
        **{name: flat(array) for name, array in stacked(made).items()},
        query_seq_lengths=flat(rows.astype(np.int32)),
        fully_masked=preset.fully_masked,
        softmax_dtype=preset.softmax_dtype,
    )
    actual = np.reshape(actual, (count, *expected[0].shape))
    actual = emptied_by_bias(actual, made, INPUTS[2])
    for c, found in enumerate(expected):
        assert_close(actual[c], np.asarray(found), what[c], factor=FACTOR)


@pytest.mark.parametrize("window", WINDOWS)
def test_every_combination(window: Any) -> None:
    """mask 7 x bias 4 x is_causal 2 x query lengths 2 x key/value lengths 2, per window."""
    made, expected, what = [], [], []
    for form, bias, causal, query, key_value in itertools.product(MASKS, BIASES, BOTH, BOTH, BOTH):
        arguments = {
            "mask": boolean(form),
            "bias": additive(bias),
            "is_causal": causal,
            "query_seq_lengths": np.array([T, 2, 0], np.int32) if query else None,
            "key_value_seq_lengths": np.array([0, 4, S], np.int32) if key_value else None,
            "local_window_size": window,
        }
        made.append(import_masks(**arguments))
        expected.append(live(arguments))
        what.append(f"{form=} {bias=} {causal=} {query=} {key_value=}")
    assert len(made) == 7 * 4 * 2 * 2 * 2
    compare(made, expected, what)


def test_structure_is_kept() -> None:
    lengths = np.array([1, 2, 3], np.int32)
    arguments: dict[str, Any] = {
        "is_causal": True,
        "query_seq_lengths": lengths,
        "key_value_seq_lengths": lengths,
        "local_window_size": (2, 4),
    }
    mask, bias = import_masks(**arguments)
    assert mask is not None
    assert bias is None
    assert mask.array is None
    back = export_masks(mask, **SIZES)
    assert back.keys() == arguments.keys()
    assert back["local_window_size"] == (2, 4)
    np.testing.assert_array_equal(back["query_seq_lengths"], lengths)
    assert export_masks(Mask.padding(key_value=np.ones((B, S), bool)), **SIZES).keys() == {"mask"}
    assert export_masks(None, **SIZES) == {}


def test_unbatched_and_jit() -> None:
    """A mask of fewer axes means the same without a batch; imported masks pass through jit."""
    inputs: Any = [x[0] for x in INPUTS]
    for form in ("S", "TS", "NTS"):
        mask, _ = import_masks(mask=boolean(form), is_causal=True)
        ours: Any = dot_product_attention
        run = jax.jit(partial(ours, fully_masked="mean"))
        with foreign():
            given = jnp.asarray(boolean(form))
            live_function: Any = jax.nn.dot_product_attention
            expected = live_function(*inputs, mask=given, is_causal=True)
        for actual in (
            run(*inputs, mask=mask),
            ours(*inputs, mask=mask, fully_masked="mean"),
        ):
            assert_close(np.asarray(actual), np.asarray(expected), form, factor=FACTOR)


def test_export_then_import() -> None:
    """The identity on what masks and biases mean, and nothing is refused."""

    @many
    @seed(SEED)
    @draws
    def check(number: int, kinds: set[str], excluded: float) -> None:
        mask = random_mask(number, kinds, excluded)
        bias = numbers(N, 1, S, seed=number) if number % 2 else None
        after, added = import_masks(**export_masks(mask, bias, **SIZES))
        np.testing.assert_array_equal(pairs(after), pairs(mask))
        assert (bias is None) == (added is None)
        if bias is not None and added is not None:
            np.testing.assert_array_equal(added, bias[None])

    check()


def test_exported_masks_in_the_live_function() -> None:
    masks = [random_mask(i, {KINDS[i % 8], KINDS[i // 8]}, 0.3) for i in range(64)]
    expected = [live(export_masks(mask, **SIZES)) for mask in masks]
    compare([(mask, None) for mask in masks], expected, [repr(mask) for mask in masks])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mask": np.ones((T, S))}, TypeError, "mask must be Boolean"),
        ({"mask": np.ones((T, S), int)}, TypeError, "mask must be Boolean"),
        ({"bias": np.ones((T, S), bool)}, TypeError, "bias is added"),
        ({"bias": np.ones((T, S), int)}, TypeError, "bias must be"),
        ({"query_seq_lengths": np.ones(B)}, TypeError, "query_seq_lengths must be integers"),
        ({"query_seq_lengths": np.ones((B, 1), int)}, ValueError, "query_seq_lengths: expected"),
        ({"mask": np.ones((1, B, N, T, S), bool)}, ValueError, "mask: expected axes"),
        ({"mask": np.ones((N + 1, T, S), bool)}, ValueError, "N=2"),
        ({"mask": np.ones((T, S), bool), "bias": np.ones((T, T))}, ValueError, "S=5"),
        ({"local_window_size": -1}, ValueError, "window sides"),
    ],
)
def test_refusals(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        import_masks(num_heads=N, **arguments)
