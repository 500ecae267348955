"""Fused kernels behind the contract: what surrounds them, exactly; they themselves where they run."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask, implementations
from jaxmha.implementations import UnsupportedError, probe
from jaxmha.implementations.base import Leaks
from jaxmha.implementations.fused import adapter, splash, tokamax
from tests import cases, conformance, cudnn_contract
from tests.cases import CASES, POISONED, Case
from tests.cudnn_contract import MaskType


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU whose cuDNN is its documented contract."""
    calls = cudnn_contract.install(monkeypatch)
    with jaxmha.lowering_for("h200"):
        yield calls


# Beside the common ones: what is moved, padded or compacted.
MORE = (
    Case("one_query_causal", T=1, is_causal=True),
    Case("window_and_lengths", T=11, S=7, local_window_size=(2, 0),
         key_value_seq_lengths=(2, 0), query_seq_lengths=(11, 5)),
    Case("window_symmetric", T=7, S=11, local_window_size=3, key_value_seq_lengths=(3, 11)),
    Case("mask_keys_causal", mask="B11S", is_causal=True, T=7, S=7, H=8, h=8),
    Case("mask_keys_negative_scale", mask="B11S", is_causal=True, scale=-0.4),
    Case("mask_keys_window", mask="B11S", local_window_size=(3, 1), T=7, S=5),
    Case("mask_keys_lengths", mask="B11S", key_value_seq_lengths=(5, 3)),
    Case("mask_queries", mask="B1T1", empty_rows=True),
    Case("bias_causal_padded", bias="1NTS", bias_excludes=True, mask="B11S", is_causal=True),
    Case("power_of_two", H=16, scale=None, local_window_size=(3, 1), key_value_seq_lengths=(7, 3)),
    Case("mask_of_heads", mask="N1S", key_value_seq_lengths=(6, 2), is_causal=True),
)  # fmt: skip
ALL = (*CASES, *MORE)
BY_NAME = {case.name: case for case in ALL}


EVERYDAY = ("bias_per_head", "window_and_lengths", "mask_keys_causal")


def check(case: Case, implementation: str, dtype: str, *, lse: bool) -> None:
    """The suite where the implementation takes the case; else that it says why."""
    arrays = cases.arrays(case, dtype)
    options = {**case.options, "return_lse": lse, "implementation": implementation}
    if case.dropout_rate:
        options["dropout_key"] = jax.random.key(7)
    # The suite traces them, so that ids are not those of NumPy, which are read.
    asked = jax.tree.map(jnp.asarray, arrays)
    reason = dict(jaxmha.explain(**asked, **options).reasons)[implementation]
    if reason is None:
        conformance.kernel(case, implementation, dtype, lse=lse)
        return
    with pytest.raises(UnsupportedError, match=re.escape(reason)):
        conformance.kernel(case, implementation, dtype, lse=lse)


@pytest.mark.everyday(case=EVERYDAY)
@pytest.mark.slow_variants("bias_per_head", "window_and_lengths")
@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("case", ALL)
def test_cudnn(case: Case) -> None:
    check(case, "cudnn", "bfloat16", lse=case.bias is None)


@pytest.mark.slow
@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("case", ALL)
def test_cudnn_without_lse(case: Case) -> None:
    check(case, "cudnn", "bfloat16", lse=False)


@pytest.mark.slow
@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("case", ALL)
def test_cudnn_float16(case: Case) -> None:
    check(case, "cudnn", "float16", lse=case.bias is None)


# Operands that leak in the contract, and what its probe finds.
LEAKS = {(): Leaks(), ("value",): Leaks(1, 1), cudnn_contract.ALL: Leaks(1, 2)}


