"""Mask: constructors, intersection, and the keyword arguments that mean the same."""

import sys
from collections.abc import Callable
from dataclasses import fields
from itertools import product
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask, implementations
from tests import cases, reference, tolerance
from tests.cases import Case
from tests.drawn import to_jax

B, N, T, S = 2, 3, 5, 7
RNG = np.random.default_rng(0)


def _ids(size: int) -> Any:
    return RNG.integers(0, 2, (B, size)).astype(np.int32)


def _rows(low: int, high: int) -> Any:
    return RNG.integers(low, high, B).astype(np.int32)


# Two of each kind, with the same condition as the specification takes it.
Made = tuple[Mask, dict[str, Any]]


def _causal(offset: Any) -> Made:
    return Mask.causal(offset), {"causal_offset": offset}


def _window(left: int | None, right: int | None) -> Made:
    return Mask.window(left, right), {"local_window_size": (left, right)}


def _lengths(query: Any, key_value: Any) -> Made:
    conditions = {"query_seq_lengths": query, "key_value_seq_lengths": key_value}
    return Mask.lengths(query=query, key_value=key_value), conditions


def _padding(query: Any, key_value: Any) -> Made:
    conditions = {"query_padding": query, "key_value_padding": key_value}
    return Mask.padding(query=query, key_value=key_value), conditions


def _segments() -> Made:
    pair = _ids(T), _ids(S)
    return _segments_of(pair), {"segment_ids": pair}


def _segments_of(pair: tuple[Any, Any]) -> Mask:
    return Mask.segments(query_ids=pair[0], key_value_ids=pair[1])


def _dense(*shape: int) -> Made:
    array = RNG.random(shape) < 0.6
    return Mask.dense(array), {"mask": array}


MADE: dict[str, Made] = {
    "causal": _causal(0),
    "causal_later": _causal(2),
    "causal_earlier": _causal(-1),
    "causal_rows": _causal(np.asarray([-1, 3], np.int32)),
    "window": _window(1, 2),
    "window_left": _window(2, None),
    "window_right": _window(None, 0),
    "lengths": _lengths(_rows(1, T), _rows(0, S)),
    "lengths_query": _lengths(_rows(1, T), None),
    "lengths_key_value": _lengths(None, _rows(1, S)),
    "padding": _padding(RNG.random((B, T)) < 0.7, RNG.random((B, S)) < 0.7),
    "padding_query": _padding(RNG.random((B, T)) < 0.7, None),
    "padding_key_value": _padding(None, RNG.random((B, S)) < 0.7),
    "segments": _segments(),
    "segments_other": _segments(),
    "dense": _dense(B, N, T, S),
    "dense_square": _dense(T, S),
    "dense_keys": _dense(B, 1, 1, S),
}


def full(mask: Mask) -> Any:
    return np.broadcast_to(mask.to_array(T, S, np), (B, N, T, S))


def loops(conditions: dict[str, Any]) -> Any:
    return reference.pairs((B,), N, T, S, **conditions)


LOOPS = {name: loops(conditions) for name, (_, conditions) in MADE.items()}


@pytest.mark.parametrize("name", MADE)
def test_constructor(name: str) -> None:
    mask = MADE[name][0]
    tolerance.assert_same(full(mask), LOOPS[name])
    assert not full(mask).all(), "a mask that excludes nothing proves nothing"


@pytest.mark.parametrize(("one", "other"), list(product(MADE, MADE)))
def test_and_is_intersection(one: str, other: str) -> None:
    a, b = MADE[one][0], MADE[other][0]
    tolerance.assert_same(full(a & b), LOOPS[one] & LOOPS[other])


def test_and_of_everything() -> None:
    whole, allowed = Mask(), np.ones((B, N, T, S), bool)
    for mask, conditions in MADE.values():
        whole &= mask
        allowed &= loops(conditions)
    tolerance.assert_same(full(whole), allowed)


def test_structure_is_kept() -> None:
    """Lengths stay lengths: nothing becomes an array that need not."""
    structured = [mask for name, (mask, _) in MADE.items() if not name.startswith("dense")]
    for one, other in product(structured, structured):
        both = one & other
        twice = one.query_segments is not None and other.query_segments is not None
        assert (both.array is None) == (not twice)
    assert (MADE["causal"][0] & MADE["causal_later"][0]).causal_offset == 0
    assert (MADE["window"][0] & MADE["window_left"][0]).window_size == (1, 2)


