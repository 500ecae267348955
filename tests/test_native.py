"""The native CPU kernels as a part of JAX programs, and what happens where there are none."""

import ctypes
import itertools
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxmha
from jaxmha import Mask, implementations
from jaxmha.implementations import Request, SupportQuery
from jaxmha.implementations.native import library, operands, primitives
from jaxmha.implementations.tiled.block_mask import NO_CONDITIONS
from tests import cases, conformance, native_outputs, tolerance
from tests.cases import Case
from tests.drawn import to_jax

ROOT = Path(__file__).parents[1]
built = conformance.native_built
# Every kind of operand, each with a batch axis of its own size.
CASE = Case("native", T=5, S=7, K=2, G=2, H=11, h=3, bias="B1TS", mask="1NTS", is_causal=True,
            key_value_seq_lengths=(6, 5), segments="pair", logits_soft_cap=1.3)  # fmt: skip

FEW = replace(CASE, segments=None, key_value_seq_lengths=None)


def attend(arrays: dict[str, Any], implementation: str = "native") -> Any:
    return conformance.call(CASE, implementation, return_lse=True)(arrays)


def loss(arrays: dict[str, Any], others: dict[str, Any], implementation: str = "native") -> Any:
    out, lse = attend(arrays | others, implementation)
    return (out**2).sum() + jnp.sin(jnp.where(jnp.isfinite(lse), lse, 0.0)).sum()


def stacked(trees: Iterable[Any]) -> Any:
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def named_calls(program: Any) -> int:
    """Calls of the library in a lowered program."""
    return int(program.as_text().count("@jaxmha_cpu_"))


@pytest.mark.slow_variants("query", "key", "mask")
@built
@pytest.mark.parametrize("mapped", ["query", "key", "bias", "mask", "key_value_seq_lengths"])
def test_vmap_of_one_operand_along_any_axis(mapped: str) -> None:
    """The others lack the axis; the gradient of every one of them is a sum over it."""
    stack = [cases.arrays(CASE, seed=seed) for seed in range(3)]
    arrays = dict(stack[0])
    each = np.stack([x[mapped] for x in stack])

    def of(x: Any, implementation: str) -> Any:
        one = arrays | {mapped: x}
        gradient = jax.grad(loss)(*conformance.split(one), implementation)
        return attend(one, implementation), gradient

    alone = jax.jit(partial(of, implementation="reference"))
    want = stacked(map(alone, each))
    for axis in (0, each.ndim - 1):
        moved = np.moveaxis(each, 0, axis)
        found = jax.jit(jax.vmap(partial(of, implementation="native"), axis))(moved)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@built
@pytest.mark.slow_variants("*", "!plain-1")
@pytest.mark.parametrize("inner", [0, 1])
@pytest.mark.parametrize("case", [FEW, CASE], ids=["plain", "everything"])
def test_nested_vmap_of_unlike_axes_and_of_gradients(case: Case, inner: int) -> None:
    """Gradients inside and outside of both maps."""
    arrays = cases.arrays(case)
    queries = np.stack([cases.arrays(case, seed=seed)["query"] for seed in range(3)], inner + 1)
    values = np.stack([cases.arrays(case, seed=seed)["value"] for seed in (5, 6)])

    def one(query: Any, value: Any, implementation: str) -> Any:
        inside, others = conformance.split(arrays | {"query": query, "value": value})
        return jax.value_and_grad(loss)(inside, others, implementation)

    @jax.jit
    def both(queries: Any, values: Any) -> Any:
        each: Any = jax.vmap(lambda q, v: one(q, v, "native"), (inner + 1, None))
        per_value: Any = jax.vmap(each, (None, 0))
        outside = jax.grad(lambda q, v: per_value(q, v)[0].sum(), (0, 1))(queries, values)
        return per_value(queries, values), outside

    # One pair after the other; the gradient of their sum is the sum of theirs.
    alone = jax.jit(partial(one, implementation="reference"))
    each_query = np.moveaxis(queries, inner + 1, 0)
    want = stacked(stacked(alone(q, v) for q in each_query) for v in values)
    outside = np.moveaxis(want[1]["query"].sum(0), 0, inner + 1), want[1]["value"].sum(1)
    found = jax.tree.leaves(both(queries, values))
    for x, y in zip(found, jax.tree.leaves((want, outside)), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=3e-5)


