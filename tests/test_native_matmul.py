"""Matmuls of projections by the native kernels: values, derivatives, and where they run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.test_util import check_grads
from numpy.typing import NDArray

import jaxmha
from jaxmha import latent
from jaxmha.flax import nnx as ours
from jaxmha.implementations.native import library, matmul
from tests import conformance, drawn, jit_cache, tolerance
from tests.drawn import to_jax

pytestmark = conformance.native_built

# One element; less than a tile; more than one tile, panel and part of the depth; and, on up to two
# threads, rows so few in every matmul that an item packs its own panels; more rows than a cache holds.
SHAPES = (
    (1, 1, 1),
    (7, 5, 3),
    (97, 257, 65),
    (101, 521, 131),
    (149, 211, 523),
    (331, 67, 139),
    (709, 67, 139),
)


@pytest.fixture(autouse=True)
def registered() -> None:
    assert library.unavailable() is None


def arrays(m: int, k: int, n: int, lead: tuple[int, ...] = ()) -> list[Any]:
    rng = np.random.default_rng([m, k, n])
    shapes = ((*lead, m, k), (k, n), (n,))
    return [to_jax(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def wide(x: Any) -> NDArray[np.float64]:
    return np.asarray(x, np.float64)


def exact(x: Any, kernel: Any, bias: Any) -> Any:
    return wide(x) @ wide(kernel) + wide(bias)


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape: tuple[int, int, int]) -> None:
    """The gradients are the matmuls of transposed operands."""
    x, kernel, bias = arrays(*shape)
    dy = np.cos(exact(x, kernel, bias)).astype(np.float32)

    @jax.jit
    def run(dy: Any, *operands: Any) -> Any:
        out, pull = jax.vjp(matmul.affine, *operands)
        return matmul.affine(x, kernel, None), out, *pull(dy)

    plain, out, dx, dkernel, dbias = run(dy, x, kernel, bias)
    tolerance.assert_close(plain, exact(x, kernel, 0))
    tolerance.assert_close(out, exact(x, kernel, bias))
    dy = wide(dy)
    tolerance.assert_close(dx, dy @ wide(kernel).T)
    tolerance.assert_close(dkernel, wide(x).T @ dy)
    tolerance.assert_close(dbias, dy.sum(0))


# From the number of rows: no row, the first third, single rows, the last one, all.
KEPT: dict[str, Callable[[int], Any]] = {
    "none": lambda m: np.zeros(m, bool),
    "third": lambda m: np.arange(m) < m // 3,
    "some": lambda m: np.arange(m) * 7 % 11 < 3,
    "last": lambda m: np.arange(m) == m - 1,
    "all": lambda m: np.ones(m, bool),
}


@jax.jit
def both_orders(affine: Any, x: Any, kernel: Any, dy: Any, z: Any, u: Any) -> Any:
    """Output and gradients, and those of the products of dx with z and of dkernel with u."""

    def products(x: Any, kernel: Any) -> Any:
        out, pull = jax.vjp(affine, x, kernel)
        dx, dkernel = pull(dy)
        return (dx * z).sum() + (dkernel * u).sum(), (out, dx, dkernel)

    second, first = jax.grad(products, (0, 1), has_aux=True)(x, kernel)
    return *first, *second


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_rows_that_are_not_kept_count_as_zeros(shape: tuple[int, int, int]) -> None:
    """NaN in them reaches neither the output nor a gradient, of the first order or the second."""
    given, kernel, bias = map(np.asarray, arrays(*shape))
    u = np.cos(kernel)
    for of_rows in KEPT.values():
        kept = of_rows(shape[0])[:, None]
        x, zeroed = np.where(kept, given, np.float32(np.nan)), np.where(kept, given, 0)
        dy, z = np.cos(exact(zeroed, kernel, bias)).astype(np.float32), np.sin(zeroed)
        affine = bound(kept_affine, kept[:, 0], bias)
        out, dx, dkernel, ddx, ddkernel = both_orders(affine, x, kernel, dy, z, u)
        tolerance.assert_close(out, exact(zeroed, kernel, bias))
        dy = wide(dy)
        tolerance.assert_close(dx, np.where(kept, dy @ wide(kernel).T, 0))
        tolerance.assert_close(dkernel, wide(zeroed).T @ dy)
        tolerance.assert_close(ddx, np.where(kept, dy @ wide(u).T, 0))
        tolerance.assert_close(ddkernel, np.where(kept, wide(z), 0).T @ dy)


bound: Any = jax.tree_util.Partial


def kept_affine(kept: Any, bias: Any, x: Any, kernel: Any) -> Any:
    return matmul.affine(x, kernel, bias, kept)


# Powers of two of every row and column: many, or one each.
FAR: dict[str, tuple[Any, Any]] = {
    "many": (np.arange(331) % 100 - 115, np.arange(139) % 71 + 20),
    "large and small": (125, -125),
    "small": (-56, -56),
    "half as small": (-60, -40),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", FAR)
def test_numbers_far_from_one(kind: str, transposed: bool) -> None:
    """Rows and columns of every order of magnitude keep all their digits."""
    x, kernel, _ = map(wide, arrays(331, 521, 139))
    # No subnormal numbers or products, which XLA takes for 0.
    x, kernel = (np.where(abs(y) < 0.5, 0.5, np.clip(y, -2, 2)) for y in (x, kernel))
    powers = [np.broadcast_to(y, size) for y, size in zip(FAR[kind], (331, 139), strict=True)]
    rows, columns = 2.0 ** powers[0][:, None], 2.0 ** powers[1]
    far, near = (x * rows, kernel * columns), (x, kernel)
    if transposed:
        far, near = ((b.T, a.T) for a, b in (far, near))
        rows, columns = columns[:, None], rows.T
    left, right = (to_jax(y, jnp.float32) for y in far)
    out = matmul.affine(left, right, None)
    tolerance.assert_close(np.float32(wide(out) / (rows * columns)), near[0] @ near[1])


@pytest.mark.parametrize("shape", [(101, 67, 139), (331, 67, 139)])
def test_what_is_not_finite_stays_in_its_row(shape: tuple[int, int, int]) -> None:
    """Other rows have the same bits; a column that is not finite leaves the others as exact."""
    x, kernel, bias = arrays(*shape)
    rows, column = np.array([3, 4, shape[0] - 1]), 5
    odd = x.at[rows, 1].set(jnp.array([np.nan, np.inf, -np.inf]))
    out, found = matmul.affine(x, kernel, bias), matmul.affine(odd, kernel, bias)
    others = np.delete(np.arange(shape[0]), rows)
    np.testing.assert_array_equal(np.asarray(found)[others], np.asarray(out)[others])
    wanted = np.inf * np.sign(np.asarray(kernel)[1]) * np.array([[np.nan], [1], [-1]])
    np.testing.assert_array_equal(np.asarray(found)[rows], wanted)
    found = matmul.affine(x, kernel.at[2, column].set(np.inf), bias)
    assert np.isinf(np.asarray(found)[:, column]).all()
    rest = np.delete(np.arange(shape[2]), column)
    tolerance.assert_close(found[:, rest], np.asarray(exact(x, kernel, bias))[:, rest])


def test_depth_beyond_the_panels_in_memory() -> None:
    """Panels of a part of the depth are packed at a time."""
    x, kernel, bias = arrays(53, 40009, 3)
    tolerance.assert_close(matmul.affine(x, kernel, bias), exact(x, kernel, bias), factor=2)
    _, pull = jax.vjp(matmul.affine, x[:, :3].T, x[:, :5], jnp.zeros(5))
    assert pull(jnp.ones((3, 5)))[0].shape == (3, 53)


def sine(x: Any, kernel: Any, bias: Any) -> Any:
    x, kernel, bias = map(jnp.asarray, (x, kernel, bias))
    return jnp.sin(matmul.affine(x, kernel, bias))


@pytest.mark.slow
def test_derivatives_of_every_mode_and_order() -> None:
    check: Any = check_grads
    check(sine, arrays(5, 7, 3), order=2, modes=("fwd", "rev"), atol=2e-2, rtol=2e-2)


def test_forward_over_reverse() -> None:
    x, kernel, bias = arrays(5, 7, 3)
    hessian = jax.jit(jax.hessian(lambda x: sine(x, kernel, bias)[0, 0]))(x)
    column, y = wide(kernel)[:, 0], exact(x, kernel, bias)[0, 0]
    tolerance.assert_close(hessian[0, :, 0], -np.sin(y) * np.outer(column, column))
    assert (np.asarray(hessian)[1:] == 0).all()


def mapped_gradients(of: Callable[..., Any], around: bool) -> Callable[..., Any]:
    """Gradients of a function of x, kernel and bias, mapped over axis 0 of x and 2 of the kernel.

    `around`: each call has gradients of its own; else they are those of the sum.
    """

    def mapped(f: Callable[..., Any]) -> Callable[..., Any]:
        return jax.vmap(jax.vmap(f, (None, 2, None)), (0, None, None))

    if around:
        return jax.jit(mapped(jax.grad(of, (0, 1, 2))))
    return jax.jit(jax.grad(lambda *arrays: mapped(of)(*arrays).sum(), (0, 1, 2)))


@pytest.mark.parametrize("around", [False, True], ids=["grad of vmap", "vmap of grad"])
def test_vmap_of_one_operand_along_any_axis(around: bool) -> None:
    """The cotangent of an operand that lacks the axis is a sum over it."""
    x, kernel, bias = arrays(11, 13, 5)
    xs, kernels = jnp.stack([x, 2 * x, -x]), jnp.stack([kernel, kernel - 1], 2)

    def found(affine: Callable[..., Any]) -> Any:
        def of(x: Any, kernel: Any, bias: Any) -> Any:
            return jnp.sin(affine(x, kernel, bias)).sum()

        return mapped_gradients(of, around)(xs, kernels, bias)

    in_xla = found(lambda x, kernel, bias: jnp.matmul(x, kernel, precision="highest") + bias[None])
    for a, b in zip(found(matmul.affine), in_xla, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-4)


def test_a_layer_runs_them_unless_they_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    params = drawn.params(num_heads=4, features=128)
    x = jnp.ones((2, 101, 128))

    def calls(**options: Any) -> int:
        jit_cache.forget()
        text = jax.jit(lambda x: jaxmha.multi_head_attention(params, x, **options)).lower(x)
        return text.as_text().count("@jaxmha_cpu_matmul(")

    assert calls() == calls(implementation=["native", "blocked"]) == 4
    assert calls(implementation="blocked") == 0
    monkeypatch.setenv(library.SWITCH, "0")
    assert calls() == 0


def prefilled(x: Any, implementation: str | None) -> Any:
    params = drawn.params(num_heads=4, features=128)
    cache = jaxmha.KVCache.empty(params, len(x), x.shape[1])
    return jaxmha.prefill(params, x, cache, implementation=implementation)


def by_latents(x: Any, implementation: str | None) -> Any:
    return latent.latent_attention(latent_params(), x, implementation=implementation)


def prefilled_latents(x: Any, implementation: str | None) -> Any:
    cache = latent.LatentCache.empty(latent_params(), len(x), x.shape[1])
    return latent.prefill(latent_params(), x, cache, implementation=implementation)


def over_cache_of_flax(x: Any, implementation: str | None) -> Any:
    options: Any = {"rngs": nnx.Rngs(0), "decode": True, "implementation": implementation}
    layer = ours.MultiHeadAttention(4, 128, **options)
    layer.init_cache(x.shape)
    return layer(x)


def latent_params() -> Any:
    sizes: Any = {"latent_dim": 64, "rotary_dim": 64, "head_dim": 32}
    return drawn.latent_params(num_heads=4, features=128, **sizes)


@pytest.mark.parametrize(
    ("layer", "matmuls"),
    [(prefilled, 4), (by_latents, 6), (prefilled_latents, 6), (over_cache_of_flax, 4)],
)
def test_other_layers_run_them_unless_another_implementation_is_named(
    layer: Callable[..., Any], matmuls: int
) -> None:
    def calls(implementation: str | None) -> int:
        jit_cache.forget()
        text = jax.jit(lambda x: layer(x, implementation)).lower(jnp.ones((2, 101, 128))).as_text()
        return text.count("@jaxmha_cpu_matmul(")

    assert calls(None) == matmuls
    assert calls("blocked") == 0


def test_explain_layer_counts_the_calls_of_the_program() -> None:
    def program(T: int, **options: Any) -> tuple[int, int, Any]:
        jit_cache.forget()  # of programs without the kernels
        made = drawn.params(num_heads=4, features=128)._replace(**options)
        x = jnp.ones((2, T, 128))
        text = jax.jit(lambda x: jaxmha.multi_head_attention(made, x)).lower(x).as_text()
        explained = jaxmha.explain_layer(made, x)
        rows = dict(explained.rows())
        assert explained.attention.chosen == "native"
        return text.count("@jaxmha_cpu_matmul("), list(rows.values()).count("native"), rows

    calls, explained, rows = program(101)
    assert (calls, explained, [*rows]) == (4, 4, ["query", "key", "value", "out"])
    calls, explained, rows = program(103, gate=jaxmha.Projection(jnp.ones((128, 4, 32))))
    assert (calls, explained, [*rows]) == (5, 5, ["query", "key", "value", "gate", "out"])
    calls, explained, rows = program(13)
    assert (calls, explained) == (0, 0)
    assert rows["out"] == "XLA: 26 x 128 by 128 x 128 takes XLA less time"


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ((15, 4096, 1024, np.float32), "takes XLA less time"),
        ((47, 4096, 512, np.float32), "takes XLA less time"),
        ((47, 4096, 1024, np.float32), "None"),
        ((64, 8, 8, np.float32), "takes XLA less time"),
        ((512, 512, 512, np.float64), "with AMX, got float64"),
        ((512, 512, 512, np.float32, ("blocked", "reference")), "implementation is"),
    ],
)
def test_the_reason_why_xla_multiplies(sizes: Any, why: str) -> None:
    m, k, n, dtype, *names = sizes
    assert why in str(matmul.unsupported_reason(m, k, n, np.dtype(dtype), *names))


def test_other_platforms_and_exported_programs_multiply_in_xla() -> None:
    x, kernel, bias = arrays(101, 131, 67)
    exported = export.export(jax.jit(matmul.affine), platforms=["cpu", "cuda"])(x, kernel, bias)
    assert "@jaxmha_cpu" not in exported.mlir_module()
    call: Any = exported.call
    tolerance.assert_close(call(x, kernel, bias), exact(x, kernel, bias))


def test_the_handler_refuses_what_does_not_fit() -> None:
    def call(
        *shapes: Any, dtype: Any = np.float32, result: Any = (5, 3), kept: Any = (0,), **flags: bool
    ) -> Any:
        operands = [np.zeros(shape, dtype) for shape in shapes] + [np.zeros(kept, bool)]
        out = jax.ShapeDtypeStruct(result, np.float32)  # type: ignore[no-untyped-call]
        flags = {"a_transposed": False, "b_transposed": False, **flags}
        found = jax.ffi.ffi_call("jaxmha_cpu_matmul", out)(*operands, **flags)
        return jax.block_until_ready(found)  # type: ignore[no-untyped-call]

    call((5, 7), (7, 3), (3,))
    call((7, 5), (3, 7), (0,), a_transposed=True, b_transposed=True)
    call((2, 5, 7), (1, 7, 3), (1, 3), result=(2, 5, 3))
    call((2, 5, 7), (1, 7, 3), (1, 3), result=(2, 5, 3), kept=(2, 5))
    call((7, 5), (7, 3), (3,), kept=(7,), a_transposed=True)
    wrong: list[tuple[Any, dict[str, Any]]] = [
        (((5, 7), (11, 3), (3,)), {}),
        (((5, 7), (7, 3), (5,)), {}),
        (((7,), (7, 3), (3,)), {}),
        (((5, 7), (3,), (3,)), {}),
        (((0, 7), (7, 3), (3,)), {}),
        (((5, 7), (7, 3), (3,)), {"result": (3, 5)}),
        (((5, 7), (7, 3), (3,)), {"a_transposed": True}),
        (((5, 7), (7, 3), (3,)), {"dtype": np.float16}),
        (((2, 5, 7), (3, 7, 3), (1, 3)), {"result": (2, 5, 3)}),
        (((2, 5, 7), (1, 7, 3), (1, 3)), {"result": (5, 3)}),
        (((5, 7), (7, 3), (3,)), {"kept": (7,)}),
        (((7, 5), (7, 3), (3,)), {"kept": (5,), "a_transposed": True}),
        (((7, 5), (3, 7), (3,)), {"kept": (7,), "a_transposed": True, "b_transposed": True}),
    ]
    for shapes, options in wrong:
        with pytest.raises(Exception, match="INVALID_ARGUMENT"):
            call(*shapes, **options)
