"""The whole layer against the specification."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask, Semantics, dims, dropout
from jaxmha.params import from_leaves
from tests import jit_cache, layer_cases, reference, tolerance
from tests.layer_cases import LAYERS, LayerCase

BY_NAME = {case.name: case for case in LAYERS}
KEY = jax.random.key(5)
params_of = from_leaves


def mask_of(others: dict[str, Any]) -> Mask | None:
    """The conditions of the specification as a Mask."""
    mask = Mask()
    if "mask" in others:
        mask &= Mask.dense(others["mask"])
    if "causal_offset" in others:
        mask &= Mask.causal(others["causal_offset"])
    if "local_window_size" in others:
        mask &= Mask.window(*others["local_window_size"])
    if "segment_ids" in others:
        query_ids, key_value_ids = others["segment_ids"]
        mask &= Mask.segments(query_ids=query_ids, key_value_ids=key_value_ids)
    mask &= Mask.lengths(
        query=others.get("query_seq_lengths"), key_value=others.get("key_value_seq_lengths")
    )
    return mask & Mask.padding(
        query=others.get("query_padding"), key_value=others.get("key_value_padding")
    )


def semantics_of(case: LayerCase) -> Semantics:
    return Semantics(**dict(case.semantics))


def call(case: LayerCase, **extra: Any) -> Callable[..., Any]:
    """A function of leaves, inputs, and the other arrays."""
    options = {"semantics": semantics_of(case), "is_causal": case.is_causal, **extra}
    if semantics_of(case).dropout_rate:
        options["dropout_key"] = KEY

    def run(leaves: dict[str, Any], inputs: dict[str, Any], others: dict[str, Any]) -> Any:
        return jaxmha.multi_head_attention(
            params_of(leaves), **inputs, bias=others.get("bias"), mask=mask_of(others), **options
        )

    return run


def expected(
    case: LayerCase, leaves: dict[str, Any], inputs: dict[str, Any], others: dict[str, Any]
) -> tuple[Any, reference.Output]:
    semantics = semantics_of(case)
    extra: dict[str, Any] = {}
    if semantics.dropout_rate:
        B, S = int(np.prod(case.batch)), case.S + case.extras
        shape = (B, case.N, case.T, S)
        draws = jax.jit(dropout.keep, static_argnums=(1, 2))(KEY, semantics.dropout_rate, shape)
        extra["dropout_keep"] = np.asarray(draws).reshape(*case.batch, *draws.shape[1:])
    return reference.multi_head_attention(
        params_of(leaves),
        **inputs,
        semantics=semantics,
        is_causal=case.is_causal,
        **others,
        **extra,
    )


def values(case: LayerCase, dtype: str, factor: float = 1.0) -> None:
    arrays = layer_cases.layer_arrays(case, dtype)
    before = jax.tree.map(np.copy, arrays)
    want, exact = expected(case, *arrays)
    dropped = semantics_of(case).dropout_rate > 0
    out, weights = call(case, return_weights="after_dropout" if dropped else True)(*arrays)
    assert out.dtype == weights.dtype == arrays[1]["query"].dtype
    tolerance.assert_close(out, want, "output", factor=factor)
    shown = exact.kept if dropped else exact.weights
    tolerance.assert_close(weights, shown, "weights", factor=factor)
    chex.assert_trees_all_equal(arrays, before, strict=True)


@pytest.mark.everyday(case=["plain", "extras_structure"])
@pytest.mark.parametrize("case", LAYERS)
def test_values(case: LayerCase) -> None:
    values(case, "float32")


# Each has what no other one has; those of float32 have the extra positions and every condition.
WIDE = (
    "cross_two_batch_axes", "no_out", "extras_nan", "norm_bias", "norm_heads_weights",
    "norm_all_heads", "several", "gate_heads", "dropout",
)  # fmt: skip


@pytest.mark.everyday(case=WIDE)
@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.usefixtures("x64")
def test_values_float64(case: LayerCase) -> None:
    values(case, "float64")


@pytest.mark.everyday(dtype=["bfloat16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "name", ["norm_rms", pytest.param("extras_structure", marks=pytest.mark.slow)]
)
def test_values_in_half_precision(name: str, dtype: str) -> None:
    values(BY_NAME[name], dtype, tolerance.LAYER)


@pytest.mark.slow  # gradients and poisoned padding are compiled too
def test_values_under_jit() -> None:
    case = BY_NAME["extras_structure"]
    arrays = layer_cases.layer_arrays(case)
    leaves, inputs, others = arrays
    out = jax.jit(lambda *xs: call(case)(*xs, others))(leaves, inputs)
    tolerance.assert_close(out, expected(case, *arrays)[0])


def test_vmap() -> None:
    """Over parameters as well: an ensemble."""
    case = BY_NAME["both_extras"]
    stack = [layer_cases.layer_arrays(case, seed=seed) for seed in range(2)]
    out = jax.vmap(call(case))(*jax.tree.map(lambda *xs: np.stack(xs), *stack))
    for row, arrays in enumerate(stack):
        tolerance.assert_close(out[row], expected(case, *arrays)[0])


SMALL = LayerCase(
    "small",
    T=3,
    S=5,
    K=2,
    G=2,
    H=3,
    h=2,
    leaves=tuple(
        name
        for name in layer_cases.LEAVES
        if "_heads" not in name and name not in ("query.kernel", "key.kernel", "value.kernel")
    ),
    mask="*NTE",
    bias="*NTS",
    conditions=("query_seq_lengths", "key_value_seq_lengths"),
    semantics=(("add_zero_attn", True), ("qk_norm", "layer"), ("logits_soft_cap", 1.7)),
)


def functional(case: LayerCase, **extra: Any) -> Callable[..., Any]:
    """A random linear functional of the output, as a function of leaves, inputs, others."""
    part = np.random.default_rng(2).standard_normal(
        expected(case, *layer_cases.layer_arrays(case, "float64"))[0].shape
    )
    run = call(case, **extra)
    return lambda *arrays: (out := run(*arrays), (out * jnp.asarray(part, out.dtype)).sum())[1]


@pytest.mark.everyday(policy=["zero"])
@pytest.mark.parametrize("policy", ["zero", "mean"])
@pytest.mark.usefixtures("x64")
def test_gradients(policy: str) -> None:
    """Of every leaf and input in a random direction, against differences of the specification."""
    case = replace(SMALL, semantics=(*SMALL.semantics, ("fully_masked", policy)))
    leaves, inputs, others = layer_cases.layer_arrays(case, "float64")
    of = functional(case)
    part = np.random.default_rng(2).standard_normal(expected(case, leaves, inputs, others)[0].shape)
    found = jax.jit(jax.grad(of, argnums=(0, 1)))(leaves, inputs, others)
    rng = np.random.default_rng(3)
    for tree, grads in zip((leaves, inputs), found, strict=True):
        for name, x in tree.items():
            step = rng.standard_normal(x.shape)
            step /= np.linalg.norm(step)
            moved = [
                [t | {name: x + s * step} if t is tree else t for t in (leaves, inputs)]
                for s in (tolerance.STEP, -tolerance.STEP)
            ]
            one, other = ((expected(case, a, b, others)[0] * part).sum() for a, b in moved)
            got = np.sum(np.asarray(grads[name]) * step)
            tolerance.assert_gradients(got, (one - other) / (2 * tolerance.STEP), name)


def assert_unmoved(
    case: LayerCase, leaves: Any, inputs: Any, spoiled: list[Any], others: Any
) -> None:
    """Output and all gradients are finite, and the same for every one of the spoiled inputs."""
    run = call(case)

    def value(leaves: Any, inputs: Any) -> Any:
        out = run(leaves, inputs, others)
        return (out.astype(jnp.float32) ** 2).sum(), out

    compiled = jax.jit(jax.grad(value, argnums=(0, 1), has_aux=True))
    before = compiled(leaves, inputs)
    chex.assert_tree_all_finite(before)
    for each in spoiled:
        chex.assert_trees_all_equal(compiled(leaves, each), before, strict=True)


@pytest.mark.slow_variants("*", "!lengths-norm_rms")
@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("lengths", "bias_kv"),
        pytest.param("padding", "bias_kv", marks=pytest.mark.slow),
        pytest.param("mask", "bias_kv", marks=pytest.mark.slow),
        pytest.param("bias", "bias_kv", marks=pytest.mark.slow),
        ("bias", "plain"),
        ("padding", "zero_attn"),
        ("mask", "norm_layer"),
        ("lengths", "norm_rms"),
    ],
)
def test_poisoned_padding(how: str, name: str) -> None:
    """Values of padded rows of the inputs reach no output and no gradient."""
    case = replace(BY_NAME[name], mask=None, bias=None)
    leaves, inputs, _ = layer_cases.layer_arrays(case)
    lengths = np.asarray([3, 6], np.int32)
    valid = np.arange(case.S) < lengths[:, None]
    additive = np.where(valid, np.float32(0.5), np.float32(-np.inf))
    ways: dict[str, dict[str, Any]] = {
        "lengths": {"key_value_seq_lengths": lengths},
        "padding": {"key_value_padding": valid},
        "mask": {"mask": valid[:, None, None]},
        "bias": {"bias": additive[:, None, None]},
    }
    others = ways[how]
    spoiled = [
        {
            n: x if n == "query" else np.where(valid[..., None], x, np.float32(poison))
            for n, x in inputs.items()
        }
        for poison in (np.nan, np.inf)
    ]
    assert_unmoved(case, leaves, inputs, spoiled, others)


@pytest.mark.slow_variants("norm_rms")
@pytest.mark.parametrize("name", ["self_unbatched", "norm_rms"])
def test_poisoned_self_attention(name: str) -> None:
    """One array as query, key and value, padded at its end."""
    case = replace(BY_NAME[name], inputs=1, batch=(2,))
    leaves, inputs, _ = layer_cases.layer_arrays(case)
    lengths = np.asarray([3, 4], np.int32)
    others: dict[str, Any] = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    valid = (np.arange(case.T) < lengths[:, None])[..., None]
    spoiled = {"query": np.where(valid, inputs["query"], np.float32(np.nan))}
    assert_unmoved(case, leaves, inputs, [spoiled], others)


@pytest.mark.slow
def test_poison_is_noticed() -> None:
    """Without the mask the same check fails."""
    leaves, inputs, _ = layer_cases.layer_arrays(BY_NAME["plain"])
    spoiled = inputs | {"key": inputs["key"].copy()}
    spoiled["key"][0, -1] = np.nan
    with pytest.raises(AssertionError):
        assert_unmoved(BY_NAME["plain"], leaves, inputs, [spoiled], {})


@pytest.mark.slow_variants("*", "!bfloat16-float32-float32")
@pytest.mark.parametrize(
    ("of_params", "of_inputs", "of_output"),
    [
        ("bfloat16", "float32", "float32"),
        pytest.param("float32", "bfloat16", "float32", marks=pytest.mark.slow),
        pytest.param("float16", "float32", "float32", marks=pytest.mark.slow),
        ("float16", "bfloat16", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_promotion(of_params: str, of_inputs: str, of_output: str) -> None:
    """The promoted dtype is also the one that is computed in."""
    case = BY_NAME["bias_kv"]
    leaves, _, _ = layer_cases.layer_arrays(case, of_params)
    _, inputs, others = layer_cases.layer_arrays(case, of_inputs, seed=1)
    out = call(case)(leaves, inputs, others)
    assert out.dtype == of_output
    factor = tolerance.LAYER if of_output == "bfloat16" else 1.0
    tolerance.assert_close(out, expected(case, leaves, inputs, others)[0], factor=factor)


@pytest.mark.parametrize("argument", ["leaves", "inputs", "others"])
def test_float64_is_not_rounded(argument: str) -> None:
    case = BY_NAME["cross_two_batch_axes"]
    wide = layer_cases.layer_arrays(case, "float64")
    arrays = list(layer_cases.layer_arrays(case, "float32"))
    place = ("leaves", "inputs", "others").index(argument)
    arrays[place] = wide[place]
    with pytest.raises(TypeError, match="float64"):
        call(case)(*arrays)


@pytest.mark.slow_variants("*bias_kv*", "zero_attn*", "!zero_attn-5-0", "plain-5-*")
@pytest.mark.parametrize(("T", "S"), [(0, 7), (5, 0), (5, 1)])
@pytest.mark.parametrize("name", ["plain", "zero_attn", "bias_kv"])
def test_sizes_of_zero_and_one(name: str, T: int, S: int) -> None:
    values(replace(BY_NAME[name], T=T, S=S, mask=None, bias=None), "float32")


MUTANTS: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "key and value biases swapped": (
        "small_square",
        lambda x: x | {"key.bias": x["value.bias"], "value.bias": x["key.bias"]},
    ),
    "heads permuted": ("plain", lambda x: x | {"query.kernel": x["query.kernel"][:, ::-1]}),
    "out heads permuted": ("plain", lambda x: x | {"out.kernel": x["out.kernel"][::-1]}),
    "bias_v lost": ("bias_kv", lambda x: x | {"bias_v": x["bias_v"] * 0}),
    "norm scale lost": ("norm_rms", lambda x: x | {"query_norm": x["query_norm"] * 0 + 1}),
}


@pytest.mark.everyday(mutant=["heads permuted", "norm scale lost"])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_fail(mutant: str) -> None:
    """Parameters that are wrong in one place are told apart."""
    name, change = MUTANTS[mutant]
    case = BY_NAME.get(name, replace(BY_NAME["plain"], H=11, h=11))
    leaves, inputs, others = layer_cases.layer_arrays(case)
    out = call(case)(change(leaves), inputs, others)
    with pytest.raises(AssertionError):
        tolerance.assert_close(out, expected(case, leaves, inputs, others)[0])


@pytest.mark.parametrize("call", ["layer", "prefill", "decode_step"])
def test_every_shape_is_checked_once(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a call that is traced again; later functions get the sizes."""
    checked = []

    def spy(name: str, *rest: Any) -> None:
        checked.append(name)
        dims.bind(name, *rest)

    for module in ("attention", "decoding_checks", "params", "projections"):
        monkeypatch.setattr(f"jaxmha.{module}.bind", spy)
    params = jaxmha.init_params(KEY, num_heads=2, features=6)
    cache, x = jaxmha.KVCache.empty(params, 1, 5), jnp.ones((1, 3, 6))
    checked.clear()
    jit_cache.forget()
    if call == "layer":
        jax.eval_shape(jaxmha.multi_head_attention, params, x)
    else:
        jax.eval_shape(getattr(jaxmha, call), params, x, cache)
    assert "params.query.kernel" in checked
    assert len(set(checked)) == len(checked)