@pytest.mark.slow
@built
def test_second_derivatives() -> None:
    """In reverse and in forward mode over the gradient, of every array."""
    inside, others = conformance.split(cases.arrays(CASE))
    rng = np.random.default_rng(0)
    along = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), inside)

    def seconds(implementation: str) -> Any:
        def gradient(x: Any) -> Any:
            return jax.grad(loss)(x, others, implementation)

        def product(x: Any) -> Any:
            parts = zip(jax.tree.leaves(gradient(x)), jax.tree.leaves(along), strict=True)
            return sum((a * b).sum() for a, b in parts)

        return jax.jit(lambda x: (jax.grad(product)(x), jax.jvp(gradient, (x,), (along,))[1]))(
            inside
        )

    found, want = seconds("native"), seconds("reference")
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.slow_variants("every one")
@built
@pytest.mark.parametrize("full", [(0, 3, 4), range(5)], ids=["few", "every one"])
def test_every_shape_of_bias_has_its_gradient(full: Any) -> None:
    """Sums over the axes of size 1, under vmap as well."""
    arrays = cases.arrays(Case("biases"))
    sizes = (2, 6, 5, 7)
    rng = np.random.default_rng(0)
    biases = [
        rng.standard_normal([n if full else 1 for n, full in zip(sizes, kept, strict=True)])
        for kept in itertools.product((False, True), repeat=4)
        if sum(kept) in full
    ]
    biases = [bias.astype(np.float32) for bias in biases]

    def gradients(implementation: str) -> Any:
        def of(bias: Any) -> Any:
            run = partial(jaxmha.dot_product_attention, implementation=implementation)
            return (run(**arrays, bias=bias) ** 2).sum()

        return jax.vmap(jax.grad(of))

    stacked = [np.stack([x, 2 * x]) for x in biases]
    found = jax.jit(lambda biases: [gradients("native")(x) for x in biases])(stacked)
    whole = jax.jit(gradients("reference"))  # of one bias for every pair, and then their sums
    for x, y in zip(found, stacked, strict=True):
        axes = tuple(n for n in range(1, 5) if y.shape[n] == 1)
        want = np.asarray(whole(np.broadcast_to(y, (2, *sizes)))).sum(axes, keepdims=True)
        np.testing.assert_allclose(x, want, rtol=2e-5, atol=2e-5)  # some are sums that cancel


@built
def test_what_is_not_read_is_not_computed() -> None:
    """The kernel of the bias' gradient runs where that is asked for."""
    inside, others = conformance.split(cases.arrays(CASE))
    bias = {"bias": inside.pop("bias")}
    alone = jax.jit(jax.grad(lambda x: loss(x | bias, others))).lower(inside).compile()
    text = str(alone.as_text())
    assert "bias_gradient" not in text
    assert "attend_backward" in text


