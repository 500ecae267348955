"""Masks of Keras attention layers against live Keras, on both of its backends and both paths."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import Mask, MHAParams, Semantics
from jaxmha.converters.keras import attention_layers, implicit_masks, import_params
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.converters.masks.keras import Kind, export_masks, import_masks
from tests.masks import ours
from tests.masks.draws import B, N, S, Sizes, T, numbers, pairs, spaced, stacked
from tests.promotion import foreign
from tests.tolerance import assert_close

keras = pytest.importorskip("keras")
# GroupQueryAttention hands tensors with masks to layers that advise against it.
pytestmark = pytest.mark.filterwarnings("ignore:.*was passed an input with a mask:UserWarning")
H, D = 11, 13
FACTOR = 0.5  # 16 floors of float32 are 1e-6 of the scale
LAYERS: tuple[Kind, ...] = ("mha", "gqa")
BOTH = (False, True)
SHAPES = {
    "S": (S,),
    "TS": (T, S),
    "BTS": (B, T, S),
    "B1S": (B, 1, S),
    "B11S": (B, 1, 1, S),
    "BNTS": (B, N, T, S),
}
FORMS = (None, "BTS integer", "BTS additive", *(f"{name} bool" for name in SHAPES))
QUERY, VALUE = numbers(B, T, D), numbers(B, S, D, seed=1)


def layer(kind: Kind, window: int | None = None, rate: float = 0.0) -> tuple[Any, MHAParams]:
    """A live layer with random weights and biases, and these weights."""
    options = {"sliding_window": window, "dropout": rate}
    made: Any
    if kind == "gqa":
        made = keras.layers.GroupQueryAttention(H, N, 1, **options)
    else:
        made = keras.layers.MultiHeadAttention(N, H, **options)
    made.build(QUERY.shape, VALUE.shape)
    made.set_weights([0.3 * numbers(*w.shape, seed=i) for i, w in enumerate(made.weights)])
    paths = {"/".join(w.path.split("/")[-2:]): to_numpy(w) for w in made.weights}
    name = "keras-gqa" if kind == "gqa" else "keras"
    return made, import_params(paths, layout=name)[0]


def attention_mask(form: str | None) -> NDArray | None:
    """Random; one row of queries has nothing left."""
    if form is None:
        return None
    name, what = form.split()
    rng = np.random.default_rng(len(form))
    kept = rng.random(SHAPES[name]) < 0.6
    if T in kept.shape:
        kept[..., 2, :] = False
    values = {
        "bool": kept,
        "integer": kept.astype(np.int32),
        "float": kept.astype(np.float32),
        "additive": np.where(kept, 0.0, -1e9).astype(np.float32),
    }
    return values[what]


def padding(length: int, number: int) -> NDArray:
    kept = np.random.default_rng(number).random((B, length)) < 0.7
    kept[1] = False
    return kept


def call(made: Any, scores: bool, carried: NDArray | None = None, **arguments: Any) -> Any:
    """The output, and the scores if asked for. `carried` is a mask of the query tensor's own."""
    query, value = keras.ops.array(QUERY), keras.ops.array(VALUE)
    if carried is not None:
        query._keras_mask = keras.ops.array(carried)
    with foreign():
        found = made(query, value, return_attention_scores=scores, **arguments)
    return tuple(map(to_numpy, found if scores else (found,)))


def compare(
    params: MHAParams, scores: bool, made: list[Any], expected: list[Any], what: list[str]
) -> None:
    semantics = Semantics.keras("scores" if scores else "fused")
    output = ours.layer(params, (QUERY, VALUE), stacked(made), semantics)
    for c, found in enumerate(expected):
        for actual, theirs in zip(output, found, strict=False):
            assert_close(actual[c], theirs, what[c], factor=FACTOR)


SETTINGS = [("mha", None, False, 5), *itertools.product(LAYERS, (None, 3), BOTH, (1,))]


