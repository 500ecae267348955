"""Matrix products and sums: right for every dtype and size, and no less exact than they claim."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmha import matmul
from tests import tolerance

OPTIMISED = True  # compiled as users compile it

# Below and above the size up to which sums are joined pairwise; one term; no term; batches.
SHAPES = (
    ((), 5, 7, 11),
    ((3,), 5, 1, 2),
    ((2, 3), 2, 13, 5),
    ((), 3, 0, 5),
    ((), 97, 101, 103),
    ((2,), 0, 7, 3),
)


def operands(shape: Any, dtype: Any) -> tuple[Any, Any]:
    lead, m, k, n = shape
    rng = np.random.default_rng([*lead, m, k, n])
    return (
        rng.standard_normal((*lead, m, k)).astype(dtype),
        rng.standard_normal((*lead, k, n)).astype(dtype),
    )


def products(dtype: Any, accumulated: Any) -> None:
    """Every shape, in one program: compiling one for each takes far longer."""
    pairs = [operands(shape, jnp.dtype(dtype)) for shape in SHAPES]
    run = jax.jit(lambda pairs: [matmul.matmul(a, b, dtype=accumulated) for a, b in pairs])
    for shape, (a, b), out in zip(SHAPES, pairs, run(pairs), strict=True):
        assert out.dtype == accumulated
        want = np.matmul(a.astype(np.float64), b.astype(np.float64))
        tolerance.assert_close(out, want, f"{shape} {dtype}")


@pytest.mark.everyday(dtype=["bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_product_accumulates_in_float32(dtype: str) -> None:
    products(dtype, np.dtype(np.float32))


@pytest.mark.usefixtures("x64")
def test_product_in_float64() -> None:
    products("float64", np.dtype(np.float64))


def test_float32_stays_float32_on_every_platform() -> None:
    """Lowered for a GPU, where the default would be TF32; configuration and argument prevail."""

    def precisions(**options: Any) -> set[str]:
        shape: Any = jax.eval_shape(lambda: jnp.zeros((512, 512), np.float32))
        call = jax.jit(lambda a, b: matmul.matmul(a, b, **options))
        text = call.trace(shape, shape).lower(lowering_platforms=("cuda",)).as_text()
        return {word for word in ("HIGHEST", "HIGH,", "DEFAULT") if word in text}

    with jax.default_matmul_precision(None):
        assert precisions() == {"HIGHEST"}
        assert precisions(precision="default") == {"DEFAULT"}
    with jax.default_matmul_precision("default"):
        assert precisions() == {"DEFAULT"}


def test_pairwise_sum() -> None:
    rng = np.random.default_rng(0)
    terms = [rng.standard_normal((3, size)).astype(np.float32) for size in (0, 1, 2, 3, 7, 1000)]
    found = jax.jit(lambda terms: [matmul.pairwise_sum(x) for x in terms])(terms)
    for x, out in zip(terms, found, strict=True):
        tolerance.assert_close(out, x.astype(np.float64).sum(-1, keepdims=True), str(x.shape))


def test_small_products_are_more_exact_than_a_plain_loop() -> None:
    ours, loop, run = [], [], jax.jit(matmul.matmul)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        a, b = (rng.standard_normal(s).astype(np.float32) for s in ((17, 509), (509, 13)))
        want = a.astype(np.float64) @ b.astype(np.float64)
        plain = np.zeros((17, 13), np.float32)
        for term in range(509):
            plain += a[:, term, None] * b[None, term]
        ours.append(np.square(np.asarray(run(a, b)) - want).mean())
        loop.append(np.square(plain - want).mean())
    assert np.sqrt(np.mean(ours)) < np.sqrt(np.mean(loop)) / 2