@built
def test_exported_programs_run_anywhere() -> None:
    """Nobody has to allow a custom call: the portable kernel is in them."""
    inside, others = conformance.split(cases.arrays(CASE))
    run = jax.jit(jax.value_and_grad(lambda x: loss(x, others)))
    assert named_calls(run.lower(inside)) == 3
    made: Any = export.export(run, platforms=["cpu", "cuda", "tpu"])(inside)
    assert "@jaxmha_cpu_" not in made.mlir_module()
    program: Any = export.deserialize(made.serialize())
    for x, y in zip(*map(jax.tree.leaves, (program.call(inside), run(inside))), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@built
def test_exported_programs_of_vmap() -> None:
    """The portable kernels map over every batch axis."""
    stack = [conformance.split(cases.arrays(FEW, seed=seed))[0] for seed in range(2)]
    others = conformance.split(cases.arrays(FEW))[1]
    inside = stacked(stack) | {"bias": stack[0]["bias"]}
    axes = {"query": 0, "key": 0, "value": 0, "bias": None}
    run = jax.jit(jax.vmap(jax.grad(lambda x: loss(x, others)), (axes,)))
    program: Any = export.export(run)(inside)
    assert "@jaxmha_cpu_" not in program.mlir_module()
    for x, y in zip(*map(jax.tree.leaves, (program.call(inside), run(inside))), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@built
def test_threads_of_python_share_the_kernels() -> None:
    rng = np.random.default_rng(0)
    x = to_jax(rng.standard_normal((1, 200, 4, 32)), jnp.float32)
    run = jax.jit(lambda x: jaxmha.dot_product_attention(x, x, x, implementation="native"))
    want = np.asarray(run(x))
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: np.asarray(run(x)), range(200)))
    for out in found:
        tolerance.assert_same(out, want)


@pytest.mark.slow_variants("1")
@built
@pytest.mark.parametrize("threads", ["1", "64"])
def test_outputs_do_not_depend_on_the_number_of_threads(threads: str, tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    code = f"import numpy, tests.native_outputs as t; numpy.savez({path!r}, *t.windows_and_masks())"
    environment = {**os.environ, "NPROC": threads, "PYTHONPATH": f"{ROOT}:{ROOT}/native"}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, check=True)
    with np.load(tmp_path / "x.npz") as stored:
        for x, y in zip(stored.values(), native_outputs.windows_and_masks(), strict=True):
            np.testing.assert_array_equal(x, y)


@built
def test_results_do_not_depend_on_the_run() -> None:
    rng = np.random.default_rng(0)
    q, k = (to_jax(rng.standard_normal((1, n, 1, 32)), jnp.float32) for n in (700, 300))

    def gradients(q: Any, k: Any) -> Any:
        run = partial(jaxmha.dot_product_attention, implementation="native")
        return jax.grad(lambda q, k: (run(q, k, k) ** 2).sum(), (0, 1))(q, k)

    first, *rest = [jax.jit(gradients)(q, k) for _ in range(10)]
    for found in rest:
        jax.tree.map(tolerance.assert_same, found, first)


# Calls that no program of ours makes: what a handler is given, it checks.
SHAPES: dict[str, tuple[int, ...]] = {
    "query": (2, 5, 4, 8), "key": (2, 7, 2, 8), "value": (2, 7, 2, 3), "bias": (1, 4, 5, 7),
    "allowed": (2, 1, 5, 7), "bits": (2, 1, 1, 7), "rows": (2, 5), "keys": (1, 7), "query_ids": (2, 5),
    "key_ids": (2, 7), "offset": (2,),
}  # fmt: skip
DTYPES: dict[str, Any] = dict.fromkeys(("allowed", "rows", "keys"), np.bool_)
DTYPES |= dict.fromkeys(("query_ids", "key_ids", "offset"), np.int32) | {"bits": np.uint8}


def call(shapes: dict[str, Any], out: Any, statistics: Any, **dtypes: Any) -> Any:
    """The handler of the forward pass with arrays of any shape."""
    struct: Any = jax.ShapeDtypeStruct
    arrays = [
        np.zeros(shape, dtypes.get(name, DTYPES.get(name, np.float32)))
        for name, shape in shapes.items()
    ]
    results = [struct(shape, np.float32) for shape in (out, statistics, statistics)]
    numbers = {"scale": np.float32(1), "rest": np.float32(1), "soft_cap": np.float32(0)}
    bounds = {"below": np.int64(99), "above": np.int64(99), "in_parts": False, "gradient": False}
    found = jax.ffi.ffi_call("jaxmha_cpu_attend", results)(*arrays, **numbers, **bounds)
    return jax.block_until_ready(found)  # type: ignore[no-untyped-call]