def test_no_condition() -> None:
    assert full(Mask()).all()
    mask = MADE["padding"][0]
    for both in (Mask() & mask, mask & Mask()):
        tolerance.assert_same(full(both), full(mask))


def test_is_a_frozen_pytree() -> None:
    mask = Mask.causal(1) & MADE["window"][0] & MADE["lengths"][0] & MADE["dense"][0]
    leaves, tree = jax.tree.flatten(mask)
    # Integers and windows shape the program; arrays are traced.
    assert len(leaves) == 3
    again = jax.tree.unflatten(tree, leaves)
    tolerance.assert_same(full(again), full(mask))
    assert (again.causal_offset, again.window_size) == (1, (1, 2))
    with pytest.raises(AttributeError):
        mask.array = None  # type: ignore[misc]


@pytest.mark.parametrize("name", MADE)
def test_as_argument_of_jit(name: str) -> None:
    traced = jax.jit(lambda mask: mask.to_array(T, S))(MADE[name][0])
    tolerance.assert_same(np.broadcast_to(traced, (B, N, T, S)), LOOPS[name])


def test_under_vmap() -> None:
    offsets = np.asarray([[0, 1], [2, -1], [3, 0]], np.int32)
    out = jax.vmap(lambda offset: Mask.causal(offset).to_array(T, S))(offsets)
    for row, offset in enumerate(offsets):
        want = loops({"causal_offset": offset})
        tolerance.assert_same(np.broadcast_to(out[row], want.shape), want)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers_of_either_size(dtype: str) -> None:
    """Strict promotion and x64 do not get in the way of lengths and offsets."""
    lengths = np.asarray([3, 5], dtype)
    for mask, conditions in (_causal(lengths), _lengths(lengths, lengths)):
        tolerance.assert_same(full(mask), loops(conditions))
        tolerance.assert_same(full(mask & mask), loops(conditions))


CASE = Case("forms", B=B, T=T, S=S, K=N, G=1)
ARRAYS = cases.arrays(CASE)
_lower, _upper = _rows(1, T), _rows(1, S)
_pair = _ids(T), _ids(S)
_array = RNG.random((B, N, T, S)) < 0.6
FORMS: dict[str, tuple[dict[str, Any], Callable[[], Mask]]] = {
    "causal": ({"is_causal": True}, Mask.causal),
    "lengths": (
        {"query_seq_lengths": _lower, "key_value_seq_lengths": _upper},
        lambda: Mask.lengths(query=_lower, key_value=_upper),
    ),
    "window": ({"local_window_size": (2, 1)}, lambda: Mask.window(2, 1)),
    "window_int": ({"local_window_size": 2}, lambda: Mask.window(2, 2)),
    "segments": ({"segment_ids": _pair}, lambda: _segments_of(_pair)),
    "dense": ({"mask": _array}, lambda: Mask.dense(_array)),
}


@pytest.mark.slow_variants("*segments*", "window")
@pytest.mark.parametrize("name", FORMS)
def test_keywords_mean_masks(name: str) -> None:
    keywords, mask = FORMS[name]
    one, two = (
        jaxmha.dot_product_attention(**ARRAYS, **options, return_weights=True, return_lse=True)
        for options in (keywords, {"mask": mask()})
    )
    chex.assert_trees_all_equal(one, two, strict=True)
    want = reference.dot_product_attention(**ARRAYS, **keywords)
    tolerance.assert_close(one[0], want.out)


def test_keywords_and_mask_are_both_obeyed() -> None:
    options: dict[str, Any] = {}
    for name in ("causal", "lengths", "window", "segments"):
        options |= FORMS[name][0]
    mask, conditions = MADE["padding"]
    dense, array = MADE["dense"]
    offset, rows = MADE["causal_rows"]
    out, weights = jaxmha.dot_product_attention(
        **ARRAYS, **options, mask=mask & dense & offset, return_weights=True
    )
    want = reference.dot_product_attention(**ARRAYS, **options, **conditions, **array, **rows)
    tolerance.assert_close(out, want.out)
    tolerance.assert_close(weights, want.weights)


def test_every_field_is_tested() -> None:
    covered = {
        field.name
        for mask in (Mask.packed(np.array([[2]]), size=3), *(mask for mask, _ in MADE.values()))
        for field in fields(Mask)
        if getattr(mask, field.name) is not None
    }
    assert covered == {field.name for field in fields(Mask)}


