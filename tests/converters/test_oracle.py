"""The vectorised float64 oracle against the specification written as loops."""

import zlib
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxmha import MHAParams, Semantics
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.verify import oracle
from jaxmha.params import CANONICAL, from_leaves
from tests import reference

SIZES = {"N": 6, "K": 2, "H": 5, "h": 7, "Dq": 11, "Dk": 13, "Dv": 17, "Do": 19}
B, T, S = 2, 3, 4
# Two orders of summation of some ten terms in float64.
CLOSE = 1e-13


@dataclass(frozen=True)
class Case:
    """A layer and a mask: the leaves `without` are left out, those of `EXTRA` unless they are in
    `extra`; `mask` is given by its axes."""

    name: str
    without: tuple[str, ...] = ()
    semantics: Semantics = Semantics()  # noqa: RUF009 (frozen)
    mask: str = ""
    empty: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    extra: tuple[str, ...] = ()


EXTRA = {leaf for leaf in CANONICAL if leaf.partition("_")[0] in ("sinks", "gate")}
EXTRA |= {leaf for leaf in CANONICAL if leaf.startswith("gate.")}
EXTRA |= {leaf for leaf in CANONICAL if "_norm_" in leaf}
HEADS = ("query_norm_heads", "key_norm_heads")
OVER_HEADS = Semantics(qk_norm="rms", qk_norm_scope="heads")
NORMS, KV, BIASES = (
    ("query_norm", "key_norm"),
    ("bias_k", "bias_v"),
    ("query.bias", "key.bias", "value.bias", "out.bias"),
)
CASES = (
    Case("plain", NORMS + KV),
    Case("no biases", NORMS + KV + BIASES),
    Case("no output layer", (*NORMS, *KV, "out.kernel", "out.bias")),
    Case("multi-head", NORMS + KV, sizes={"K": 6}),
    Case("one key/value head", NORMS + KV, sizes={"K": 1}),
    Case("scale", NORMS + KV, Semantics(scale=0.7)),
    Case("soft cap", NORMS + KV, Semantics(logits_soft_cap=0.9)),
    Case("layer norm", KV, Semantics(qk_norm="layer", qk_norm_epsilon=0.03)),
    Case("rms norm", KV, Semantics(qk_norm="rms", qk_norm_epsilon=0.03)),
    Case("bias_k", NORMS),
    Case("zero position", NORMS + KV, Semantics(add_zero_attn=True)),
    Case("both extra positions", NORMS, Semantics(add_zero_attn=True), "BNTS"),
    Case("norm and extra positions", (), Semantics(add_zero_attn=True, qk_norm="layer"), "B1TS"),
    Case("mask", NORMS + KV, mask="BNTS"),
    Case("mask over keys", NORMS + KV, mask="B11S"),
    Case("empty rows", NORMS + KV, mask="B1TS", empty=True),
    Case("empty rows with extra positions", NORMS, mask="B1TS", empty=True),
    Case("sinks", NORMS + KV, mask="B1TS", empty=True, extra=("sinks",)),
    Case("gate", NORMS + KV, extra=("gate.kernel", "gate.bias")),
    Case("gate per head", NORMS + KV, extra=("gate_heads.kernel", "gate_heads.bias")),
    Case("norm over heads", NORMS + KV, OVER_HEADS, extra=HEADS),
    Case(
        "norm with bias", KV, Semantics(qk_norm="layer"), extra=("query_norm_bias", "key_norm_bias")
    ),
    Case("norm with offset", KV, Semantics(qk_norm="rms", qk_norm_offset=1.0)),
    Case("norm without scales", NORMS + KV, Semantics(qk_norm="rms", qk_norm_learned=False)),
    Case("clipping", NORMS + KV, Semantics(clip_qkv=0.6)),
)