@built
def test_the_handler_refuses_what_does_not_fit() -> None:
    assert library.unavailable() is None
    out, rows = (2, 5, 4, 3), (2, 4, 5)
    call(SHAPES, out, rows)
    wrong: list[tuple[str, tuple[int, ...]]] = [
        (name, (*shape[:axis], 13, *shape[axis + 1 :]))
        for name, shape in SHAPES.items()
        for axis in range(len(shape))
    ]
    wrong += [(name, shape[1:]) for name, shape in SHAPES.items()]
    wrong += [(name, (1, 1, *shape)) for name, shape in SHAPES.items()]
    wrong += [("query_ids", (0,)), ("query", (0,)), ("key", (2, 0, 2, 8))]
    results = [((2, 5, 4, 4), rows), (out, (2, 5, 4)), ((2, 6, 4, 3), rows), ((5,), rows)]
    calls = [partial(call, SHAPES | {name: shape}, out, rows) for name, shape in wrong]
    calls += [partial(call, SHAPES, *shapes) for shapes in results]
    calls += [partial(call, SHAPES, out, rows, **{name: np.int8}) for name in SHAPES]
    for refused in calls:
        with pytest.raises(Exception, match="INVALID_ARGUMENT: jaxmha_cpu: "):
            refused()


@pytest.mark.slow
@built
def test_long_rows_with_masks() -> None:
    """Several blocks of keys, and panels of rows of which some are full."""
    rng = np.random.default_rng(0)
    q, k, v = (
        to_jax(rng.standard_normal((2, n, heads, 40)), jnp.float32)
        for n, heads in ((300, 4), (613, 2), (613, 2))
    )
    ids = [np.sort(rng.integers(0, 4, (2, n))).astype(np.int32) for n in (300, 613)]
    masks = [
        Mask.causal(np.asarray([100, 313], np.int32)) & Mask.window(200, None),
        Mask.segments(query_ids=ids[0], key_value_ids=ids[1]),
        Mask.padding(key_value=rng.random((2, 613)) < 0.5, query=rng.random((2, 300)) < 0.9),
        Mask.dense(rng.random((2, 1, 300, 613)) < 0.3) & Mask.lengths(key_value=np.array([5, 400])),
    ]

    def everything(implementation: str) -> Any:
        def of(q: Any, k: Any, v: Any, mask: Mask) -> Any:
            return jaxmha.dot_product_attention(
                q, k, v, mask=mask, return_lse=True, implementation=implementation
            )

        def both(mask: Mask) -> Any:
            (out, lse), pull = jax.vjp(lambda q, k, v: of(q, k, v, mask), q, k, v)
            return out, lse, *pull((out, jnp.where(jnp.isfinite(lse), 0.1, 0.0)))

        return jax.jit(lambda masks: [both(mask) for mask in masks])(masks)

    for found, want in zip(everything("native"), everything("reference"), strict=True):
        for x, y in zip(found, want, strict=True):
            tolerance.assert_close(x, np.asarray(y, np.float64), factor=2)


@built
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("H", [32, 40])
def test_few_queries_over_many_keys(H: int, dtype: str) -> None:
    """Threads share key heads and ranges of keys, of which each head may attend others."""
    rng = np.random.default_rng(0)
    q, k, v = (
        to_jax(rng.standard_normal((1, n, heads, H)), dtype)
        for n, heads in ((3, 10), (829, 5), (829, 5))
    )
    k = k.at[0, 512:, 1].set(jnp.nan).at[0, 100:103, 2:].set(jnp.nan)
    v = v.at[0, 700, 0].set(jnp.inf)
    # By head and query; the last head has a query that attends nothing.
    first = np.asarray([0, 0, 0, 650, 0])[:, None, None]
    end = np.asarray([829, 300, 64, 700, 1])[:, None, None] - np.arange(3)[:, None]
    allowed = (np.arange(829) >= first) & (np.arange(829) < end)
    allowed[0, :, 700] = False  # within a block of keys that are attended
    mask = Mask.dense(np.repeat(allowed, 2, 0)[None])

    def run(implementation: str) -> Any:
        return jaxmha.dot_product_attention(
            q, k, v, mask=mask, return_lse=True, implementation=implementation
        )

    for x, y in zip(run("native"), run("reference"), strict=True):
        tolerance.assert_close(x, np.asarray(y, np.float64), factor=2)