FARTHEST = {
    "int": 2**31 - 1,
    "size": sys.maxsize,
    "NumPy int": np.int64(2**40),
    "int64": np.array([2**31 - 1, 2**40]),
    "int32": np.array([2**31 - 1] * 2, np.int32),
    "traced": jnp.asarray([2**31 - 1] * 2, jnp.int32),
}


@pytest.mark.slow_variants("*reference", "!int-reference", "int-blocked", "*32-blocked", "Num*")
@pytest.mark.parametrize("implementation", ["reference", "blocked"])
@pytest.mark.parametrize("name", FARTHEST)
def test_bounds_of_any_size(name: str, implementation: str) -> None:
    """An offset beyond every position excludes nothing, or everything."""
    offset: Any = FARTHEST[name]
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 3, 5)).astype(np.float32) for n in (11, 7, 7))

    def out(mask: Mask | None) -> Any:
        return jaxmha.dot_product_attention(q, k, v, mask=mask, implementation=implementation)

    far = Mask.causal(offset)
    assert np.asarray(far.to_array(11, 7)).all()
    tolerance.assert_close(out(far), np.asarray(out(None)))
    if isinstance(offset, int):
        window = Mask.window(2, offset)
        assert np.asarray(window.to_array(11, 7) == Mask.window(2, None).to_array(11, 7)).all()
        tolerance.assert_close(out(window), np.asarray(out(Mask.window(2, None))))
        tolerance.assert_close(out(Mask.window(offset, offset)), np.asarray(out(None)))
    none = Mask.causal(-offset)
    assert not np.asarray(none.to_array(11, 7)).any()
    assert not np.asarray(out(none)).any()


def test_packed_lengths_say_the_segments() -> None:
    lengths = np.array([[2, 0, 3], [9, 1, 0]], np.int32)
    packed = Mask.packed(lengths, size=7)
    np.testing.assert_array_equal(
        np.asarray(packed.query_segments), [[0, 0, 2, 2, 2, 3, 3], [0, 0, 0, 0, 0, 0, 0]]
    )
    causal = Mask.causal() & packed
    assert causal.packed_ends is not None
    assert np.asarray(causal.packed_ends).tolist() == [[2, 2, 5], [7, 7, 7]]
    ids = np.array([[1, 1, 1, 2, 2, 2, 2]])
    segments = Mask.segments(query_ids=ids, key_value_ids=ids)
    both = packed.to_array(7, 7, np) & segments.to_array(7, 7, np)
    for joined in (segments & packed, packed & segments):
        np.testing.assert_array_equal(np.asarray(joined.to_array(7, 7, np)), both)
        assert joined.array is not None  # of the second pair; the ends are those of the first


