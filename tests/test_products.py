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


@pytest.mark.everyday(dtype=["float32", "bfloat16"])
@pytest.mark.slow_variants("bfloat16*")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_product_accumulates_in_float32(shape: Any, dtype: str) -> None:
    a, b = operands(shape, jnp.dtype(dtype))
    want = np.matmul(a.astype(np.float64), b.astype(np.float64))
    for run in (matmul.matmul, jax.jit(matmul.matmul, static_argnames="dtype")):
        out = np.asarray(
            run(*map(jnp.asarray, (a, b)), dtype=np.dtype(np.float32))
        )  # not on its way: it is fetched
        assert out.dtype == np.float32
        tolerance.assert_close(out, want, f"{shape} {dtype}")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("x64")
def test_product_in_float64(shape: Any) -> None:
    a, b = operands(shape, np.float64)
    tolerance.assert_close(matmul.matmul(jnp.asarray(a), jnp.asarray(b)), a @ b, str(shape))


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


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 1000])
def test_pairwise_sum(size: int) -> None:
    x = np.random.default_rng(size).standard_normal((3, size)).astype(np.float32)
    want = x.astype(np.float64).sum(-1, keepdims=True)
    tolerance.assert_close(matmul.pairwise_sum(jnp.asarray(x)), want)


def test_small_products_are_more_exact_than_a_plain_loop() -> None:
    ours, loop = [], []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        a, b = (rng.standard_normal(s).astype(np.float32) for s in ((17, 509), (509, 13)))
        want = a.astype(np.float64) @ b.astype(np.float64)
        plain = np.zeros((17, 13), np.float32)
        for term in range(509):
            plain += a[:, term, None] * b[None, term]
        ours.append(np.square(np.asarray(matmul.matmul(*map(jnp.asarray, (a, b)))) - want).mean())
        loop.append(np.square(plain - want).mean())
    assert np.sqrt(np.mean(ours)) < np.sqrt(np.mean(loop)) / 2