@pytest.mark.everyday(stride=[5])  # every pair of arguments
@pytest.mark.parametrize(("kind", "window", "scores", "stride"), SETTINGS)
def test_every_combination(kind: Kind, window: int | None, scores: bool, stride: int) -> None:
    """attention_mask 9 x causal 2 x query mask 3 x value_mask 2 x key_mask 2, per setting."""
    made, params = layer(kind, window)
    masks, expected, what = [], [], []
    refused = 0
    combinations = spaced(stride, FORMS, BOTH, (None, "given", "carried"), BOTH, BOTH)
    for form, causal, query_mask, value_mask, key_mask in combinations:
        name = f"{form=} {causal=} {query_mask=} {value_mask=} {key_mask=}"
        arguments: dict[str, Any] = {
            "attention_mask": attention_mask(form),
            "use_causal_mask": causal,
            "value_mask": padding(S, 1) if value_mask else None,
            "key_mask": padding(S, 2) if key_mask else None,
        }
        rows = padding(T, 3) if query_mask else None
        options: dict[str, Any] = {"kind": kind, "sliding_window": window}
        given = {"query_mask": rows} if query_mask == "given" else {}
        carried = {"carried": rows} if query_mask == "carried" else {}

        def imported() -> Any:
            return import_masks(
                query_mask=rows,  # noqa: B023
                implicit=query_mask == "carried",  # noqa: B023
                **arguments,  # noqa: B023
                **options,  # noqa: B023
            )

        if kind == "mha" and query_mask == "given":
            with pytest.raises(ValueError, match="ignores the argument query_mask"):
                imported()
            refused += 1
            continue
        has_positions = query_mask or value_mask or key_mask
        lonely = not (causal or has_positions or window)
        additive_twice = form == "BTS additive" and kind == "gqa" and lonely
        four = form in ("B11S bool", "BNTS bool") and has_positions
        if additive_twice:
            with pytest.raises(ValueError, match="reads in two ways"):
                imported()
            refused += 1
        elif four or (form == "S bool" and lonely):
            with pytest.raises(ValueError, match=r"four axes|fails on axes"):
                imported()
            with pytest.raises(Exception, match=r"attention_mask|shape|broadcast|axis|rank|size"):
                call(made, scores, **arguments, **given, **carried)
            refused += 1
        else:
            masks.append(imported())
            expected.append(call(made, scores, **arguments, **given, **carried))
            what.append(name)
    assert refused + len(masks) == -(-9 * 2 * 3 * 2 * 2 // stride)
    assert len(masks) >= 100 // stride
    compare(params, scores, masks, expected, what)


def test_given_query_mask_is_ignored() -> None:
    """The message of the error is true."""
    made, _ = layer("mha")
    for scores in BOTH:
        for ignored, theirs in zip(
            call(made, scores, query_mask=np.zeros((B, T), bool)), call(made, scores), strict=True
        ):
            np.testing.assert_array_equal(ignored, theirs)


def test_two_readings() -> None:
    """Keras' paths differ on the masks that are refused, and agree on those that are not."""
    made, params = layer("gqa")
    kept = np.random.default_rng(0).random((T, S)) < 0.6
    kept[:, 0] = True
    for bad in (0.3 * kept, np.where(kept, 0.0, -1e9), -1 * kept, np.where(kept, np.nan, 0.0)):
        bad = bad.astype(np.float32 if bad.dtype.kind == "f" else np.int32)
        with pytest.raises(ValueError, match="reads in two ways"):
            import_masks(attention_mask=bad, kind="gqa")
        fused, scores = (
            call(made, False, attention_mask=bad)[0],
            call(made, True, attention_mask=bad)[0],
        )
        assert not np.allclose(fused, scores, atol=1e-2)
    good = (kept, 0.6 * kept, 7 * kept, kept.astype(np.uint8), np.where(kept, np.inf, 0.0))
    for scores_too in BOTH:
        masks = [import_masks(attention_mask=mask, kind="gqa") for mask in good]
        expected = [
            call(made, scores_too, attention_mask=m.astype("f") if m.dtype.kind == "f" else m)
            for m in good
        ]
        compare(params, scores_too, masks, expected, [str(i) for i in range(len(good))])


@pytest.mark.slow
@pytest.mark.parametrize("scores", BOTH)
@pytest.mark.parametrize("kind", LAYERS)
def test_row_to_head_where_batch_is_heads(kind: Kind, scores: bool) -> None:
    """Four axes next to (B, S): Keras applies row b to head b, which num_heads=N asks for."""
    made, params = layer(kind)
    rows = np.random.default_rng(5).random((N, S)) < 0.6
    rows[1] = False
    query, value = QUERY[:N], VALUE[:N]
    sizes = Sizes(N, N, T, S)
    for name in ("B11S", "BNTS"):
        mask = np.random.default_rng(6).random((N, *SHAPES[name][1:])) < 0.7
        arguments = {"attention_mask": mask, "value_mask": rows, "use_causal_mask": True}
        with pytest.raises(ValueError, match="row b to head b"):
            import_masks(kind=kind, **arguments)  # type: ignore[arg-type]
        read = import_masks(kind=kind, num_heads=N, **arguments)  # type: ignore[arg-type]
        with foreign():
            out = made(query, value, return_attention_scores=scores, **arguments)
        expected = to_numpy(out[0] if scores else out)
        semantics = Semantics.keras("scores" if scores else "fused")
        actual = ours.layer(params, (query, value), stacked([read], sizes), semantics)[0]
        assert_close(actual[0], expected, name, factor=FACTOR)


@pytest.mark.parametrize("kind", LAYERS)
def test_dropout_rate_takes_the_scores_path(kind: Kind) -> None:
    """At inference too: rows with nothing left are 0."""
    made, params = layer(kind, rate=0.5)
    mask = attention_mask("BTS bool")
    expected = call(made, False, attention_mask=mask)
    compare(params, True, [import_masks(attention_mask=mask, kind=kind)], [expected], [kind])


def test_structure_is_kept() -> None:
    sizes: Any = {"query_length": T, "key_length": S}
    mask = Mask.causal() & Mask.padding(query=padding(T, 0), key_value=padding(S, 1))
    mha, gqa = (export_masks(mask, kind=kind, **sizes) for kind in LAYERS)
    assert mha.keys() == {"use_causal_mask", "value_mask", "attention_mask"}
    assert mha["attention_mask"].shape == (B, T, 1)
    assert gqa.keys() == {"use_causal_mask", "value_mask", "query_mask"}
    assert export_masks(None, **sizes) == {}
    read, _ = import_masks(kind="gqa", sliding_window=3, **gqa)
    assert read is not None
    assert (read.causal_offset, read.window_size, read.array) == (0, (2, 2), None)


def test_a_mask_per_head_holds_the_padding_too() -> None:
    rng = np.random.default_rng(0)
    heads, padding = rng.random((B, N, T, S)) < 0.6, rng.random((B, S)) < 0.6
    mask = Mask.causal() & Mask.dense(heads) & Mask.padding(key_value=padding)
    found = export_masks(mask, query_length=T, key_length=S, per_head=True)
    assert found.keys() == {"attention_mask", "use_causal_mask"}
    np.testing.assert_array_equal(found["attention_mask"], heads & padding[:, None, None])


def test_additive_values_are_refused() -> None:
    sizes: Any = {"query_length": T, "key_length": S}
    with pytest.raises(ValueError, match="keras cannot hold additive values"):
        export_masks(None, numbers(T, S), **sizes)
    kept = padding(S, 1)
    only = np.where(kept, 0, -np.inf)[:, None, None]
    exported = export_masks(Mask.causal(), only, **sizes)
    np.testing.assert_array_equal(pairs(*import_masks(**exported)), pairs(Mask.causal(), only))


@pytest.mark.parametrize("bad", [np.ones((B, T)), np.ones((S + 1,)), np.ones((T, S, 1, 1, 1))])
def test_wrong_shapes(bad: NDArray) -> None:
    with pytest.raises(ValueError, match="value_mask: expected axes"):
        import_masks(value_mask=bad, attention_mask=np.ones((T, S)))


# ------------------------------------------------------------------- masks that tensors carry


def tokens(length: int) -> NDArray:
    """Ids, 0 is padding; every batch row has some, none has nothing else."""
    ids = np.random.default_rng(length).integers(1, 5, (B, length))
    ids[np.arange(length) >= np.array([[length], [length - 2], [2]])] = 0
    return ids


def embedded(length: int) -> tuple[Any, Any]:
    ids = keras.Input((length,), dtype="int32")
    return ids, keras.layers.Embedding(5, D, mask_zero=True)(ids)


def attention(kind: Kind) -> Any:
    if kind == "gqa":
        return keras.layers.GroupQueryAttention(H, N, 1)
    return keras.layers.MultiHeadAttention(N, H)


@pytest.mark.parametrize("kind", LAYERS)
@foreign()
def test_post_norm_stack(kind: Kind) -> None:
    """MultiHeadAttention erases the padding mask for all layers but the first."""
    ids, x = embedded(T)
    for _ in range(3):
        x = keras.layers.LayerNormalization()(keras.layers.Add()([x, attention(kind)(x, x)]))
    arrived = implicit_masks(keras.Model(ids, x), tokens(T))
    present = tokens(T) != 0
    full = present[:, None, :, None] & present[:, None, None, :]
    for index, one in enumerate(arrived):
        mask, bias = import_masks(**one.arguments)
        assert bias is None
        if index and kind == "mha":
            assert (mask, one.lost) == (None, ("query_mask", "value_mask"))
        else:
            assert one.lost == ()
            assert mask is not None
            np.testing.assert_array_equal(to_numpy(mask.to_array(T, T)), full)
    assert len(arrived) == 3


@pytest.mark.parametrize("kind", LAYERS)
@foreign()
def test_shared_memory(kind: Kind) -> None:
    """Of several layers on one padded memory, one sees its mask."""
    ids, memory = embedded(S)
    query = keras.Input((T, D))
    outputs = [attention(kind)(query, memory) for _ in range(3)]
    arrived = implicit_masks(keras.Model([query, ids], outputs), [QUERY, tokens(S)])
    lost = sorted(one.lost for one in arrived)
    assert lost == ([(), ("value_mask",), ("value_mask",)] if kind == "mha" else [()] * 3)
    seen = [import_masks(**one.arguments)[0] for one in arrived if not one.lost]
    for mask in seen:
        assert mask is not None
        np.testing.assert_array_equal(np.asarray(mask.key_value_padding), tokens(S) != 0)


@pytest.mark.slow_variants("mha-True", "gqa-False")
@pytest.mark.parametrize("causal", BOTH)
@pytest.mark.parametrize("kind", LAYERS)
@foreign()
def test_masks_of_one_layer(kind: Kind, causal: bool) -> None:
    """The masks of its inputs, which keep them; the layer computes with those that arrive."""
    made, params = layer(kind, window=3)
    query, value = keras.ops.array(QUERY), keras.ops.array(VALUE)
    query._keras_mask, value._keras_mask = padding(T, 3), padding(S, 1)
    options = {"use_causal_mask": causal, "key_mask": padding(S, 2)}
    (one,) = implicit_masks(made, query, value, **options)
    assert one.layer == ""
    assert one.lost == ()
    assert one.arguments["sliding_window"] == 3
    assert one.arguments["use_causal_mask"] is causal
    assert query._keras_mask is not None
    assert value._keras_mask is not None
    (out,) = map(to_numpy, [made(query, value, **options)])
    compare(params, False, [import_masks(**one.arguments)], [(out,)], [kind])
    assert "_compute_attention" not in vars(made)


@foreign()
def test_causal_alone() -> None:
    """Keras makes no mask then, and its kernel is causal."""
    made, _ = layer("mha")
    (one,) = implicit_masks(made, QUERY, VALUE, use_causal_mask=True)
    assert one.arguments == {"kind": "mha", "implicit": True, "use_causal_mask": True}


@foreign()
def test_a_subclass_that_fails_is_left_as_it_was() -> None:
    made, _ = layer("mha")
    with pytest.raises(Exception, match="attention_mask"):
        implicit_masks(made, QUERY, VALUE, attention_mask=np.ones(S, bool))
    assert "_compute_attention" not in vars(made)


KINDS = "every_combination or one_layer or shared_memory or is_the_one"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("marks", "least"),
    [("not slow", 6), pytest.param("slow or not slow", 14, marks=pytest.mark.slow)],
)
def test_on_tensorflow(marks: str, least: int) -> None:
    """In a process of its own, since Keras chooses its backend once."""
    pytest.importorskip("tensorflow")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        [*command, "-m", marks, "-k", KINDS],
        env=os.environ | {"KERAS_BACKEND": "tensorflow"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= least, done.stdout


def test_the_backend_is_the_one_asked_for() -> None:
    assert keras.backend.backend() == os.environ["KERAS_BACKEND"]


@foreign()
def test_layers_of_one_name_are_called_by_their_paths() -> None:
    def block(name: str) -> Any:
        x = keras.Input((T, D))
        return keras.Model(x, keras.layers.MultiHeadAttention(N, H, name=name)(x, x))

    inputs = keras.Input((T, D))
    model = keras.Model(inputs, block("other")(block("mine")(block("mine")(inputs))))
    names = dict(attention_layers(model))
    assert list(names) == [
        "layers/functional/layers/multi_head_attention",
        "layers/functional_1/layers/multi_head_attention",
        "other",
    ]
    arrived = implicit_masks(model, QUERY)
    assert [one.layer for one in arrived] == list(names)