RUNS = [[5, 5, 5, 0, 0, 9, 9], [3, 3, 3, 3, 3, 3, 3], [1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize("traced", [False, True])
def test_ends_of_ids_that_lie_in_runs(traced: bool) -> None:
    """By the host where it can read the ids, else by promise; the pairs are the same."""
    ids: Any = np.array(RUNS)

    def ends(ids: Any) -> Any:
        mask = Mask.segments(query_ids=ids, key_value_ids=ids, max_segments=7)
        assert mask.packed_ends is not None
        return mask.packed_ends

    found = np.asarray(jax.jit(ends)(ids) if traced else ends(ids))
    assert found[:, :3].tolist() == [[3, 5, 7], [7, 7, 7], [1, 2, 3]]
    assert found.shape == (3, 7)
    packed = Mask.packed(np.diff(found, prepend=0), size=7).to_array(7, 7, np)
    np.testing.assert_array_equal(packed, ids[:, None, :, None] == ids[:, None, None])
    more: Any = jax.jit(lambda x: Mask.segments(query_ids=x, key_value_ids=x, max_segments=12))(ids)
    assert more.packed_ends[:, 6:].tolist() == [[7] * 6] * 3


def test_ids_of_numpy_are_read() -> None:
    """Ends in numbers that few programs are compiled for; none where ids may be in any order."""

    def ends(query: Any, key_value: Any) -> Any:
        return Mask.segments(query_ids=query, key_value_ids=key_value).packed_ends

    ids = np.array(RUNS)
    assert ends(ids, ids.copy()).shape == (3, 8)
    assert ends(np.arange(9)[None], np.arange(9)[None]).shape == (1, 16)
    assert ends(ids, ids[:, ::-1]) is None
    assert ends(ids, to_jax(ids)) is None
    again = np.array([[1, 1, 2, 1]])
    assert ends(again, again) is None
    many = np.arange(200)[None]
    assert ends(many, many) is None
    none = np.zeros((2, 0), int)
    assert ends(none, none) is None


@pytest.mark.parametrize(
    ("query", "key_value", "most"),
    [
        (np.array([[1, 2, 1]]), np.array([[1, 2, 1]]), 3),
        (np.array([[1, 2, 3]]), np.array([[1, 2, 3]]), 2),
        (np.array([[1, 2, 3]]), np.array([[1, 2, 2]]), 3),
        (jnp.array([[1, 2, 3]]), jnp.array([[1, 2, 3]]), 3),
    ],
)
def test_a_broken_promise_is_named(query: Any, key_value: Any, most: int) -> None:
    with pytest.raises(ValueError, match="max_segments"):
        Mask.segments(query_ids=query, key_value_ids=key_value, max_segments=most)
    with pytest.raises(ValueError, match="max_segments must be an integer of at least 1"):
        Mask.segments(query_ids=query, key_value_ids=query, max_segments=0)


def test_a_wrong_size_of_packed_sequences_is_named() -> None:
    with pytest.raises(ValueError, match="size"):
        Mask.packed(np.array([3]), size=-1)


@pytest.mark.slow_variants("shape1*")
@pytest.mark.parametrize(
    ("shape", "field"),
    [((7,), "key_value_padding"), ((2, 1, 1, 7), "key_value_padding"),
     ((2, 1, 5, 1), "query_padding"), ((1, 1, 5, 7), "array")],
)  # fmt: skip
def test_dense_masks_of_keys_or_of_rows_alone_are_padding(
    shape: tuple[int, ...], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    run = implementations.attend

    def attend(request: Any, name: Any) -> Any:
        seen.append(request.mask)
        return run(request, name)

    monkeypatch.setattr(implementations, "attend", attend)
    query, key = (jnp.ones((2, size, 3, 4)) for size in (5, 7))
    with jax.disable_jit():
        jaxmha.dot_product_attention(query, key, key, mask=np.ones(shape, bool))
    (mask,) = seen
    arrays = ("array", "query_padding", "key_value_padding")
    assert [name for name in arrays if getattr(mask, name) is not None] == [field]


def test_lengths_outside_the_axis_are_clipped() -> None:
    for given, meant in ((np.array([9, -3]), [S, 0]), (np.array([8, 3]), [S, 3])):
        mask = Mask.lengths(key_value=given)
        np.testing.assert_array_equal(
            mask.to_array(T, S), Mask.lengths(key_value=np.array(meant)).to_array(T, S)
        )


BY_SHAPE: dict[str, Callable[[Any, Any], Mask]] = {
    "causal": lambda ids, _: Mask.causal(ids),
    "lengths": lambda ids, _: Mask.lengths(key_value=ids),
    "padding": lambda _, some: Mask.padding(query=some),
    "segments": lambda ids, _: Mask.segments(query_ids=ids, key_value_ids=ids),
    "promised": lambda ids, _: Mask.segments(query_ids=ids, key_value_ids=ids, max_segments=2),
    "packed": lambda ids, _: Mask.packed(ids, size=7),
    "dense": lambda _, some: Mask.dense(some),
}


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize("name", BY_SHAPE)
def test_masks_of_shapes(name: str) -> None:
    """`explain` takes a `jax.ShapeDtypeStruct` for any array, and so do the constructors and `&`."""
    make = BY_SHAPE[name]
    arrays = jnp.ones((2, 3), np.int32), jnp.ones((2, 3), bool)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]  # type: ignore[no-untyped-call]
    want: Any = jax.eval_shape(lambda *x: (make(*x), make(*x) & make(*x)), *arrays)
    made = make(*shapes)
    found = made, made & make(*shapes)
    chex.assert_trees_all_equal_shapes_and_dtypes(found, want)
    for mask in (made, made & make(*arrays)):
        with pytest.raises(TypeError, match="to_array needs a mask of arrays"):
            mask.to_array(3, 3)


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize("make", [BY_SHAPE["padding"], BY_SHAPE["segments"], BY_SHAPE["packed"]])
def test_one_number_has_no_positions(make: Callable[[Any, Any], Mask]) -> None:
    for xp in (np, jnp):
        with pytest.raises(ValueError, match=r"must have axes \(\*B, .\), got one number"):
            make(xp.ones((), np.int32), xp.ones((), bool))
