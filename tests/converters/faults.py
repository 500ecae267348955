"""Faults of a layer, and the names that their attribution has to find."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxmha import Mask
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.verify import attribution
from jaxmha.converters.verify.captured_layer import Blocked, Inputs, Layer
from jaxmha.params import CANONICAL, from_leaves, leaves

# N * H = D, so that transposed and exchanged kernels fit.
SIZES = {"N": 3, "K": 3, "H": 5, "h": 5, "Dq": 15, "Dk": 15, "Dv": 15, "Do": 15}
GROUPED = SIZES | {"N": 6, "K": 2}
B, T, S = 3, 7, 11
LENGTHS = np.array([11, 8, 5])
# Parts sum to the whole within this part of it, in float64.
SUMS = 1e-12


def draw(rng: np.random.Generator, sizes: dict[str, int] = SIZES) -> Layer:
    """A causal and padded layer with random weights."""
    arrays: dict[str, Any] = {
        name: 0.4 * rng.normal(size=[sizes[letter] for letter in axes.split()])
        for name, axes in CANONICAL.items()
        if name.endswith((".kernel", ".bias")) and not name.startswith("gate")
    }
    padding = np.arange(S) < LENGTHS[:, None]
    mask = Mask.causal(S - T) & Mask.padding(key_value=padding)
    return Layer(from_leaves(arrays), mask=mask)


def inputs(rng: np.random.Generator) -> Inputs:
    query, key, value = (rng.normal(size=(B, length, 15)) for length in (T, S, S))
    return query, key, value


def with_leaves(change: Callable[[dict[str, NDArray]], dict[str, NDArray]]) -> Any:
    """A fault that rewrites weights."""

    def fault(layer: Layer) -> Layer:
        arrays: dict[str, Any] = dict(leaves(layer.params))
        return replace(layer, params=from_leaves(arrays | change(arrays)))

    return fault


def semantic(**fields: Any) -> Any:
    return lambda layer: replace(layer, semantics=replace(layer.semantics, **fields))


def masked(**fields: Any) -> Any:
    return lambda layer: replace(layer, mask=replace(layer.mask, **fields))


def noisy(name: str) -> Any:
    return with_leaves(
        lambda x: {name: x[name] + 0.3 * np.sin(np.arange(x[name].size)).reshape(x[name].shape)}
    )


def without(name: str) -> Any:
    def fault(layer: Layer) -> Layer:
        return replace(
            layer, params=from_leaves({n: x for n, x in leaves(layer.params).items() if n != name})
        )

    return fault


def exchanged(one: str, other: str) -> Any:
    return with_leaves(
        lambda x: {
            f"{a}.{part}": x[f"{b}.{part}"]
            for a, b in ((one, other), (other, one))
            for part in ("kernel", "bias")
        }
    )


def interleaved(x: dict[str, NDArray]) -> dict[str, NDArray]:
    """Rows packed as (qkv N H) are read as (N qkv H)."""
    names = [f"{role}.kernel" for role in ("query", "key", "value")]
    packed = np.stack([x[name] for name in names], axis=1).reshape(15, -1)
    return dict(zip(names, np.moveaxis(packed.reshape(15, 3, 3, 5), 2, 0), strict=True))


def heads_of_size_three(layer: Layer) -> Layer:
    shapes = {"N": 5, "K": 5, "H": 3, "h": 3, "Dq": 15, "Dk": 15, "Dv": 15, "Do": 15}
    arrays: dict[str, Any] = {
        name: np.asarray(x).reshape([shapes[letter] for letter in CANONICAL[name].split()])
        for name, x in leaves(layer.params).items()
    }
    return replace(layer, params=from_leaves(arrays))


def tiled(layer: Layer) -> Layer:
    """Groups of key/value heads are tiled where they are to be repeated."""
    done: Layer = with_leaves(
        lambda x: {
            name: np.tile(x[name], (*(1,) * (x[name].ndim - 2), 3, 1))
            for name in ("key.kernel", "key.bias", "value.kernel", "value.bias")
        }
    )(layer)
    return done


def rows_to_heads(layer: Layer) -> Layer:
    padding = layer.mask.key_value_padding
    kept = replace(layer.mask, key_value_padding=None)
    return replace(layer, mask=kept & Mask.dense(padding[None, :, None]))


def padded(change: Callable[[NDArray], NDArray]) -> Any:
    return lambda layer: masked(key_value_padding=change(layer.mask.key_value_padding))(layer)


def rounded(x: dict[str, NDArray]) -> dict[str, NDArray]:
    return {name: array.astype(np.float32) for name, array in x.items()}


class Fault(NamedTuple):
    """A change of a layer, and the name that the attribution has for it.

    `only`: a field of weights or mask that no second fault may touch. `loud`: logits are large.
    """

    name: str
    named: str
    make: Callable[[Layer], Layer]
    touches: str
    sizes: dict[str, int] = SIZES
    loud: bool = False
    empty: bool = False


FAULTS = (
    Fault("query weights", "query weights", noisy("query.kernel"), "query"),
    Fault("value weights", "value weights", noisy("value.kernel"), "value"),
    Fault("query and key exchanged", "query and key exchanged", exchanged("query", "key"), "query key"),
    Fault("key and value exchanged", "key and value exchanged", exchanged("key", "value"), "key value"),
    Fault("interleaved packing", "interleaved packing", with_leaves(interleaved), "query key value"),
    Fault("output transposed", "transposed kernel", with_leaves(lambda x: {"out.kernel": x["out.kernel"].reshape(15, 15).T.reshape(3, 5, 15)}), "out"),
    Fault("heads as sizes", "heads and head size exchanged", with_leaves(lambda x: {"value.kernel": x["value.kernel"].reshape(15, 5, 3).swapaxes(1, 2)}), "value"),
    Fault("dropped bias", "dropped bias", without("out.bias"), "bias"),
    Fault("rounded weights", "rounded weights", with_leaves(rounded), "query key value out bias heads constant"),
    Fault("wrong head count", "number of heads", heads_of_size_three, "heads"),
    Fault("tiled groups", "head order", tiled, "", GROUPED),
    Fault("scale", "scale", semantic(scale=1.0), "scale"),
    Fault("soft cap", "soft cap", semantic(logits_soft_cap=1.0), "cap"),
    Fault("zero position", "zero position", semantic(add_zero_attn=True), "extra"),
    Fault("softmax dtype", "softmax dtype", semantic(softmax_dtype="float16"), "softmax"),
    Fault("mask polarity", "mask polarity", padded(lambda present: ~present), "padding"),
    Fault("mask ignored", "mask ignored", masked(key_value_padding=None), "padding"),
    Fault("padding shifted", "padding shifted", padded(lambda present: np.roll(present, -1, axis=1) & present), "padding"),
    Fault("causal alignment", "causal alignment", masked(causal_offset=0), "causal"),
    Fault("not causal", "causality", masked(causal_offset=None), "causal"),
    Fault("rows to heads", "mask axis", rows_to_heads, "padding heads causal"),
    Fault("mask constant", "mask constant", lambda x: replace(x, blocked=Blocked(-1e4)), "constant", loud=True),
    Fault("fully masked rows", "fully masked rows", semantic(fully_masked="mean"), "empty", empty=True),
    Fault("fully masked rows, NaN", "fully masked rows", semantic(fully_masked="nan"), "empty", empty=True),
    Fault("added constant", "fully masked rows", lambda x: replace(x, mask=None, bias=np.where(np.asarray(x.mask.to_array(T, S, np)), 0.0, -1e9)), "constant empty padding causal logits", empty=True),
    Fault("bias", "bias", lambda x: replace(x, bias=np.linspace(-1, 1, S)), "bias of logits"),
)  # fmt: skip


def case(seed: int, *faults: Fault) -> tuple[Layer, Layer, Inputs]:
    """A layer, the same with faults, and inputs on which they show."""
    rng = np.random.default_rng(seed)
    a, given = draw(rng, faults[0].sizes), inputs(rng)
    if any(fault.loud for fault in faults):  # and some rows see a single key
        given = (1000 * given[0], 1000 * given[1], given[2])
        padding = np.arange(S) < np.array([[11], [8], [1]])
        a = replace(a, mask=Mask.padding(key_value=padding))
    if any(fault.empty for fault in faults):
        a = replace(
            a, mask=replace(a.mask, key_value_padding=np.arange(S) < np.array([[11], [8], [0]]))
        )
    b = a
    for fault in faults:
        b = fault.make(b)
    return a, b, given


def assert_sums(found: attribution.Attribution) -> None:
    if not found.compared:
        assert math.isnan(found.total)
        return
    assert abs(sum(part.size for part in found.parts) - found.total) <= SUMS * found.total
    if found.total:
        assert abs(sum(part.share for part in found.parts) - 1) <= SUMS
