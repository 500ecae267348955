"""Programs for platforms that are not here: what they hold, and what they do not."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as private

import jaxmha
from jaxmha import Mask
from tests import drawn
from tests.cases import shaped

# No axis of anything else is of these sizes.
B, T, S, N, K, H = 2, 896, 1408, 4, 2, 64
CUDNN, CUDNN_BACKWARD, TPU = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward", "tpu_custom_call"


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX asks for the version of a library that only a GPU brings; nothing else is replaced."""
    monkeypatch.setattr(private, "check_cudnn_version", lambda: 91900)


HEADS = shaped(B, T, N, H), shaped(B, S, K, H), shaped(B, S, K, H)
COUNTS, VALID = shaped(B, dtype=jnp.int32), shaped(B, S, dtype=jnp.bool_)

CALLS: dict[str, Any] = {
    "full": lambda q, k, v, *_, **o: jaxmha.dot_product_attention(q, k, v, **o),
    "causal": lambda q, k, v, *_, **o: jaxmha.dot_product_attention(q, k, v, is_causal=True, **o),
    "lengths": lambda q, k, v, counts, _, **o: jaxmha.dot_product_attention(
        q, k, v, key_value_seq_lengths=counts, **o
    ),
    "padding": lambda q, k, v, _, valid, **o: jaxmha.dot_product_attention(
        q, k, v, mask=Mask.padding(key_value=valid), **o
    ),
    "padding causal": lambda q, k, v, _, valid, **o: jaxmha.dot_product_attention(
        q, k, v, mask=Mask.padding(key_value=valid), is_causal=True, **o
    ),
    "window": lambda q, k, v, counts, _, **o: jaxmha.dot_product_attention(
        q, k, v, key_value_seq_lengths=counts, local_window_size=(100, 3), **o
    ),
}


def lowered(function: Any, *arguments: Any, platform: str) -> str:
    return str(jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text())


def no_scores(text: str) -> bool:
    """True if no tensor of the program has an axis of (about) T and one of S, or S twice."""
    for shape in re.findall(r"tensor<([0-9x]+)x[a-z]", text):
        sizes = [int(size) for size in shape.split("x") if size]
        long = [size for size in sizes if size >= T]
        if len(long) > 1:
            return False
    return True


def gradient(call: Any, **options: Any) -> Any:
    def of(q: Any, k: Any, v: Any, *others: Any) -> Any:
        def value(*heads: Any) -> Any:
            found = call(*heads, *others, **options)
            return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(found))

        return jax.grad(value, (0, 1, 2))(q, k, v)

    return of


@pytest.mark.everyday(name=["padding causal"])
@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("name", CALLS)
def test_cudnn(name: str) -> None:
    with jaxmha.lowering_for("h200"):
        text = lowered(CALLS[name], *HEADS, COUNTS, VALID, platform="cuda")
        grads = lowered(gradient(CALLS[name]), *HEADS, COUNTS, VALID, platform="cuda")
    assert CUDNN in text
    assert CUDNN_BACKWARD in grads
    assert no_scores(text)
    assert no_scores(grads)
    # Padding that causality or a window leaves in place is a feature more, never a bias.
    assert "ScaleBias" not in text


@pytest.mark.usefixtures("cudnn")
def test_cudnn_log_sum_exp_has_its_gradient() -> None:
    """Two kernels backward: its own, and that of lse."""
    with jaxmha.lowering_for("h200"):
        text = lowered(
            gradient(CALLS["causal"], return_lse=True), *HEADS, COUNTS, VALID, platform="cuda"
        )
    assert text.count(CUDNN_BACKWARD) == 2
    assert no_scores(text)


@pytest.mark.usefixtures("cudnn")
def test_layer() -> None:
    params = drawn.params(num_heads=N, features=N * H, dtype=jnp.bfloat16)

    def layer(x: Any, counts: Any) -> Any:
        mask = Mask.lengths(key_value=counts)
        return jaxmha.multi_head_attention(params, x, mask=mask, is_causal=True)

    with jaxmha.lowering_for("h200"):
        text = lowered(layer, shaped(B, T, N * H), COUNTS, platform="cuda")
    assert CUDNN in text
    assert no_scores(text)


