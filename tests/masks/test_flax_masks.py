"""Masks of flax linen and nnx against live layers and functions, on every path."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmha import Mask, MHAParams, Projection, Semantics
from jaxmha.converters.flax import to_module
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.masks.flax import export_masks, import_masks
from jaxmha.converters.masks.spec import Masks
from tests.drawn import to_jax
from tests.masks import ours
from tests.masks.draws import B, N, S, T, emptied, numbers, pairs, spaced, stacked
from tests.masks.frameworks import arrays
from tests.masks.ours import otherwise_answered
from tests.promotion import foreign
from tests.tolerance import assert_close

flax = pytest.importorskip("flax")
from flax import linen, nnx

# A layer keeps its weights on request, which flax would rather have within a context.
pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
H, D = 11, 13
FACTOR = 0.5  # 16 floors of float32 are 1e-6 of the scale
BOTH = (False, True)
SIZES: Any = {"query_length": T, "key_length": S}
# linen has one path; nnx another where weights are asked for or there is dropout.
PATHS = ("linen", "nnx fast", "nnx slow")
SHAPES = {
    "S": (S,),
    "TS": (T, S),
    "NTS": (N, T, S),
    "11TS": (1, 1, T, S),
    "B1TS": (B, 1, T, S),
    "B11S": (B, 1, 1, S),
    "1NT1": (1, N, T, 1),
    "BNTS": (B, N, T, S),
}
DTYPES = ("bool", "float32", "int32", "additive")
MASKS = (None, *(f"{name} {dtype}" for name in SHAPES for dtype in DTYPES))
BIASES = (None, "TS", "NTS", "BNTS", "BNTS inf")
QUERY, VALUE = numbers(B, T, D), numbers(B, S, D, seed=1)
HEADS = [numbers(B, T, N, H), numbers(B, S, N, H, seed=1), numbers(B, S, N, H, seed=2)]
_PROJECTIONS: Any = [
    Projection(0.3 * numbers(D, N, H, seed=i), 0.3 * numbers(N, H, seed=i)) for i in range(3)
] + [Projection(0.3 * numbers(N, H, D), 0.3 * numbers(D))]
PARAMS = MHAParams(*_PROJECTIONS)


def mask_of(form: str | None) -> NDArray | None:
    """Random; one row of queries has nothing left. Additive masks are read as their opposite."""
    if form is None:
        return None
    axes, dtype = form.split()
    kept = np.random.default_rng(len(form)).random(SHAPES[axes]) < 0.6
    if kept.ndim > 1 and kept.shape[-2] == T:
        kept[..., 2, :] = dtype == "additive"
    if dtype == "additive":
        return np.where(kept, 0.0, -1e9).astype(np.float32)
    return kept.astype(dtype)


def bias_of(form: str | None) -> NDArray | None:
    """Random; where it excludes, every row keeps a key, though not always one of the mask's."""
    if form is None:
        return None
    axes, *infinite = form.split()
    bias = numbers(*SHAPES[axes])
    if infinite:
        bias[np.random.default_rng(1).random(bias.shape) < 0.4] = -np.inf
        bias[..., 0] = 1.0
    return bias


def layer(path: str) -> Any:
    """A live layer as `call(**arguments)`; jitted, every combination would be a program."""
    if path == "linen":
        module, variables = to_module(PARAMS, kind="linen")
        return lambda mask=None: module.apply(variables, QUERY, VALUE, mask=mask)
    return partial(to_module(PARAMS), QUERY, VALUE, sow_weights=path == "nnx slow")


def function(path: str) -> Any:
    """The function `dot_product_attention` as `call(**arguments)`."""
    library = linen if path == "linen" else nnx
    module = nnx.Module() if path == "nnx slow" else None

    def call(mask: Any = None, bias: Any = None, is_causal: bool = False) -> Any:
        options = {} if path == "linen" else {"is_causal": is_causal}
        heads = map(jnp.asarray, HEADS)
        own = module if path == "nnx slow" else None
        return library.dot_product_attention(*heads, bias=bias, mask=mask, module=own, **options)

    return call


def compare(path: str, made: list[Masks], expected: list[Any], what: list[str]) -> None:
    """Whole layers, or heads where the expected outputs have four axes."""
    semantics = Semantics.flax("fused" if path == "nnx fast" else "weights")
    if expected[0].ndim == 3:
        actual = ours.layer(PARAMS, (QUERY, VALUE), stacked(made), semantics)[0]
    else:
        actual = ours.heads(HEADS, stacked(made), semantics)
    for c, found in enumerate(expected):
        theirs = np.array(found)
        if theirs.ndim == 4:
            otherwise_answered(HEADS[2], made[c], actual[c], theirs, FACTOR)
        assert_close(actual[c], theirs, what[c], factor=FACTOR)


def slow_path_fails(path: str, mask: NDArray | None, causal: bool) -> bool:
    """The slow path of nnx broadcasts the triangle to the shape of the mask."""
    full = mask is None or mask.shape[-2:] == (T, S)
    return path == "nnx slow" and causal and not full


