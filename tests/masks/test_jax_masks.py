"""Masks of jax.nn.dot_product_attention against the live function."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmha import Mask, Semantics, dot_product_attention
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.masks.jax import export_masks, import_masks
from jaxmha.converters.masks.spec import Masks
from tests.drawn import to_jax
from tests.masks import ours
from tests.masks.draws import B, N, S, T, emptied, numbers, stacked
from tests.masks.ours import otherwise_answered
from tests.promotion import foreign
from tests.tolerance import assert_close

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
    """Random; where it excludes, every row keeps a key, though not always one of the mask's."""
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
        k: to_jax(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()
    }
    run: Any = jax.nn.dot_product_attention
    with foreign():
        return run(*map(jnp.asarray, INPUTS), **arrays)


def compare(made: list[Masks], expected: list[Any], what: list[str]) -> None:
    """jax.nn has 0 beyond a query length, and so have we; all other empty rows are means."""
    lengths = [None if mask is None else mask.query_lengths for mask, _ in made]
    rows = [np.full(B, T) if x is None else np.asarray(x) for x in lengths]
    actual = ours.heads(INPUTS, stacked(made), Semantics.jax(), np.stack(rows))
    for c, found in enumerate(expected):
        theirs = np.array(found)
        otherwise_answered(INPUTS[2], made[c], actual[c], theirs, FACTOR)
        assert_close(actual[c], theirs, what[c], factor=FACTOR)


@pytest.mark.slow
@pytest.mark.parametrize("window", WINDOWS)
def test_every_combination(window: Any) -> None:
    """mask 7 x bias 4 x is_causal 2 x query lengths 2 x key/value lengths 2, per window."""
    made, expected, what, refused = [], [], [], 0
    for form, bias, causal, query, key_value in itertools.product(MASKS, BIASES, BOTH, BOTH, BOTH):
        arguments = {
            "mask": boolean(form),
            "bias": additive(bias),
            "is_causal": causal,
            "query_seq_lengths": np.array([T, 2, 0], np.int32) if query else None,
            "key_value_seq_lengths": np.array([0, 4, S], np.int32) if key_value else None,
            "local_window_size": window,
        }
        made.append(import_masks(query_length=T, emptied_by_bias="empty", **arguments))
        if emptied(*made[-1]).any():
            with pytest.raises(ValueError, match="bias of -inf excludes every key that the mask"):
                import_masks(query_length=T, **arguments)
            refused += 1
        expected.append(live(arguments))
        what.append(f"{form=} {bias=} {causal=} {query=} {key_value=}")
    assert len(made) == 7 * 4 * 2 * 2 * 2
    assert refused
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
    for form in ("S", "NTS"):
        mask, _ = import_masks(mask=boolean(form), is_causal=True)
        attend: Any = partial(dot_product_attention, fully_masked="mean")
        with foreign():
            given = to_jax(boolean(form))
            live_function: Any = jax.nn.dot_product_attention
            expected = live_function(*inputs, mask=given, is_causal=True)
        for actual in (jax.jit(attend)(*inputs, mask=mask), attend(*inputs, mask=mask)):
            assert_close(np.asarray(actual), np.asarray(expected), form, factor=FACTOR)


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
        ({"local_window_size": (1.5, 2)}, TypeError, "sides of local_window_size must be integers"),
        ({"local_window_size": -1}, ValueError, "sides of local_window_size"),
    ],
)
def test_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        import_masks(num_heads=N, **arguments)