@built
@pytest.mark.slow_variants("types[1347]-1", "types[0256]-131")
@pytest.mark.parametrize("T", [1, 131])
@pytest.mark.parametrize("types", list(itertools.product(("float32", "bfloat16"), repeat=3)))
def test_types_of_operands_may_differ(types: tuple[str, ...], T: int) -> None:
    """Keys of float32 were once read in place, and values of bfloat16 as float32, too."""
    assert library.unavailable() is None
    rng = np.random.default_rng(0)
    q, k, v = (
        to_jax(rng.standard_normal((1, n, 2, 32)), dtype)
        for n, dtype in zip((T, 701, 701), types, strict=True)
    )
    settings = operands.Settings(0.2, None, operands.FAR, operands.FAR, np.dtype(np.float32))
    found, *_ = primitives.attend(settings, operands.problem(q, k, v, None, NO_CONDITIONS))
    wide = [x.astype(np.float32) for x in (q, k, v)]
    want = jaxmha.dot_product_attention(*wide, scale=0.2, implementation="reference")
    np.testing.assert_allclose(found, want, atol=1e-4)


@built
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("threads", [2, 16, 64])
def test_items_for_many_threads(backward: bool, threads: int) -> None:
    """No thread waits long for another: items are few times the threads, or many times."""
    found = ctypes.CDLL(str(ROOT / "native" / "jaxmha_cpu" / "libjaxmha_cpu.so"))
    count: Any = found.jaxmha_cpu_items
    count.argtypes, count.restype = [ctypes.c_int, *[ctypes.c_long] * 6], ctypes.c_long
    for B, T, N, K in ((1, 512, 8, 8), (1, 4096, 8, 8), (1, 2048, 8, 2), (8, 128, 12, 12)):
        items = count(backward, B, T, T, N, K, threads)
        busy = items / (threads * -(-items // threads))
        assert busy >= 0.75, (B, T, N, K, items)


@pytest.mark.slow_variants("*", "!dtypes1-40")
@pytest.mark.parametrize("T", [3, 40])
@pytest.mark.parametrize("dtypes", [("float32", "float32", "bfloat16"), ("bfloat16", "float32")])
def test_heads_of_several_dtypes(T: int, dtypes: tuple[str, ...]) -> None:
    """Calls promote them. A request that was not promoted would be read beyond its end."""
    rng = np.random.default_rng(0)
    sizes, dtypes = ((2, T, 4, 16), (2, 70, 2, 16), (2, 70, 2, 16)), (*dtypes, dtypes[-1])
    heads = [to_jax(rng.standard_normal(x), y) for x, y in zip(sizes, dtypes, strict=False)]
    want = jaxmha.dot_product_attention(*heads, implementation="reference")
    if not conformance.ABSENT:
        found = jaxmha.dot_product_attention(*heads, implementation="native")
        tolerance.assert_close(found, np.asarray(want, np.float64))
    asked = SupportQuery()

    def unpromoted(query: Any, key: Any, value: Any) -> Any:
        request = Request(query, key, value, None, Mask(), jaxmha.Semantics(), None, False)
        return implementations.attend(request, asked).out

    jax.eval_shape(unpromoted, *heads)
    reasons = dict(asked.reasons)
    assert "must have one dtype, got" in (reasons["native"] or "")
    assert reasons["reference"] is None
