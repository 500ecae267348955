"""Matmuls of bfloat16 by the native kernels. Without AMX they are those of float32, which no layer
asks for, but a cached program may."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxmha
from jaxmha.implementations.native import library, matmul
from tests import conformance, drawn, native_outputs, tolerance
from tests.drawn import to_jax
from tests.test_native_matmul import (
    KEPT,
    both_orders,
    bound,
    exact,
    kept_affine,
    mapped_gradients,
    wide,
)
from tests.test_native_matmul import arrays as arrays_of_float32

pytestmark = conformance.native_built
ROOT = Path(__file__).resolve().parents[1]
# One element; less than a tile; more than one tile; more columns than depth. Of the last three, one
# matmul or more has an operand a that is no longer packed at once, in one part of the depth or more.
SHAPES = (
    (1, 1, 1),
    (7, 5, 3),
    (97, 257, 65),
    (149, 211, 523),
    (1061, 523, 67),
    (1061, 67, 523),
    (2503, 241, 37),
)
DTYPES = pytest.mark.parametrize("rounded", [False, True], ids=["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def registered() -> None:
    assert library.unavailable() is None


def arrays(m: int, k: int, n: int) -> list[Any]:
    return [to_jax(x, jnp.bfloat16) for x in arrays_of_float32(m, k, n)]


def cotangent(out: Any) -> Any:
    return jnp.cos(out.astype(np.float32)).astype(out.dtype)


@DTYPES
@pytest.mark.slow_variants("*-float32", "!shape[246]-*", "shape5-*")
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape: tuple[int, int, int], rounded: bool) -> None:
    """The error of a float32 is that of sums of exact products."""
    x, kernel, bias = arrays(*shape)
    affine = partial(matmul.affine, rounded=rounded)
    drawn = np.cos(exact(x, kernel, bias)).astype(jnp.bfloat16 if rounded else np.float32)

    @jax.jit
    def run(dy: Any, *operands: Any) -> Any:
        out, pull = jax.vjp(affine, *operands)
        return affine(x, kernel, None), out, *pull(dy)

    plain, out, dx, dkernel, dbias = run(drawn, x, kernel, bias)
    tolerance.assert_close(plain, exact(x, kernel, 0))
    assert out.dtype == drawn.dtype
    tolerance.assert_close(out, exact(x, kernel, bias))
    dy = wide(drawn)
    assert dx.dtype == dkernel.dtype == dbias.dtype == jnp.bfloat16
    tolerance.assert_close(dx, dy @ wide(kernel).T)
    tolerance.assert_close(dkernel, wide(x).T @ dy)
    tolerance.assert_close(dbias, dy.sum(0))


def test_the_sum_with_the_bias_is_rounded_once_to_the_nearest() -> None:
    x, kernel, bias = arrays(331, 67, 139)
    x = x.at[3, 5].set(jnp.nan).at[7, 5].set(jnp.inf)
    out = matmul.affine(x, kernel, bias, rounded=True)
    tolerance.assert_same(out, matmul.affine(x, kernel, bias).astype(jnp.bfloat16))
    halves = jnp.asarray([[1 + 2**-8], [1 + 3 * 2**-8]], np.float32)  # ties, as sums of two
    ties = jnp.asarray([[1, 2**-8], [1, 3 * 2**-8]], jnp.bfloat16)
    found = matmul.affine(ties, jnp.ones((2, 1), jnp.bfloat16), None, rounded=True)
    tolerance.assert_same(found, halves.astype(jnp.bfloat16))


def test_the_gradient_of_a_bias_is_summed_in_float32() -> None:
    """In bfloat16, 256 + 1 is 256."""
    x, kernel, bias = arrays(1061, 5, 3)
    _, pull = jax.vjp(partial(matmul.affine, rounded=True), x, kernel, bias)
    dbias = pull(jnp.ones((1061, 3), jnp.bfloat16))[2]
    tolerance.assert_close(dbias, np.full(3, 1061.0))


def test_a_cotangent_in_float32_keeps_its_digits() -> None:
    """300 times 1.0035 is 301.05, so 302 in bfloat16; 300 times 1 is 300."""
    x, kernel = jnp.ones((300, 5), jnp.bfloat16), jnp.ones((5, 300), jnp.bfloat16)
    _, pull = jax.vjp(lambda x, kernel: matmul.affine(x, kernel, None), x, kernel)
    for gradient in pull(jnp.full((300, 300), 1 + 0.9 * 2**-8, np.float32)):
        assert (wide(gradient) == 302).all()


@DTYPES
@pytest.mark.slow_variants("shape[02]-float32", "shape0-bfloat16")
@pytest.mark.parametrize("shape", [(7, 5, 3), (149, 211, 67), (1061, 523, 67)])
def test_rows_that_are_not_kept_count_as_zeros(shape: tuple[int, int, int], rounded: bool) -> None:
    """NaN in them reaches neither the output nor a gradient, of the first order or the second, nor
    does an infinite column reach their output."""
    given, kernel, bias = map(np.asarray, arrays(*shape))
    half = np.dtype(jnp.bfloat16)
    u, infinite = np.cos(wide(kernel)).astype(half), kernel.copy()
    infinite[0, 1] = np.inf
    for of_rows in KEPT.values():
        kept = of_rows(shape[0])[:, None]
        x, zeroed = np.where(kept, given, half.type(np.nan)), np.where(kept, given, half.type(0))
        z = np.sin(wide(zeroed)).astype(half)
        drawn = np.cos(exact(zeroed, kernel, bias)).astype(half if rounded else np.float32)
        affine = bound(kept_rounded if rounded else kept_affine, to_jax(kept[:, 0]), bias)
        out, dx, dkernel, ddx, ddkernel = both_orders(affine, x, kernel, drawn, z, u)
        tolerance.assert_close(out, exact(zeroed, kernel, bias))
        dy = wide(drawn)
        tolerance.assert_close(dx, np.where(kept, dy @ wide(kernel).T, 0))
        tolerance.assert_close(dkernel, wide(zeroed).T @ dy)
        tolerance.assert_close(ddx, np.where(kept, dy @ wide(u).T, 0))
        tolerance.assert_close(ddkernel, np.where(kept, wide(z), 0).T @ dy)
        spoiled = both_orders(affine, x, infinite, drawn, z, u)[0]
        np.testing.assert_array_equal(wide(spoiled)[~kept[:, 0], 1], wide(bias)[1])


def kept_rounded(kept: Any, bias: Any, x: Any, kernel: Any) -> Any:
    return matmul.affine(x, kernel, bias, kept, rounded=True)


@DTYPES
def test_derivatives_forward_and_of_derivatives(rounded: bool) -> None:
    x, kernel, bias = arrays(149, 211, 67)
    z, u, w = (cotangent(3 * y) for y in (x, kernel, bias))
    affine = partial(matmul.affine, rounded=rounded)
    out, tangent = jax.jit(partial(jax.jvp, affine))((x, kernel, bias), (z, u, w))
    # Each of the three tangents is rounded, and so are their sums.
    expected = exact(z, kernel, w) + wide(x) @ wide(u)
    tolerance.assert_close(tangent, expected, factor=2)
    dy = cotangent(out)

    def gradients(x: Any, kernel: Any) -> Any:
        return jax.vjp(affine, x, kernel, bias)[1](dy)[:2]

    _, (ddx, ddkernel) = jax.jit(partial(jax.jvp, gradients))((x, kernel), (z, u))
    tolerance.assert_close(ddx, wide(dy) @ wide(u).T)
    tolerance.assert_close(ddkernel, wide(z).T @ wide(dy))


@pytest.mark.parametrize("shape", [(101, 67, 139), (1061, 523, 67)])
def test_what_is_not_finite_stays_in_its_row_and_column(shape: tuple[int, int, int]) -> None:
    x, kernel, bias = arrays(*shape)
    rows = np.array([3, 4, shape[0] - 1])
    odd = x.at[rows, 1].set(jnp.array([np.nan, np.inf, -np.inf], jnp.bfloat16))
    out, found = matmul.affine(x, kernel, bias), matmul.affine(odd, kernel, bias)
    others = np.delete(np.arange(shape[0]), rows)
    np.testing.assert_array_equal(np.asarray(found)[others], np.asarray(out)[others])
    wanted = np.inf * np.sign(wide(kernel)[1]) * np.array([[np.nan], [1], [-1]])
    np.testing.assert_array_equal(np.asarray(found)[rows], wanted)
    tolerance.assert_same(
        matmul.affine(odd, kernel, bias, rounded=True), found.astype(jnp.bfloat16)
    )
    found = matmul.affine(x, kernel.at[2, 5].set(np.inf), bias)
    assert np.isinf(np.asarray(found)[:, 5]).all()
    rest = np.delete(np.arange(shape[2]), 5)
    np.testing.assert_array_equal(np.asarray(found)[:, rest], np.asarray(out)[:, rest])


@DTYPES
@pytest.mark.slow_variants("grad of vmap-float32", "vmap of grad-bfloat16")
@pytest.mark.parametrize("around", [False, True], ids=["grad of vmap", "vmap of grad"])
def test_vmap_of_one_operand_along_any_axis(around: bool, rounded: bool) -> None:
    """The cotangent of an operand that lacks the axis is a sum over it, which is rounded once."""
    x, kernel, bias = arrays(11, 13, 5)
    xs, kernels = jnp.stack([x, 2 * x, -x]), jnp.stack([kernel, kernel - 1], 2)
    weights = cotangent(x[:, :5])  # and so are all cotangents of results

    def found(affine: Callable[..., Any], *operands: Any) -> Any:
        def of(x: Any, kernel: Any, bias: Any) -> Any:
            out = affine(x, kernel, bias)
            return (out * weights.astype(out.dtype)).sum()

        return mapped_gradients(of, around)(*operands)

    operands = xs, kernels, bias
    in_float32 = found(
        lambda x, kernel, bias: jnp.matmul(x, kernel, precision="highest") + bias[None],
        *(y.astype(np.float32) for y in operands),
    )
    native = found(partial(matmul.affine, rounded=rounded), *operands)
    for a, b in zip(native, in_float32, strict=True):
        assert a.dtype == jnp.bfloat16
        tolerance.assert_close(a, wide(b), factor=0.5)


@DTYPES
def test_other_platforms_and_exported_programs_multiply_in_xla(rounded: bool) -> None:
    x, kernel, bias = arrays(101, 131, 67)
    affine = jax.jit(partial(matmul.affine, rounded=rounded))
    exported = export.export(affine, platforms=["cpu", "cuda"])(x, kernel, bias)
    assert "@jaxmha_cpu" not in exported.mlir_module()
    call: Any = exported.call
    found = call(x, kernel, bias)
    assert found.dtype == (jnp.bfloat16 if rounded else np.float32)
    tolerance.assert_close(found, exact(x, kernel, bias), factor=0.5)  # rounded once


def test_a_program_of_a_cpu_with_amx_runs_on_one_without() -> None:
    code = "import json, tests.native_outputs as t; print(json.dumps(t.rounded_matmul()))"
    if library.isa() not in ("amx", "avx512"):
        pytest.skip("the tests above ran on the kernels of float32")
    environment = {**os.environ, "JAXMHA_NATIVE": "avx2", "PYTHONPATH": f"{ROOT}:{ROOT}/native"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    isa, out, reason = json.loads(done.stdout.splitlines()[-1])
    assert isa == "avx2"
    assert reason == "native matmuls take bfloat16 with AMX, not with avx2"
    own = np.asarray(native_outputs.rounded_matmul()[1])
    # Sums of another order may be rounded to the next number.
    tolerance.assert_close(np.asarray(out).astype(jnp.bfloat16), own)
    assert (np.asarray(out) == own).mean() > 0.98


@pytest.mark.parametrize(("options", "of_bfloat16"), [({}, 4), ({"qk_norm": "rms"}, 2)])
def test_a_layer_runs_them_with_amx(options: dict[str, Any], of_bfloat16: int) -> None:
    """Queries and keys that are normalised stay float32 till then."""
    if library.isa() != "amx":
        pytest.skip("this CPU has no AMX")
    made = drawn.params(num_heads=4, features=256)
    if options:
        made = made._replace(query_norm=jnp.ones(64), key_norm=jnp.ones(64))
    params = jax.tree.map(lambda y: y.astype(jnp.bfloat16), made)
    x = jax.random.normal(jax.random.key(1), (2, 151, 256)).astype(jnp.bfloat16)
    semantics = jaxmha.Semantics(**options)
    layer = jax.jit(partial(jaxmha.multi_head_attention, semantics=semantics))
    calls = [y for y in layer.lower(params, x).as_text().splitlines() if "_cpu_matmul(" in y]
    assert len(calls) == 4
    results = [y.rpartition("->")[2] for y in calls]
    assert sum("xbf16>" in y for y in results) == of_bfloat16
    explained = dict(jaxmha.explain_layer(params, x, semantics=semantics).rows())
    assert [*explained.values()] == ["native"] * 4
    in_float32 = jax.tree.map(lambda y: y.astype(np.float32), (params, x))
    expected = jaxmha.multi_head_attention(*in_float32, semantics=semantics)
    tolerance.assert_close(layer(params, x), wide(expected), factor=tolerance.LAYER)


def test_the_handler_refuses_what_does_not_fit() -> None:
    half, single = np.dtype(jnp.bfloat16), np.dtype(np.float32)

    def call(a: Any, b: Any, bias: Any, y: Any) -> Any:
        shapes = ((5, 7), (7, 3), (3,))
        operands = [np.zeros(s, t) for s, t in zip(shapes, (a, b, bias), strict=True)]
        out = jax.ShapeDtypeStruct((5, 3), y)  # type: ignore[no-untyped-call]
        flags = {"a_transposed": False, "b_transposed": False}
        found = jax.ffi.ffi_call("jaxmha_cpu_matmul", out)(*operands, np.zeros(0, bool), **flags)
        return jax.block_until_ready(found)  # type: ignore[no-untyped-call]

    call(half, half, half, half)
    call(half, half, half, single)
    wrong = (half, single, half, half), (single, half, half, half), (half, half, single, half)
    for dtypes in (*wrong, (half, half, half, np.float16), (single, single, single, half)):
        with pytest.raises(Exception, match="INVALID_ARGUMENT"):
            call(*dtypes)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ((512, 512, 512, np.float16), "bfloat16 with AMX, got float16"),
        ((15, 512, 256, jnp.bfloat16), "takes XLA less time"),
        ((63, 2048, 1024, jnp.bfloat16), "takes XLA less time"),
        ((64, 128, 127, jnp.bfloat16), "takes XLA less time"),
    ],
)
def test_the_reason_why_xla_multiplies(sizes: Any, why: str) -> None:
    m, k, n, dtype = sizes
    assert why in str(matmul.unsupported_reason(m, k, n, np.dtype(dtype)))
    own = matmul.unsupported_reason(m + 1, k, 2 * n, np.dtype(dtype))
    assert (own is None) == (dtype == jnp.bfloat16 and library.isa() == "amx")
