"""The meaning of a mask survives export and import, and the framework computes just that."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxmha import Mask
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.masks import handwritten
from jaxmha.converters.masks.spec import Masks
from tests.masks import ours
from tests.masks.draws import (
    KINDS,
    SIZES,
    Sizes,
    emptied,
    numbers,
    pairs,
    property_test,
    random_mask,
    stacked,
)
from tests.masks.draws import SEED as PROPERTY_SEED
from tests.masks.frameworks import APIS, LIVE, MaskApi, inputs, params
from tests.tolerance import assert_close

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You are using a softmax over axis:UserWarning"),
]
FACTOR = 0.5  # 16 floors of float32 are 1e-6 of the scale
FEW = (SIZES[3],)  # all equal; usual sizes have exhaustive tests
AXES = ("1111", "B11S", "N1S", "BNTS", "TS")


def random_bias(number: int, sizes: Sizes) -> NDArray | None:
    """None for even numbers; over some axes, with -inf in places."""
    if number % 2 == 0:
        return None
    rng = np.random.default_rng(number)
    axes = AXES[rng.integers(len(AXES))] if sizes.S else "B11S"  # where 1 may be the extra position
    known = sizes._asdict() | {"1": 1}
    bias = numbers(*(known[axis] for axis in axes), seed=number)
    bias[rng.random(bias.shape) < 0.2] = -np.inf
    return bias


def carried(api: MaskApi, mask: Mask, bias: Any, sizes: Sizes) -> tuple[Mask, dict[str, Any]]:
    """The mask, and the framework's arguments for it, after what is refused was left out."""
    named = sizes.named(*api.sizes) | dict(api.exporting)
    lengths = mask.query_lengths
    if not api.beyond and lengths is not None and np.any(lengths < sizes.T):
        with pytest.raises(ValueError, match=r"mask has query lengths.*Mask.padding\(query="):
            api.module.export_masks(mask, bias, **named)
        mask = replace(mask, query_lengths=None)
    if reason := api.refuses(mask, sizes):
        with pytest.raises(ValueError, match=reason):
            api.module.export_masks(mask, bias, **named)
        mask = Mask.causal() if sizes.S else Mask()
    return mask, api.module.export_masks(mask, bias, **named)


def round_trip(api: MaskApi, mask: Mask, bias: Any, sizes: Sizes) -> tuple[dict[str, Any], Masks]:
    """The framework's arguments, and what they are read as: the same."""
    mask, arguments = carried(api, mask, bias, sizes)
    if api.module is handwritten and not arguments:
        return arguments, (None, None)
    importing = api.importing(sizes) | arguments
    if api.fills and emptied(mask, bias, sizes).any():
        with pytest.raises(ValueError, match="excludes every key that the mask leaves"):
            api.module.import_masks(**importing)
        importing["emptied_by_bias"] = "empty"
    mask2, bias2 = api.module.import_masks(**importing)
    allowed = pairs(mask, bias, sizes)
    np.testing.assert_array_equal(pairs(mask2, bias2, sizes), allowed)
    before, after = (np.zeros(()) if x is None else x for x in (bias, bias2))
    np.testing.assert_array_equal(np.where(allowed, after, 0), np.where(allowed, before, 0))
    return arguments, (mask2, bias2)


@pytest.mark.parametrize("examples", [12, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", APIS)
def test_export_then_import(name: str, examples: int) -> None:
    def check(mask: Mask, number: int, sizes: Sizes) -> None:
        bias = random_bias(number, sizes) if APIS[name].bias else None
        round_trip(APIS[name], mask, bias, sizes)

    property_test(check, examples)


def live(name: str, sizes: Sizes, count: int) -> None:
    """Random masks exported, given to the framework, imported and evaluated by one program."""
    path = LIVE[name]
    if 0 in sizes and not path.no_keys:
        return
    api = APIS[path.api]
    rng = np.random.default_rng([PROPERTY_SEED, count, *sizes])
    call, made, expected = path.make(sizes), [], []
    for _ in range(count):
        kinds = {kind for kind in KINDS if rng.random() < 0.25}
        number = int(rng.integers(2**32))
        excluded = float(rng.choice((0.0, 0.3, 1.0), p=(0.2, 0.7, 0.1)))
        mask = random_mask(number, kinds, excluded, sizes)
        bias = random_bias(number, sizes) if api.bias else None
        if api.fills and emptied(mask, bias, sizes).any():
            bias = None  # refused
        arguments, read = round_trip(api, mask, bias, sizes)
        made.append(read)
        expected.append(call(**arguments))
    given, masks = inputs(sizes, path.layer), stacked(made, sizes)
    if path.layer:
        weights = params(sizes.N, path.groups or sizes.N)
        actual = ours.layer(weights, given, masks, path.semantics)[0]
    else:
        lengths = [None if mask is None else mask.query_lengths for mask, _ in made]
        rows = [np.full(sizes.B, sizes.T) if x is None else np.asarray(x) for x in lengths]
        actual = ours.heads(given, masks, path.semantics, np.stack(rows))
    for c, theirs in enumerate(expected):
        assert_close(actual[c], theirs, f"{name} {sizes} {made[c][0]!r}", factor=FACTOR)


@pytest.mark.slow_variants("gqa*", "keras scores*", "nnx*", "bert*", "linen*", "torch [ws]*")
@pytest.mark.parametrize("sizes", FEW, ids=str)
@pytest.mark.parametrize("name", LIVE)
def test_live_frameworks_agree(name: str, sizes: Sizes) -> None:
    live(name, sizes, 5)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", LIVE)
def test_live_frameworks_agree_at_length(name: str, sizes: Sizes) -> None:
    live(name, sizes, 200)
