"""Mask arguments as data: read, written, refused; the same arrow there and back."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxmha.converters.layout.arrays import NDArray, to_torch
from jaxmha.converters.masks.spec import MaskArg, canonical_bias, exclusions, read, write

B, N, T, S = 3, 2, 5, 7
SIZES = {"B": B, "N": N, "T": T, "S": S}
# Axes an argument may have, and the axis of BNTS that each of a result is.
LAYOUTS = (
    ("T S", "1 1 T S"),
    ("(B N) T S", "B N T S"),
    ("#N #T #S", "1 N T S"),
    ("#B #N #T #S", "B N T S"),
    ("B T S", "B 1 T S"),
    ("S T B", "B 1 T S"),
    ("N B S", "B N 1 S"),
)


def shape_of(axes: str) -> tuple[int, ...]:
    groups = axes.replace("(B N)", "BN").replace("#", "").split()
    return tuple(1 if g == "1" else SIZES[g] if g in SIZES else B * N for g in groups)


def canonical(array: NDArray, axes: str) -> NDArray:
    """Entry by entry: `(B, N, T, S)` of an array with these axes."""
    out = np.zeros((B, N, T, S), array.dtype)
    letters = axes.replace("#", "").replace("(B N)", "B N").split()
    split = array.reshape([SIZES[letter] for letter in letters])
    for index in np.ndindex(*out.shape):
        at = dict(zip("BNTS", index, strict=True))
        out[index] = split[tuple(at[letter] for letter in letters)]
    return out


def draw(kind: str, shape: tuple[int, ...]) -> NDArray:
    rng = np.random.default_rng(shape)
    array = rng.random(shape) < 0.5
    return array if kind == "bool" else np.where(array, rng.standard_normal(shape), -np.inf)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(("axes", "target"), LAYOUTS)
def test_reading_is_entry_by_entry(axes: str, target: str, kind: str, keep: bool) -> None:
    argument = MaskArg("mask", (axes,), keep=keep, other="added")
    array = draw(kind, shape_of(axes))
    sizes = {"N": N}
    mask, bias = read(argument, array, sizes)
    got: Any = bias if mask is None else mask.array
    assert got.shape == shape_of(target)
    expected = canonical(array, axes)
    if kind == "bool":
        assert bias is None
        expected = expected == keep
    np.testing.assert_array_equal(np.broadcast_to(got, expected.shape), expected)
    fixed = set(axes.replace("(", "").replace(")", "").split())
    assert sizes == {"N": N} | {a: SIZES[a] for a in fixed if a in SIZES}
    back = write(argument, got, SIZES)
    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((1, 1, T, S), "T S", (T, S)),
        ((1, 1, 1, 1), "T S", (T, S)),
        ((1, N, 1, S), "#N #T #S", (N, 1, S)),
        ((B, 1, T, 1), "(B N) T S", (B * N, T, S)),
        ((B, 1, 1, S), "#B #N #T #S", (B, 1, 1, S)),
    ],
)
def test_the_smallest_axes_that_hold_it_are_written(
    shape: tuple[int, ...], axes: str, expected: tuple[int, ...]
) -> None:
    array = draw("bool", shape)
    written = write(MaskArg("mask", ("T S", axes), keep=False), array, SIZES)
    assert written.shape == expected
    mask, _ = read(MaskArg("mask", (axes,), keep=False), written, dict(SIZES))
    assert mask is not None
    np.testing.assert_array_equal(
        np.broadcast_to(np.asarray(mask.array), (B, N, T, S)), np.broadcast_to(array, (B, N, T, S))
    )


def test_what_no_axes_hold_is_refused() -> None:
    argument = MaskArg("attention_mask", ("T S", "B T S"))
    with pytest.raises(
        ValueError, match=r"attention_mask cannot hold .* varies over B and N and T"
    ):
        write(argument, draw("bool", (B, N, T, 1)), SIZES)


@pytest.mark.parametrize("field", ["query_padding", "key_value_padding"])
def test_other_fields_of_a_mask(field: str) -> None:
    letter = "T" if field.startswith("query") else "S"
    argument = MaskArg("padding", (letter, f"B {letter}"), keep=False, field=field, other="added")
    for shape in ((B, SIZES[letter]), (SIZES[letter],)):
        blocked = draw("bool", shape)
        mask, bias = read(argument, blocked, {})
        assert bias is None
        np.testing.assert_array_equal(getattr(mask, field), ~blocked.reshape(-1, SIZES[letter]))
    mask, bias = read(argument, draw("float", (B, SIZES[letter])), {})
    assert mask is None
    assert bias is not None
    assert bias.shape == ((B, 1, T, 1) if letter == "T" else (B, 1, 1, S))


def test_values_of_other_dtypes() -> None:
    ones = np.eye(T, S)
    for dtype in (np.int32, np.uint8, np.float32, ml_dtypes.bfloat16):
        with pytest.raises(TypeError, match=f"must be Boolean .*attend.*got {np.dtype(dtype)}"):
            read(MaskArg("mask", ("T S",)), ones.astype(dtype), {})
        mask, bias = read(MaskArg("mask", ("T S",), other="nonzero"), ones.astype(dtype), {})
        assert bias is None
        assert mask is not None
        np.testing.assert_array_equal(mask.array, ones.astype(bool)[None, None])
        added = MaskArg("mask", ("T S",), keep=False, other="added")
        if dtype in (np.int32, np.uint8):
            with pytest.raises(TypeError, match=r"blocked\) or floating \(added to the logits\)"):
                read(added, ones.astype(dtype), {})
            continue
        mask, bias = read(added, to_torch(ones.astype(dtype)), {})
        assert mask is None
        assert bias is not None
        assert bias.dtype == dtype


def test_shapes_and_sizes_are_checked() -> None:
    argument = MaskArg("mask", ("T S", "(B N) T S"))
    with pytest.raises(ValueError, match=r"axes \(T S\) or \(\(B N\) T S\), got shape \(2,\)"):
        read(argument, np.ones(2, bool), {})
    with pytest.raises(ValueError, match=r"with T=5, S=7, got shape \(7, 5\)"):
        read(argument, np.ones((S, T), bool), {"T": T, "S": S})
    with pytest.raises(ValueError, match="N=2"):
        read(argument, np.ones((3, T, S), bool), {"N": N})
    sizes = {"N": N}
    read(argument, np.ones((B * N, T, S), bool), sizes)
    with pytest.raises(ValueError, match="B=3"):
        read(argument, np.ones((2 * N, T, S), bool), sizes)


def test_exclusions_are_0_and_minus_infinity_alone() -> None:
    low = np.finfo(np.float32).min
    for values in ([0.0, 1.0], [0.0, low], [0.0, np.nan], [0.0, np.inf]):
        assert exclusions(np.array(values, np.float32)) is None
    for dtype in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16):
        allowed = exclusions(np.array([0.0, -np.inf, -0.0], dtype))
        np.testing.assert_array_equal(allowed, [True, False, True])


def test_biases_have_four_axes() -> None:
    assert canonical_bias(np.ones((), np.float32), SIZES).shape == (1, 1, 1, 1)
    assert canonical_bias(np.ones((B, 1, T, 1)), SIZES).dtype == np.float64
    for shape in ((B, T, S), (1, B, N, T, S), (S, T)):
        with pytest.raises(ValueError, match=r"bias: expected axes \(#B, #N, #T, #S\)"):
            canonical_bias(np.ones(shape), SIZES)