@pytest.mark.everyday(stride=[3])
@pytest.mark.parametrize(("path", "stride"), [("linen", 3), *((path, 1) for path in PATHS)])
def test_every_combination_of_layers(path: str, stride: int) -> None:
    """mask 33 x is_causal 2 (nnx)."""
    call, made, expected, what = layer(path), [], [], []
    failed = 0
    for form, causal in spaced(stride, MASKS, BOTH if path != "linen" else (False,)):
        mask = mask_of(form)
        arguments = {"mask": mask} | ({"is_causal": causal} if path != "linen" else {})
        read = import_masks(is_causal=causal, mask=mask, num_heads=N)
        with foreign():
            if slow_path_fails(path, mask, causal):
                with pytest.raises(ValueError, match=r"[Ii]ncompatible shapes|broadcast"):
                    call(**arrays(arguments))
                failed += 1
                continue
            expected.append(call(**arrays(arguments)))
        made.append(read)
        what.append(f"{form=} {causal=}")
    assert len(made) + failed == 33 * (1 if path == "linen" else 2) // stride
    assert failed == (12 if path == "nnx slow" else 0)
    compare(path, made, expected, what)


@pytest.mark.everyday(stride=[4, 7])
@pytest.mark.parametrize(
    ("path", "stride"), [("linen", 4), ("nnx fast", 7), *((path, 1) for path in PATHS)]
)
def test_every_combination_of_functions(path: str, stride: int) -> None:
    """mask 9 x bias 5 x is_causal 2 (nnx), of which some bias leaves a row no key of the mask's."""
    call, made, expected, what = function(path), [], [], []
    failed = refused = 0
    forms = (None, *(f"{name} bool" for name in SHAPES))
    causals = BOTH if path != "linen" else (False,)
    for form, bias, causal in spaced(stride, forms, BIASES, causals):
        arguments: dict[str, Any] = {"mask": mask_of(form), "bias": bias_of(bias)}
        options: Any = {"is_causal": causal, "num_heads": N, "query_length": T}
        read = import_masks(emptied_by_bias="empty", **options, **arguments)
        if emptied(*read).any():
            with pytest.raises(ValueError, match="bias of -inf excludes every key that the mask"):
                import_masks(**options, **arguments)
            refused += 1
        with foreign():
            if slow_path_fails(path, arguments["mask"], causal):
                with pytest.raises(ValueError, match=r"[Ii]ncompatible shapes|broadcast"):
                    call(is_causal=causal, **arrays(arguments))
                failed += 1
                continue
            expected.append(call(is_causal=causal, **arrays(arguments)))
        made.append(read)
        what.append(f"{form=} {bias=} {causal=}")
    assert len(made) + failed == -(-9 * 5 * len(causals) // stride)
    assert refused
    compare(path, made, expected, what)


@pytest.mark.parametrize("library", [linen, nnx])
@foreign()
def test_helpers(library: Any) -> None:
    """The helpers make a mask argument like others, float32 by default."""
    ids = np.array([[1, 1, 2, 2, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    padding = library.make_attention_mask(ids > 0, ids > 0)
    causal = library.make_causal_mask(ids)
    packed = library.make_attention_mask(ids, ids, jnp.equal)
    mask, bias = import_masks(mask=library.combine_masks(padding, causal, packed))
    assert bias is None
    assert mask is not None
    expected = Mask.causal() & Mask.segments(query_ids=ids, key_value_ids=ids)
    expected &= Mask.padding(query=ids > 0)
    expected &= Mask.padding(key_value=ids > 0)
    np.testing.assert_array_equal(mask.to_array(T, T), expected.to_array(T, T))


@pytest.mark.everyday(path=["nnx fast", "nnx slow"])
@pytest.mark.parametrize("path", PATHS)
def test_three_axes_are_heads(path: str) -> None:
    """Where B = N a (B, T, S) mask is silently (N, T, S), here as there."""
    kept = np.random.default_rng(0).random((N, T, S)) < 0.6
    with foreign():
        expected = layer(path)(mask=to_jax(kept))
    compare(path, [import_masks(mask=kept, num_heads=N)], [expected], [path])
    with pytest.raises(ValueError, match=r"mask: expected axes \(#N, #T, #S\) with N=2"):
        import_masks(mask=np.ones((B, T, S), bool), num_heads=N)


def test_exclusions_in_a_layer() -> None:
    """A layer has no bias, and a bias of 0 and -inf is a mask."""
    bias = np.where(np.random.default_rng(0).random((N, T, S)) < 0.5, 0, -np.inf)
    exported = export_masks(Mask.causal(), bias, **SIZES)
    assert exported.keys() == {"mask", "is_causal"}
    np.testing.assert_array_equal(pairs(*import_masks(**exported)), pairs(Mask.causal(), bias))
    with pytest.raises(ValueError, match="a flax nnx layer cannot hold additive values"):
        export_masks(None, numbers(T, S), **SIZES)
    assert export_masks(None, **SIZES) == {}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"decode": True}, ValueError, "decode=True"),
        ({"bias": np.ones((T, S), bool)}, TypeError, "bias is added"),
        ({"bias": np.ones((T, S), int)}, TypeError, "bias must be"),
        ({"mask": np.ones((1, B, N, T, S))}, ValueError, "mask: expected axes"),
        ({"mask": np.ones((T, S)), "bias": np.ones((S, S))}, ValueError, "T=5"),
    ],
)
def test_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        import_masks(**arguments)