def build(case: Case) -> tuple[MHAParams, tuple[NDArray, NDArray, NDArray], Any]:
    """Parameters, inputs and mask of a case."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    sizes = SIZES | case.sizes
    params = from_leaves(
        {
            leaf: rng.normal(size=[sizes[letter] for letter in axes.split()])
            for leaf, axes in CANONICAL.items()
            if leaf not in case.without and (leaf not in EXTRA or leaf in case.extra)
        }
    )
    query, key, value = (
        rng.normal(size=(B, length, sizes[width]))
        for length, width in ((T, "Dq"), (S, "Dk"), (S, "Dv"))
    )
    axes = {"B": B, "N": sizes["N"], "T": T, "S": S, "1": 1}
    mask = rng.random([axes[x] for x in case.mask]) < 0.6 if case.mask else None
    if mask is not None and case.empty:
        mask[..., 1, :] = False
    return params, (query, key, value), mask


@pytest.mark.parametrize("case", CASES)
def test_oracle_equals_the_loops(case: Case) -> None:
    params, inputs, mask = build(case)
    stages = oracle.run(params, case.semantics, *inputs, mask=mask)
    output, result = reference.multi_head_attention(
        params, *inputs, semantics=case.semantics, mask=mask
    )
    heads = reference.project(params, *inputs, case.semantics)
    pairs: list[tuple[Any, Any]] = [
        (stages.query, heads[0]),
        (stages.key[:, :S], heads[1]),
        (stages.value[:, :S], heads[2]),
        (stages.probabilities, result.weights),
        (stages.output, output),
    ]
    if params.gate is None:  # the oracle's context is that which `out` reads
        pairs.append((stages.context, result.out))
    for ours, theirs in pairs:
        assert ours.dtype == np.float64
        assert np.abs(theirs).max() > 0.1
        np.testing.assert_allclose(ours, theirs, rtol=CLOSE, atol=CLOSE)


def test_empty_rows_are_exactly_the_output_bias() -> None:
    params, inputs, mask = build(next(case for case in CASES if case.name == "empty rows"))
    stages = oracle.run(params, Semantics(), *inputs, mask=mask)
    assert (stages.probabilities[:, :, 1] == 0).all()
    assert (stages.context[:, 1] == 0).all()
    assert params.out is not None
    assert params.out.bias is not None
    np.testing.assert_array_equal(stages.output[:, 1], np.broadcast_to(params.out.bias, (B, 19)))
    assert np.isfinite(stages.output).all()


def test_logits_are_those_before_the_softmax() -> None:
    params, inputs, mask = build(next(case for case in CASES if case.name == "mask"))
    logits, probabilities = oracle.run(params, Semantics(), *inputs, mask=mask)[3:5]
    assert np.array_equal(logits == -np.inf, ~np.broadcast_to(mask, logits.shape))
    exps = np.exp(logits)
    np.testing.assert_allclose(exps, exps.sum(-1, keepdims=True) * probabilities, rtol=1e-12)


def test_oracle_computes_in_float64_whatever_the_weights_are() -> None:
    params, inputs, _ = build(CASES[0])
    half = params._replace(
        query=params.query._replace(kernel=np.asarray(params.query.kernel, ml_dtypes.bfloat16))
    )
    rounded = half._replace(
        query=half.query._replace(kernel=np.asarray(half.query.kernel).astype(np.float64))
    )
    ours, theirs = (oracle.run(p, Semantics(), *inputs).output for p in (half, rounded))
    np.testing.assert_array_equal(ours, theirs)


def test_the_comparison_fails_for_a_wrong_layer() -> None:
    """Swapping query and key, or tiling heads instead of repeating them, moves the output."""
    params, inputs, _ = build(CASES[0])
    exact = oracle.run(params, Semantics(), *inputs).output
    tiled = params._replace(
        query=params.query._replace(kernel=np.asarray(params.query.kernel)[:, [0, 3, 1, 4, 2, 5]])
    )
    assert np.abs(oracle.run(tiled, Semantics(), *inputs).output - exact).max() > 0.1
    case = next(case for case in CASES if case.name == "multi-head")
    params, inputs, _ = build(case)
    same = (inputs[0], inputs[0][:, :, :], inputs[2][:, :T])
    params = params._replace(key=params.key._replace(kernel=np.asarray(params.key.kernel)[:11]))
    exact = oracle.run(params, Semantics(), *same).output
    swapped = params._replace(query=params.key, key=params.query)
    assert np.abs(oracle.run(swapped, Semantics(), *same).output - exact).max() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_rounding_floor_is_what_rounding_costs(dtype: str) -> None:
    wide = np.random.default_rng(0).normal(size=100_000)
    kind = np.dtype(dtype)
    floor = oracle.rounding_floor(wide, kind)
    if dtype == "float64":
        assert 0 < floor < 1e-16
        return
    cost = np.sqrt(np.mean(np.square(wide.astype(kind).astype(np.float64) - wide)))
    np.testing.assert_allclose(floor, cost, rtol=0.02)


def test_rounding_floor_of_subnormal_numbers_is_not_zero() -> None:
    tiny = np.full(3, 2.0**-30)
    np.testing.assert_allclose(
        oracle.rounding_floor(tiny, np.dtype(np.float16)), 2.0**-24 / 12**0.5, rtol=1e-12
    )