@pytest.mark.everyday(name=["window"])
@pytest.mark.parametrize("name", CALLS)
def test_splash(name: str) -> None:
    with jaxmha.lowering_for("tpu"):
        text = lowered(
            lambda *x: CALLS[name](*x, implementation="splash"),
            *HEADS, COUNTS, VALID, platform="tpu",
        )  # fmt: skip
        grads = lowered(
            gradient(CALLS[name], implementation="splash"), *HEADS, COUNTS, VALID, platform="tpu"
        )
    assert TPU in text
    assert grads.count(TPU) >= 3  # forward, and a kernel each for queries and for keys
    assert no_scores(text)
    assert no_scores(grads)


@pytest.mark.usefixtures("cudnn")
def test_another_platform_gets_plain_xla() -> None:
    """The choice while tracing does not matter: the platform is known later."""
    with jaxmha.lowering_for("h200"):
        text = lowered(CALLS["causal"], *HEADS, COUNTS, VALID, platform="cpu")
    assert "custom_call" not in text
    assert "while" in text  # block by block
    assert "custom_call" not in lowered(CALLS["causal"], *HEADS, COUNTS, VALID, platform="cuda")
    with jaxmha.lowering_for("tpu"):
        assert TPU in lowered(CALLS["causal"], *HEADS, COUNTS, VALID, platform="tpu")
        assert TPU not in lowered(CALLS["causal"], *HEADS, COUNTS, VALID, platform="cpu")


DOT = re.compile(
    r"dot_general .*precision = \[(\w+), \w+\] : \(tensor<\w+x(\w+)>, tensor<\w+x(\w+)>\) -> tensor<\w+x(\w+)>"
)


@pytest.mark.parametrize(
    ("platform", "dtype", "options", "configured", "operands", "precision"),
    [
        ("cuda", "bfloat16", {"dropout_rate": 0.1}, None, "bf16", "DEFAULT"),
        ("tpu", "bfloat16", {}, None, "bf16", "DEFAULT"),
        ("tpu", "bfloat16", {"precision": "high"}, None, "f32", "HIGH"),
        ("tpu", "bfloat16", {}, "high", "f32", "HIGH"),
        ("cuda", "float16", {}, None, "f32", "HIGH"),
        ("cuda", "float16", {"precision": "highest"}, None, "f32", "HIGHEST"),
        ("tpu", "float32", {}, None, "f32", "HIGHEST"),
        ("cpu", "bfloat16", {}, None, "f32", "HIGHEST"),
        ("cpu", "float16", {}, None, "f32", "HIGHEST"),
    ],
)
def test_products_are_of_what_devices_multiply(
    platform: str,
    dtype: str,
    options: dict[str, Any],
    configured: Any,
    operands: str,
    precision: str,
) -> None:
    """Forward and backward; sums are float32. The sums of gradient times output are not a product."""
    key = jax.random.key(0) if "dropout_rate" in options else None
    heads = shaped(1, T, 2, H, dtype=dtype)

    def attend(*heads: Any) -> Any:
        return jaxmha.dot_product_attention(
            *heads, **options, dropout_key=key, implementation="blocked"
        )

    with jaxmha.lowering_for(platform), jax.default_matmul_precision(configured):
        text = lowered(gradient(attend), heads, heads, heads, platform=platform)
    found = [kinds for kinds in DOT.findall(text) if kinds[0] in (precision, "HIGH", "DEFAULT")]
    assert len(found) >= 5
    assert set(found) == {(precision, operands, operands, "f32")}