@pytest.mark.everyday(case=["poisoned_causal"])
@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("leaks", LEAKS)
@pytest.mark.parametrize("case", POISONED)
def test_cudnn_poisoned(
    case: Case, leaks: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cuDNN that skips positions beyond lengths, and with one that was found not to."""
    monkeypatch.setattr(cudnn_contract, "LEAKS", leaks)
    monkeypatch.setattr(probe, "leaks", lambda *_: LEAKS[leaks])
    bare = replace(case, logits_soft_cap=None, segments=None, bias=None, bias_excludes=False)
    if "bias" not in case.name:
        conformance.poisoned_padding(bare, "cudnn", "bfloat16")


@pytest.mark.slow  # for its traces; `check` holds every single one
@pytest.mark.usefixtures("cudnn")
def test_cudnn_declines_what_it_cannot() -> None:
    """By kind of request; what the cases decline is all of this kind."""
    declined = {
        case.name
        for case in ALL
        if dict(
            jaxmha.explain(
                **cases.arrays(case, "bfloat16"),
                **case.options,
                dropout_key=jax.random.key(7),
                implementation="cudnn",
            ).reasons
        )["cudnn"]
    }
    assert declined == {
        *("segments_self", "segments_pair", "soft_cap", "dropout", "dropout_shared"),
        *("no_keys", "no_keys_nan", "no_queries", "everything", "sinks_everything"),
    }


# The arguments of the kernel.
@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, {"mask_type": MaskType.NO_MASK, "T": 128, "S": 192, "H": 16}),
        ({"is_causal": True}, {"mask_type": MaskType.CAUSAL, "S": 128}),
        ({"lengths": True}, {"mask_type": MaskType.PADDING, "S": 192, "bias": False}),
        ({"padding": True}, {"mask_type": MaskType.PADDING, "H": 16, "bias": False, "table": True}),
        ({"padding": True, "T": 2049}, {"mask_type": MaskType.PADDING, "H": 16, "table": None}),
        (
            {"padding": True, "is_causal": True},
            {"mask_type": MaskType.CAUSAL, "H": 24, "bias": False},
        ),
        ({"offset": 5}, {"mask_type": MaskType.CAUSAL, "T": 133}),
        ({"offset": -5}, {"mask_type": MaskType.CAUSAL, "T": 123, "S": 123}),
    ],
    ids=str,
)
def test_cudnn_is_asked_for_no_more_than_needed(
    cudnn: Any, options: dict[str, Any], asked: dict[str, Any]
) -> None:
    B, T, S = 2, options.get("T", 128), 192
    mask = Mask()
    if "lengths" in options:
        mask &= Mask.lengths(key_value=np.full(B, 7, np.int32))
    if "padding" in options:
        mask &= Mask.padding(key_value=np.ones((B, S), bool))
    if "offset" in options:
        mask &= Mask.causal(options["offset"])
    make: Any = jax.ShapeDtypeStruct
    heads = (make((B, n, 2, 16), jnp.bfloat16) for n in (T, S, S))
    run = partial(
        jaxmha.dot_product_attention,
        mask=mask,
        is_causal="is_causal" in options,
        implementation="cudnn",
    )
    jax.eval_shape(run, *heads)
    (found,) = cudnn
    assert {name: found.get(name) for name in asked} == asked


MAPPED: dict[str, Any] = {
    "vmap(grad), one bias": lambda f: jax.vmap(
        jax.grad(f, (0, 1, 2, 3)), in_axes=(0, None, 2, None)
    ),
    "vmap(grad), many biases": lambda f: jax.vmap(jax.grad(f, 3), in_axes=(0, None, 2, 0)),
    "grad(vmap)": lambda f: jax.grad(
        lambda *x: jax.vmap(f, in_axes=(0, None, 2, None))(*x).sum(), (0, 1, 2, 3)
    ),
    "jacobian": lambda f: jax.vmap(
        jax.jacobian(lambda *x: jnp.stack([f(*x), 2 * f(*x)])), in_axes=(0, None, 2, None)
    ),
}


@pytest.mark.everyday(name=["vmap(grad), one bias"])
@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("name", MAPPED)
def test_cudnn_under_transformations(name: str) -> None:
    """Every operand is mapped, over every axis."""
    rng = np.random.default_rng(0)
    shapes = (3, 2, 6, 4, 8), (2, 7, 2, 8), (2, 7, 3, 2, 8)
    bias = (3, 1, 4, 6, 7) if "many" in name else (1, 4, 6, 7)
    arrays = [jnp.asarray(rng.standard_normal(x), jnp.bfloat16) for x in (*shapes, bias)]

    def found(implementation: str) -> Any:
        def value(q: Any, k: Any, v: Any, bias: Any) -> Any:
            lengths = jnp.asarray([4, 7], np.int32)
            out = jaxmha.dot_product_attention(
                q, k, v, bias, key_value_seq_lengths=lengths, implementation=implementation
            )
            return out.astype(np.float32).sum()

        return jax.jit(MAPPED[name](value))(*arrays)

    for x, y in zip(*map(jax.tree.leaves, map(found, ("cudnn", "reference"))), strict=True):
        x, y = (np.asarray(a, np.float32) for a in (x, y))
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, atol=0.03 * np.abs(y).max(), rtol=0)


PACKED = {
    "full": {"T": 13, "K": 2},
    "causal": {"T": 13, "K": 2, "is_causal": True},
    "one key head": {"T": 12, "K": 1, "is_causal": True},
    "as many key heads": {"T": 12, "K": 4},
}


@pytest.mark.everyday(name=["causal"], mapped=[False])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_cudnn_packed(cudnn: Any, name: str, mapped: bool) -> None:
    """Absent sequences, an uncovered rest, odd T; outputs and gradients, eager and under jit."""
    options: dict[str, Any] = dict(PACKED[name])
    T, K = options.pop("T"), options.pop("K")
    rng = np.random.default_rng(0)
    lengths = np.array([[3, 0, 5, 0], [T, 0, 0, 0], [1, 2, 3, T]], np.int32)
    shapes = ((3, T, n, 8) for n in (4, K, K, 4))
    q, k, v, d = (jnp.asarray(rng.standard_normal(x), jnp.bfloat16) for x in shapes)

    def found(implementation: str, mask: Any) -> Any:
        def value(q: Any, k: Any, v: Any, lengths: Any) -> Any:
            run = partial(
                jaxmha.dot_product_attention,
                mask=mask(lengths),
                implementation=implementation,
                **options,
            )
            out, pull = jax.vjp(run, q, k, v)
            return run(q, k, v), out, pull(d)

        if mapped:
            return jax.jit(jax.vmap(value, in_axes=(0, None, None, None)))(
                jnp.stack([q, 2 * q]), k, v, lengths
            )
        return value(q, k, v, lengths), jax.jit(value)(q, k, v, lengths)

    def ids(lengths: Any, max_segments: int | None = None) -> Mask:
        same: Any = Mask.packed(lengths, size=T).query_segments
        return Mask.segments(query_ids=same, key_value_ids=same, max_segments=max_segments)

    want = found("reference", ids)
    for mask in (partial(Mask.packed, size=T), partial(ids, max_segments=5)):
        for x, y in zip(*map(jax.tree.leaves, (found("cudnn", mask), want)), strict=True):
            x, y = (np.asarray(a, np.float32) for a in (x, y))
            np.testing.assert_allclose(x, y, atol=0.03 * np.abs(y).max(), rtol=0)
    assert all(call.get("packed") for call in cudnn)


ALTERNATING = np.arange(16)[None] % 2


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"mask": Mask.segments(query_ids=ALTERNATING, key_value_ids=ALTERNATING)}, "give Mask.packed"),
        ({"key_value_seq_lengths": np.array([3, 4])}, "without other masks"),
        ({"return_lse": True}, "log-sum-exp"),
        ({"local_window_size": (3, 0)}, "without a window"),
    ],
)  # fmt: skip
def test_cudnn_says_why_it_does_not_take_packed_sequences(
    cudnn: Any, changed: dict[str, Any], why: str
) -> None:
    make: Any = jax.ShapeDtypeStruct
    x = make((2, 16, 2, 8), jnp.bfloat16)
    options: Any = {"mask": Mask.packed(np.array([[3, 4]]), size=16), **changed}
    assert why in str(jaxmha.explain(x, x, x, **options, implementation="cudnn"))


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1.7e19, {"key_value_seq_lengths": np.array([2])}),
        (1.7e19, {"is_causal": True}),
        (2.0**14, {"is_causal": True, "local_window_size": (1, 0)}),
    ],
    ids=["padding", "causality", "window"],
)
def test_the_lowest_attended_logits_beat_those_of_excluded_keys(
    size: float, options: dict[str, Any]
) -> None:
    """From -2.9e38 on; with a window, whose excluded keys get -2**30, from -2**28 on."""
    query = np.zeros((1, 4, 1, 8), jnp.bfloat16)
    query[..., 0] = size
    key = -query * np.array([1, 0.875, 0.75, 0.625], jnp.bfloat16)[:, None, None]  # no ties
    value = np.repeat(np.arange(1.0, 5).astype(jnp.bfloat16), 8).reshape(1, 4, 1, 8)
    found, expected = (
        jaxmha.dot_product_attention(
            query, key, value, scale=1.0, implementation=implementation, **options
        )
        for implementation in ("cudnn", "reference")
    )
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize("without", ["_lengths", "_sum"])
def test_what_is_normalised_matters(
    cudnn: Any, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    """Without lengths, and without the gradient of lse, the suite fails."""
    monkeypatch.setattr(
        adapter, without, {"_lengths": lambda *_: None, "_sum": lambda a, b: a}[without]
    )
    with pytest.raises(AssertionError):
        conformance.kernel(
            Case("defect", T=6, S=6, key_value_seq_lengths=(0, 3)), "cudnn", "bfloat16", lse=True
        )


@pytest.fixture
def splash_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel itself, interpreted; in float32 too, where errors show."""
    monkeypatch.setattr(splash, "INTERPRET", True)
    monkeypatch.setattr(splash, "DTYPES", ("bfloat16", "float32"))
    with jaxmha.lowering_for("tpu"):
        yield


@pytest.mark.usefixtures("splash_here")
def test_splash_values() -> None:
    conformance.values(replace(BY_NAME["window_and_lengths"], K=1), "splash", "float32", jit=True)


@pytest.mark.slow
@pytest.mark.usefixtures("splash_here")
@pytest.mark.parametrize("case", ALL)
def test_splash(case: Case) -> None:
    check(case, "splash", "float32", lse=case.logits_soft_cap is None)


@pytest.mark.slow
@pytest.mark.usefixtures("splash_here")
@pytest.mark.parametrize("case", ALL)
def test_splash_bfloat16(case: Case) -> None:
    check(case, "splash", "bfloat16", lse=False)


@pytest.mark.slow
@pytest.mark.usefixtures("splash_here")
@pytest.mark.parametrize("case", [POISONED[0], POISONED[1], POISONED[2]])
def test_splash_poisoned(case: Case) -> None:
    bare = replace(case, bias=None, logits_soft_cap=None)
    conformance.poisoned_padding(bare, "splash", "float32")


@pytest.mark.parametrize(
    ("device", "backends"), [("a100", ("triton",)), ("h100", ("mosaic", "triton"))]
)
def test_tokamax_has_a_gradient_by_triton_below_hopper(
    device: str, backends: tuple[str, ...]
) -> None:
    with jaxmha.lowering_for(device):
        assert tokamax._backends() == backends


@pytest.mark.parametrize(
    ("leaks", "alone", "with_gradient"),
    [((0, 0), "", ""), ((0, 1), "", "v"), ((1, 2), "v", "kv"), ((2, 2), "kv", "kv")],
)
@pytest.mark.parametrize("kernel", ["cudnn", "tokamax"])
def test_what_leaks_is_zeroed_and_no_more(
    kernel: str, leaks: Any, alone: str, with_gradient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(inputs: adapter.KernelInputs, *_: Any, **__: Any) -> Any:
        out = jnp.concatenate([inputs.key, inputs.value], 3)
        return out if kernel == "tokamax" else (out, None)

    module = implementations.IMPLEMENTATIONS[kernel]
    monkeypatch.setattr(module, "_run", run)
    x, mask = jnp.full((1, 5, 1, 8), jnp.nan), Mask.lengths(key_value=np.asarray([3]))

    def out(x: Any) -> Any:
        request = implementations.Request(x, x, x, None, mask, jaxmha.Semantics(), None, False)
        return module.attend(request, leaks=Leaks(*leaks)).out

    for found, expected in ((out(x), alone), (jax.vjp(out, x)[0], with_gradient)):
        dead = np.isnan(found[0, :, 0, 7:9])
        assert dead[:3].all()
        assert "".join("kv"[n] for n in (0, 1) if not dead[3:, n].any()) == expected


@pytest.fixture
def tokamax_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its public function, by the plain implementation that it has for every device."""
    pytest.importorskip("tokamax")
    monkeypatch.setattr(tokamax, "BACKENDS", ("xla",))
    monkeypatch.setattr(tokamax, "traceable", lambda: None)
    promotes = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    with jaxmha.lowering_for("h200"), promotes[0], promotes[1]:
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("tokamax_here")
@pytest.mark.parametrize("case", ALL)
def test_tokamax(case: Case) -> None:
    check(case, "tokamax", "bfloat16", lse=False)


# Leaks that a probe of tokamax finds in calls with a dense mask or a bias, and with lengths where tiles are cut.
DENSE, LENGTHS = Leaks(1, 2), Leaks()
POISONED_BY_MASKS = (
    Case("poisoned_padding", mask="B11S", dead_keys=True, logits_soft_cap=1.1),
    Case("poisoned_segments", segments="pair"),
)


@pytest.mark.slow
@pytest.mark.usefixtures("tokamax_here")
@pytest.mark.parametrize("case", [*POISONED, *POISONED_BY_MASKS])
def test_tokamax_poisoned(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks select logits, and a bias is added: NaN gets through where the probe, which has masks, is clean."""
    found = LENGTHS if case in POISONED_BY_MASKS else DENSE
    monkeypatch.setattr(probe, "leaks", lambda *_: found)
    capped = case if case.bias is None else replace(case, logits_soft_cap=None)
    conformance.poisoned_padding(capped, "tokamax", "bfloat16", lse=False)
