"""Mistakes that no shape check sees are named, and correct conversions are never accused."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxmha import MHAParams, Semantics
from jaxmha.converters import flax, keras, torch
from jaxmha.converters.discovery import attention_blocks
from jaxmha.converters.layout import transform
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.verify import comparands, comparison, diagnosis, forward_check, oracle
from jaxmha.params import CANONICAL, from_leaves, leaves
from tests.converters import layers
from tests.promotion import foreign

DRAWS = 100
Leaves = dict[str, NDArray]


def draw(rng: np.random.Generator) -> tuple[Leaves, int, int]:
    """Square weights, so that no shape gives a known error away; N, H >= 2, and N != H."""
    N, H = (int(n) for n in rng.choice([2, 3, 4, 5, 6], size=2, replace=False))
    D = N * H
    shapes = {
        **{f"{role}.kernel": (D, N, H) for role in ("query", "key", "value")},
        **{f"{role}.bias": (N, H) for role in ("query", "key", "value")},
        "out.kernel": (N, H, D),
        "out.bias": (D,),
    }
    return {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}, N, H


def exchanged(x: Leaves, one: str, other: str) -> Leaves:
    swapped = {part: (f"{one}.{part}", f"{other}.{part}") for part in ("kernel", "bias")}
    return x | {a: x[b] for pair in swapped.values() for a, b in (pair, pair[::-1])}


def transposed(x: Leaves, rng: np.random.Generator) -> Leaves:
    name = str(rng.choice([k for k in x if k.endswith("kernel")]))
    D = x["out.bias"].size
    return x | {name: np.ascontiguousarray(x[name].reshape(D, D).T).reshape(x[name].shape)}


def head_order(x: Leaves, rng: np.random.Generator) -> Leaves:
    N = x["query.bias"].shape[0]
    order = np.roll(np.arange(N), int(rng.integers(1, N)))
    return x | {"query.kernel": x["query.kernel"][:, order], "query.bias": x["query.bias"][order]}


def heads_as_sizes(x: Leaves, rng: np.random.Generator) -> Leaves:
    """Rows of every merged axis taken as (H N)."""
    N, H = x["query.bias"].shape
    changed: Leaves = {}
    for role in ("query", "key", "value"):
        kernel, bias = x[f"{role}.kernel"], x[f"{role}.bias"]
        changed[f"{role}.kernel"] = kernel.reshape(-1, H, N).swapaxes(1, 2)
        changed[f"{role}.bias"] = bias.reshape(H, N).T
    return x | changed


def other_count(x: Leaves, rng: np.random.Generator) -> Leaves:
    N, H = x["query.bias"].shape
    counts = [n for n in range(1, N * H + 1) if N * H % n == 0 and n not in (N, H)]
    state = torch.export_params(from_leaves(dict(x)))
    return dict(leaves(torch.import_params(state, num_heads=int(rng.choice(counts)))[0]))  # type: ignore[arg-type]


def sizes_exchanged(x: Leaves, rng: np.random.Generator) -> Leaves:
    """H heads of size N instead of N heads of size H."""
    H = x["query.bias"].shape[1]
    state = torch.export_params(from_leaves(dict(x)))
    return dict(leaves(torch.import_params(state, num_heads=H)[0]))  # type: ignore[arg-type]


def interleaved_kernels(x: Leaves, rng: np.random.Generator) -> Leaves:
    """The biases are packed as they are read."""
    found = interleaved(x, rng)
    return {k: found[k] if k.endswith("kernel") else x[k] for k in x}


def interleaved(x: Leaves, rng: np.random.Generator) -> Leaves:
    """A packed matrix whose rows are head by head is read as torch packs."""
    N, H = x["query.bias"].shape
    state = torch.export_params(from_leaves(dict(x)))
    for key in ("in_proj_weight", "in_proj_bias"):
        rest = state[key].shape[1:]
        state[key] = np.ascontiguousarray(
            state[key].reshape(3, N, H, *rest).swapaxes(0, 1).reshape(3 * N * H, *rest)
        )
    return dict(leaves(torch.import_params(state, num_heads=N)[0]))  # type: ignore[arg-type]


def dropped(x: Leaves, rng: np.random.Generator) -> Leaves:
    name = str(rng.choice([k for k in x if k.endswith("bias")]))
    return {k: v for k, v in x.items() if k != name}


def zero_bias(x: Leaves, rng: np.random.Generator) -> Leaves:
    """As Keras and Flax begin with: no bias is lost."""
    name = str(rng.choice([k for k in x if k.endswith("bias")]))
    return x | {name: np.zeros_like(x[name])}


INJECTED: dict[str, Callable[[Leaves, np.random.Generator], Leaves]] = {
    "transposed kernel": transposed,
    "query and key exchanged": lambda x, _: exchanged(x, "query", "key"),
    "key and value exchanged": lambda x, _: exchanged(x, "key", "value"),
    "head order": head_order,
    "heads and head size exchanged": heads_as_sizes,
    "wrong head count": other_count,
    "interleaved packing": interleaved,
    "dropped bias": dropped,
    "zero bias": zero_bias,
    "heads and head_dim exchanged": sizes_exchanged,
    "interleaved packing, in kernels": interleaved_kernels,
}


# The wrong operand and the dtype that it is rounded to: one of them at every draw.
CASTS = [(reverse, cast) for cast in (None, np.float16, ml_dtypes.bfloat16) for reverse in (0, 1)]


def named(name: str, casts: Sequence[tuple[int, Any]], draws: int = DRAWS, seed: int = 0) -> int:
    """How many of the draws with the known error are explained by it."""
    rng, count = np.random.default_rng(seed), 0
    for i in range(draws):
        right, _, _ = draw(rng)
        wrong = INJECTED[name](right, rng)
        reverse, cast = casts[i % len(casts)]
        if cast is not None:
            wrong = {k: v.astype(cast) for k, v in wrong.items()}
        pair = [from_leaves(dict(x)) for x in (right, wrong)]
        found = diagnosis.explain(*(pair[::-1] if reverse else pair))
        count += found is not None and found.startswith(name.split(",")[0])
    return count


@pytest.mark.parametrize("name", INJECTED)
def test_is_named(name: str) -> None:
    draws = 4 * len(CASTS)
    assert named(name, CASTS, draws) == draws


@pytest.mark.slow
@pytest.mark.parametrize("name", INJECTED)
@pytest.mark.parametrize("case", range(len(CASTS)))
def test_is_named_whichever_side_and_dtype(name: str, case: int) -> None:
    assert named(name, [CASTS[case]], seed=case + 1) >= 0.99 * DRAWS


def test_rotary_convention_is_named() -> None:
    rng = np.random.default_rng(0)
    for _ in range(DRAWS):
        x, _, H = draw(rng)
        if H % 2 or H == 2:  # two components are one pair either way
            continue
        order = np.arange(H).reshape(-1, 2).T.ravel()
        changed = x | {k: x[k][..., order] for k in x if k.split(".")[0] in ("query", "key")}
        found = diagnosis.explain(from_leaves(dict(x)), from_leaves(dict(changed)))
        assert found is not None
        assert found.startswith("rotary convention")


@pytest.mark.parametrize("draws", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_nothing_correct_is_accused(draws: int) -> None:
    rng = np.random.default_rng(draws)
    holding = [attention_blocks.named(name) for name in HOLDING]
    for i in range(draws):
        x, N, _ = draw(rng)
        params, layout = from_leaves(dict(x)), holding[i % len(holding)]
        state = transform.export_params(layout, params)
        again, _ = transform.import_params([layout], state, num_heads=N)
        assert diagnosis.explain(params, again) is None, layout.name


# Layouts that hold every square layer with all its biases.
HOLDING = [
    "torch", "keras", "keras-file", "flax", "bert", "vit", "timm", "gpt2", "gpt-neox", "linear",
    "llama", "equinox", "haiku",
]  # fmt: skip


def test_other_weights_are_not_explained() -> None:
    rng = np.random.default_rng(2)
    for _ in range(DRAWS):
        x, _, _ = draw(rng)
        noise = {k: (v + 1e-3 * rng.normal(size=v.shape)).astype(v.dtype) for k, v in x.items()}
        assert diagnosis.explain(from_leaves(dict(x)), from_leaves(dict(noise))) is None


@pytest.mark.parametrize("extra", ["grouped", "bias_kv"])
def test_wrong_head_count_of_other_layers(extra: str) -> None:
    rng = np.random.default_rng(5)
    for _ in range(DRAWS):
        x, N, H = draw(rng)
        sizes = {"Dq": 7, "Dk": 11, "Dv": 13, "Do": 17, "N": 4 * N, "H": 2 * H, "h": 2 * H}
        sizes["K"] = 4 * N if extra == "bias_kv" else 2 * N
        names = [*x, "bias_k", "bias_v"] if extra == "bias_kv" else list(x)
        other = sizes | {"N": 2 * N, "K": sizes["K"] // 2, "H": 4 * H, "h": 4 * H}
        right, wrong = (
            {k: [s[letter] for letter in CANONICAL[k].split()] for k in names}
            for s in (sizes, other)
        )
        drawn = {k: rng.normal(size=shape).astype(np.float32) for k, shape in right.items()}
        one = from_leaves(dict(drawn))
        two = from_leaves({k: drawn[k].reshape(shape) for k, shape in wrong.items()})
        for pair in ((one, two), (two, one)):
            found = diagnosis.explain(*pair)
            assert found is not None
            assert found.startswith("wrong head count")


@pytest.mark.slow_variants("key.bias--0.0", "key.bias-None", "query*")
@pytest.mark.parametrize(
    ("name", "zero"),
    [
        ("query.bias", 0.0),
        ("key.bias", -0.0),
        ("value.bias", -0.0),
        ("out.bias", 0.0),
        ("key.bias", None),
        ("out.bias", None),
    ],
)
def test_a_bias_of_zeros_is_no_error(name: str, zero: float | None) -> None:
    x, _, _ = draw(np.random.default_rng(6))
    x[name] = np.zeros_like(x[name])
    other = {k: v for k, v in x.items() if k != name}
    if zero is not None:
        other[name] = np.full_like(x[name], zero)
    for pair in ((x, other), (other, x)):
        a, b = (from_leaves(dict(side)) for side in pair)
        found = comparison.compare(a, b).blocks[0]
        assert (found.same, found.explanation) == (True, None), str(found)
        if zero is None:
            assert f"{name}: only in the " in str(found)
            assert "zero: it changes nothing" in str(found)


def live_block(
    wrong: str, params: MHAParams, semantics: Semantics = Semantics()
) -> comparands.ComparedBlock:
    """A side whose layer computes something of its own, in float64 rounded to its dtype."""

    def forward(query: NDArray, key: NDArray, value: NDArray, mask: Any = None) -> NDArray:
        if wrong == "inverted mask" and mask is not None:
            mask = ~mask
        if wrong == "mask ignored":
            mask = None
        if wrong == "key and value exchanged":
            key, value = value, key
        run = replace(semantics, scale=1.0) if wrong == "missing scale" else semantics
        out = oracle.run(params, run, query, key, value, mask=mask).output
        if wrong == "noise":
            out = out + 0.3 * out.std() * np.random.default_rng(0).normal(size=out.shape)
        if mask is not None:  # as frameworks do where nothing is left
            dead = ~np.broadcast_to(mask.any(-1)[:, 0], out.shape[:2])
            out[dead] = np.nan
        return out.astype(query.dtype)

    return comparands.ComparedBlock("", "a layer", params, semantics, forward, is_live=True)


DONE = (
    "inverted mask", "mask ignored", "missing scale", "key and value exchanged", "noise", "right",
)  # fmt: skip


@pytest.mark.everyday(name=["inverted mask"], draws=[24])
@pytest.mark.parametrize("draws", [24, DRAWS])
@pytest.mark.parametrize("name", DONE)
def test_what_a_live_layer_does_is_named(name: str, draws: int) -> None:
    rng, count = np.random.default_rng(3), 0
    for seed in range(draws):
        x, _, _ = draw(np.random.default_rng(seed % 7))
        dtype = (np.float32, np.float16, ml_dtypes.bfloat16)[seed % 3]
        x = {
            k: np.asarray(rng.normal(0, v.shape[0] ** -0.5 if v.ndim > 2 else 1, v.shape), dtype)
            for k, v in x.items()
        }
        params = from_leaves(dict(x))
        found = forward_check.explain_forward(live_block(name, params), seed)
        count += found is not None and found.startswith(name)
        assert found is None or name not in ("noise", "right")
        if seed < 6:
            report = comparison.compare_blocks(
                live_block(name, params), live_block("right", params), seed
            )
            assert report.same == (name == "right")
            assert report.explanation == found
    assert count == 0 if name in ("noise", "right") else count >= 0.99 * draws


# Layers of each framework and dtype: 204 in all where they are 34.
HALVES = [(kind, dtype) for kind in ("torch", "keras", "nnx") for dtype in ("bfloat16", "float16")]


@pytest.mark.slow_variants("*", "!*torch-float16-3")
@pytest.mark.parametrize(
    ("framework", "dtype", "count"),
    [
        ("torch", "bfloat16", 6),
        ("torch", "float16", 3),
        ("keras", "float16", 3),
        ("nnx", "bfloat16", 6),
    ]
    + [pytest.param(*half, 34, marks=pytest.mark.slow) for half in HALVES],
)
def test_correct_layers_in_half_precision_are_not_accused(
    framework: str, dtype: str, count: int
) -> None:
    """Weights from small ones to large ones, which make softmax pick single keys."""
    converter = {"torch": torch, "keras": keras, "nnx": flax}[framework]
    config = layers.configs(framework)[0]
    for seed in range(count):
        layer = layers.build(config, dtype, seed, deviation=(0.35, 0.1, 2.0)[seed % 3])
        report = comparison.compare(layer, converter.from_module(layer), seed=seed).blocks[0]
        assert report.same, f"{seed}: {report}"


def test_inverted_masks_of_real_layers_are_named() -> None:
    """Where the inverted mask leaves nothing Keras and nnx answer the mean."""
    import keras as keras_library
    from flax import nnx

    class Keras(keras_library.layers.MultiHeadAttention):  # type: ignore[misc]
        def call(self, *arguments: Any, attention_mask: Any = None, **options: Any) -> Any:
            inverted = None if attention_mask is None else ~attention_mask
            return super().call(*arguments, attention_mask=inverted, **options)

    class Nnx(nnx.MultiHeadAttention):  # type: ignore[misc]
        def __call__(self, *arguments: Any, mask: Any = None, **options: Any) -> Any:
            inverted = None if mask is None else ~mask.astype(bool)
            return super().__call__(*arguments, mask=inverted, **options)

    with foreign():
        keras_layer = Keras(3, 5)
        keras_layer.build((None, None, 15), (None, None, 15), (None, None, 15))
        wrong = [keras_layer, Nnx(3, 15, decode=False, rngs=nnx.Rngs(0))]
    for layer, converter in zip(wrong, (keras, flax), strict=True):
        with pytest.raises(ValueError, match=r"has a (__)?call(__)? of its own"):
            converter.from_module(layer)
        report = comparison.compare(layer, converter.weights_of(layer)).blocks[0]
        assert not report.same
        assert report.explanation is not None
        assert report.explanation.startswith("inverted mask"), converter.__name__


def test_scale_of_parameters_is_behaviour() -> None:
    x, _, _ = draw(np.random.default_rng(4))
    params = from_leaves(dict(x))
    report = comparison.compare((params, Semantics()), (params, Semantics(scale=1.0)))
    assert not report
    assert "scale is None and 1.0" in str(report)
    explanation = report.blocks[0].explanation
    assert explanation is not None
    assert explanation.startswith("missing scale")
    H = params.query.kernel.shape[-1]
    assert comparison.compare((params, Semantics()), (params, Semantics(scale=1 / math.sqrt(H))))