@pytest.mark.parametrize(("dtype", "widened"), [("bfloat16", False), ("float16", True)])
def test_a_cache_of_bfloat16_is_read_as_it_lies(
    dtype: str, widened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXMHA_PROBE", "0")  # by XLA: cuDNN takes both as they lie
    params = drawn.params(num_heads=N, features=N * H, dtype=dtype)
    cache = jax.eval_shape(lambda: jaxmha.KVCache.empty(params, B, S))

    with jaxmha.lowering_for("cuda"), jax.default_matmul_precision(None):
        text = lowered(
            lambda x, cache: jaxmha.decode_step(params, x, cache),
            shaped(B, 1, N * H, dtype=dtype), cache, platform="cuda",
        )  # fmt: skip
    assert (f"tensor<{B}x{N}x{S}x{H}xf32>" in text) == widened


def test_one_row_is_multiplied_as_two() -> None:
    """XLA:GPU would write every product of a row and a kernel of weights."""
    params = drawn.params(num_heads=3, features=21, dtype=jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (1, 1, 21), jnp.bfloat16)
    with jaxmha.lowering_for("cuda"):
        assert "tensor<2x21xbf16>" in lowered(jaxmha.project, params, x, platform="cuda")
        found = jaxmha.project(params, x)
    for one, other in zip(found, jaxmha.project(params, x), strict=True):
        assert one.shape == other.shape
        assert jnp.abs(one - other).max() <= 2**-7 * jnp.abs(other).max()


@pytest.mark.usefixtures("cudnn")
def test_xla_does_not_reduce_a_constant_mask() -> None:
    """At compile time that took 38 s of 2048 x 2048 pairs, for an H100."""
    dense = Mask.dense(np.tri(T, S, dtype=bool))
    with jaxmha.lowering_for("h200"):
        text = lowered(lambda *x: CALLS["full"](*x, mask=dense), *HEADS, platform="cuda")
    assert f"stablehlo.optimization_barrier %1 : tensor<1x1x{T}x{S}xi1>" in text


def test_materialised_scores_are_noticed() -> None:
    text = lowered(
        lambda *x: CALLS["full"](*x, implementation="reference"), *HEADS, COUNTS, VALID,
        platform="cuda",
    )  # fmt: skip
    assert not no_scores(text)


def value_of_lengths(q: Any, k: Any, v: Any, counts: Any) -> Any:
    out = jaxmha.dot_product_attention(q, k, v, key_value_seq_lengths=counts)
    return out.astype(jnp.float32).sum()


def with_bias(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return jaxmha.dot_product_attention(q, k, v, bias).astype(jnp.float32).sum()


BIAS = shaped(1, N, T, S)
TRANSFORMED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "vmap(grad)": (
        jax.vmap(jax.grad(value_of_lengths, (0, 1, 2))),
        tuple(shaped(3, *x.shape, dtype=x.dtype) for x in (*HEADS, COUNTS)),
    ),
    "vmap of one": (
        jax.vmap(CALLS["lengths"], in_axes=(0, None, None, None, None)),
        (shaped(3, *HEADS[0].shape), *HEADS[1:], COUNTS, VALID),
    ),
    "vmap of lengths": (
        jax.vmap(jax.grad(value_of_lengths, (0, 1, 2)), in_axes=(None, None, None, 0)),
        (*HEADS, shaped(3, B, dtype=jnp.int32)),
    ),
    "vmap of another axis": (
        jax.vmap(jax.grad(value_of_lengths, (0, 1, 2)), in_axes=(2, None, 4, None)),
        (shaped(B, T, 3, N, H), HEADS[1], shaped(B, S, K, H, 3), COUNTS),
    ),
    "twice": (
        jax.vmap(jax.vmap(CALLS["full"], in_axes=(0, None, None, None, None)),
                 in_axes=(None, 0, None, None, None)),
        (shaped(3, *HEADS[0].shape), shaped(5, *HEADS[1].shape), HEADS[2], COUNTS, VALID),
    ),
    "grad(vmap)": (
        jax.grad(lambda *x: jax.vmap(value_of_lengths, in_axes=(0, None, None, None))(*x).sum(),
                 (0, 1, 2)),
        (shaped(3, *HEADS[0].shape), *HEADS[1:], COUNTS),
    ),
    "jacobian": (
        jax.jacobian(lambda q, *x: CALLS["lengths"](q, *x)[0, 0, 0, :3]),
        (*HEADS, COUNTS, VALID),
    ),
    "vmap(grad), one bias": (
        jax.vmap(jax.grad(with_bias, (0, 1, 2, 3)), in_axes=(0, None, None, None)),
        (shaped(3, *HEADS[0].shape), *HEADS[1:], BIAS),
    ),
}  # fmt: skip


@pytest.mark.everyday(name=["vmap(grad), one bias"])
@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("name", TRANSFORMED)
def test_cudnn_under_transformations(name: str) -> None:
    """One call each way, whatever is mapped: JAX 0.10 itself needs every operand mapped."""
    function, arguments = TRANSFORMED[name]
    with jaxmha.lowering_for("h200"):
        text = lowered(function, *arguments, platform="cuda")
    both = name not in ("vmap of one", "twice")
    assert text.count("custom_call @__cudnn$fmha") == 1 + both
