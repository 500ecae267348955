"""cuDNN on its documented contract: the conformance suite, and the arguments of its calls."""

import inspect
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as private

import jaxmha
from jaxmha import Mask
from jaxmha.implementations import probe
from jaxmha.implementations.base import Leaks
from jaxmha.implementations.fused import adapter
from jaxmha.implementations.fused import cudnn as fused_cudnn
from tests import cases, conformance, cudnn_contract, jit_cache, tolerance
from tests.cases import POISONED, Case
from tests.cudnn_contract import MaskType
from tests.drawn import to_jax
from tests.h100 import on_device
from tests.kernel_cases import ALL, check
from tests.simulated_gpu import small


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU whose cuDNN is its documented contract."""
    calls = cudnn_contract.install(monkeypatch)
    with jaxmha.lowering_for("h200"):
        yield calls


EVERYDAY = ("bias_per_head", "window_and_lengths", "mask_keys_causal")


@pytest.mark.everyday(case=EVERYDAY)
@pytest.mark.slow_variants("bias_per_head", "window_and_lengths")
@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("case", ALL)
def test_cudnn(case: Case) -> None:
    check(case, "cudnn", "bfloat16", lse=case.bias is None)


@pytest.mark.slow
@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize(("dtype", "lse"), [("bfloat16", False), ("float16", True)])
def test_cudnn_otherwise(case: Case, dtype: str, lse: bool) -> None:
    check(case, "cudnn", dtype, lse=lse and case.bias is None)


@pytest.mark.slow_variants("False")
@pytest.mark.parametrize("lse", [False, True])
def test_heads_of_a_group_are_rows_of_few_queries(cudnn: Any, lse: bool) -> None:
    """Each key head is read once; lengths count the rows of all heads of a group."""
    case = Case("few", T=5, S=13, G=3, K=2, H=8, h=8,
                key_value_seq_lengths=(11, 3), query_seq_lengths=(5, 2))  # fmt: skip
    check(case, "cudnn", "bfloat16", lse=lse)
    assert {call["T"] for call in cudnn} <= {15, 16}  # even where a gradient is taken
    cudnn.clear()
    causal = replace(case, is_causal=True)
    run = conformance.call(causal, "cudnn", return_lse=lse)
    jax.eval_shape(run, cases.arrays(causal, "bfloat16"))
    assert {call["T"] for call in cudnn} <= {5, 6}


@pytest.mark.slow_variants("lengths*")
@pytest.mark.parametrize("lengths", [None, (20, 3), (17, 18)])
def test_a_chunk_is_two_calls_without_a_gradient(
    cudnn: Any, lengths: tuple[int, int] | None
) -> None:
    """One over the 18 keys before all queries, and a causal one over the 5 of the queries."""
    jit_cache.forget()  # the same call with other lengths is not traced again
    rng = np.random.default_rng(1)
    query, key, value = (
        to_jax(rng.standard_normal((2, size, heads, 8)), jnp.bfloat16)
        for size, heads in ((5, 6), (23, 2), (23, 2))
    )
    mask = Mask.causal(18)
    if lengths is not None:
        counts = to_jax(lengths)
        mask = mask & Mask.lengths(key_value=counts, query=jnp.asarray([5, 4]))

    def attend(implementation: str, *heads: jax.Array) -> jax.Array:
        call: Any = jaxmha.dot_product_attention
        found: jax.Array = call(*heads, mask=mask, implementation=implementation)
        return found

    def gradients(implementation: str, *heads: jax.Array) -> Any:
        """With the output."""

        def total(*heads: jax.Array) -> Any:
            out = attend(implementation, *heads)
            return jnp.sum(out.astype(np.float32) ** 2), out

        return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*heads)

    wide = [x.astype(np.float32) for x in (query, key, value)]
    found = jax.jit(partial(attend, "cudnn"))(query, key, value)
    assert [(call["T"], call["S"]) for call in cudnn] == [(15, 18), (5, 5)]
    exact, out = gradients("reference", *wide)
    assert tolerance.error(found, np.asarray(out)) <= on_device.OUTPUT
    for x, y in zip(gradients("cudnn", query, key, value)[0], exact, strict=True):
        assert tolerance.error(x, np.asarray(y)) <= on_device.GRADIENT


# Operands that leak in the contract, and what its probe finds.
LEAKS = {(): Leaks(), ("value",): Leaks(1, 1), cudnn_contract.ALL: Leaks(1, 2)}


@pytest.mark.everyday(case=["poisoned_causal"])
@pytest.mark.slow_variants("*leaks1")
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
        *("empty_nan_dropout", "empty_mean_dropout"),
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
    arrays = [to_jax(rng.standard_normal(x), jnp.bfloat16) for x in (*shapes, bias)]

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


PACKED: dict[str, dict[str, Any]] = {
    "full": {"T": 13, "K": 2, "offset": None},
    "causal": {"T": 13, "K": 2, "offset": 0},
    "one key head": {"T": 12, "K": 1, "offset": 0},
    "an offset that masks nothing": {"T": 12, "K": 4, "offset": 11},
}


@pytest.mark.everyday(name=["causal"], mapped=[False])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_cudnn_packed(cudnn: Any, name: str, mapped: bool) -> None:
    """Absent sequences, an uncovered rest, odd T; outputs and gradients."""
    T, K, offset = (PACKED[name][x] for x in ("T", "K", "offset"))
    rng = np.random.default_rng(0)
    lengths = np.array([[3, 0, 5, 0], [T, 0, 0, 0], [1, 2, 3, T]], np.int32)
    shapes = ((3, T, n, 8) for n in (4, K, K, 4))
    q, k, v, d = (to_jax(rng.standard_normal(x), jnp.bfloat16) for x in shapes)

    def found(implementation: str, mask: Any) -> Any:
        def value(q: Any, k: Any, v: Any, lengths: Any) -> Any:
            run = partial(
                jaxmha.dot_product_attention,
                mask=mask(lengths) & Mask(causal_offset=offset),
                implementation=implementation,
            )
            out, pull = jax.vjp(run, q, k, v)
            return run(q, k, v), out, pull(d)

        if mapped:
            return jax.jit(jax.vmap(value, in_axes=(0, None, None, None)))(
                jnp.stack([q, 2 * q]), k, v, lengths
            )
        return jax.jit(value)(q, k, v, lengths)

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
        ({"mask": Mask.packed(np.array([[3, 4]]), size=16) & Mask.causal(np.array([4]))}, "Python integer"),
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


@pytest.mark.slow
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


def test_the_private_call_is_as_it_was() -> None:
    """Parts of JAX that `cudnn` uses and that are not public."""
    found = list(inspect.signature(private.dot_product_attention).parameters)
    assert found[:7] == ["query", "key", "value", "bias", "mask", "q_seqlen", "kv_seqlen"]
    assert {"scale", "mask_type", "sliding_window_length", "return_residual"} <= set(found)
    kinds = {"NO_MASK", "PADDING", "CAUSAL", "PADDING_CAUSAL"}
    assert kinds <= {kind.name for kind in private.MaskType}
    assert fused_cudnn.traceable() is None or "cuDNN" in (fused_cudnn.traceable() or "")


@pytest.mark.slow  # values are shown above, and the choice by programs in `test_lowering`
@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("lse", [False, True])
def test_gradients_and_vmap_pass_the_choice(gpu: list[Any], lse: bool) -> None:
    """Nobody named the kernel, and every transformation meets it."""
    x = small()

    def value(q: Any) -> Any:
        found = jaxmha.dot_product_attention(q, x, x, is_causal=True, return_lse=lse)
        return sum(part.astype(jnp.float32).sum() for part in jax.tree.leaves(found))

    def plain(q: Any) -> Any:
        found = jaxmha.dot_product_attention(
            q, x, x, is_causal=True, return_lse=lse, implementation="blocked"
        )
        return sum(part.astype(jnp.float32).sum() for part in jax.tree.leaves(found))

    queries = jnp.stack([x, 2 * x])
    grads = jax.jit(jax.vmap(jax.grad(value)))(queries)
    assert gpu[-1]["T"] == 6
    want = jax.jit(jax.vmap(jax.grad(plain)))(queries)
    largest = float(jnp.abs(want.astype(jnp.float32)).max())
    error = jnp.abs(grads.astype(jnp.float32) - want.astype(jnp.float32)).max()
    assert float(error) <= 2**-7 * largest


@pytest.mark.usefixtures("trusted", "gpu")
@pytest.mark.parametrize("padded", [False, True])
def test_a_gradient_keeps_nothing_of_the_branch_for_other_platforms(*, padded: bool) -> None:
    """Between two programs it keeps what cuDNN reads: the operands, the output and the lse."""
    make: Any = jax.ShapeDtypeStruct
    x = make((2, 128, 4, 64), jnp.bfloat16)
    options: dict[str, Any] = {"key_value_seq_lengths": jnp.asarray([100, 3])} if padded else {}

    def pulled(*heads: Any) -> Any:
        return jax.vjp(lambda *x: jaxmha.dot_product_attention(*x, **options), *heads)

    kept = jax.tree.leaves(jax.eval_shape(pulled, x, x, x))
    assert [leaf.dtype for leaf in kept if leaf.ndim == 4] == [jnp.bfloat16] * 5
    assert sum(leaf.size for leaf in kept if leaf.ndim != 4) <= 2 * (2 * 4 * 128)
