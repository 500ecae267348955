"""JAX's TPU kernel for pages: interpreted, and the cache that it reads."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

import jaxmha
from jaxmha.implementations import cache_kernels, probe
from jaxmha.implementations.base import Leaks
from jaxmha.implementations.fused import cudnn_cached, tpu_paged
from jaxmha.implementations.probe_cases import Kind
from tests import drawn
from tests.drawn import to_jax
from tests.paged import poisoned
from tests.tolerance import assert_close

B, N, K, H, D, PAGE, PAGES = 3, 4, 2, 128, 7, 16, 11
COUNTS = np.asarray([19, 3, 16])
PARAMS = drawn.params(num_heads=N, num_kv_heads=K, head_dim=H, features=D, dtype="bfloat16")
X = to_jax(np.random.default_rng(0).standard_normal((B, 20, D)), "bfloat16")


def filled() -> tuple[jaxmha.PagedKVCache, jaxmha.PagedKVCache]:
    """A cache of tokens, and the same with NaN wherever there is none."""
    empty = jaxmha.PagedKVCache.empty(PARAMS, B, 64, pages=PAGES, page_size=PAGE)
    _, cache = jaxmha.extend(PARAMS, X[:, :19], empty, q_lengths=COUNTS)
    return cache, poisoned(cache)


def test_slots_after_the_last_token_become_0() -> None:
    """In rows that get tokens, and in pages of their own: rows 0 and 2 share a page before."""
    empty = jaxmha.PagedKVCache.empty(PARAMS, B, 64, pages=PAGES, page_size=PAGE)
    rng = np.random.default_rng(0)
    pools = [to_jax(rng.standard_normal(empty.key.shape), "bfloat16") for _ in range(2)]
    table = np.array([[0, 1, -1, -1], [2, -1, -1, -1], [3, -1, -1, -1]], np.int32)
    cache = empty._replace(key=pools[0], value=pools[1], table=table, lengths=COUNTS).fork(0, 2)
    new = np.ones((B, 1, K, H), "bfloat16")

    def appended() -> Any:
        return jax.jit(lambda cache: cache.append(new, new, np.asarray([1, 0, 1])))(cache)

    with jaxmha.lowering_for("tpu"):
        longer, lacking = appended()
    assert not lacking.any()
    plain, _ = appended()
    of_caches = (np.asarray(x[:2], "float32") for x in (longer, plain, cache))
    for pool, same, before in zip(*of_caches, strict=True):
        for row, length in ((0, 20), (2, 20)):
            page = int(longer.table[row, 1])
            assert not pool[page, :, length - PAGE :].any()
            live = pool[page, :, : length - PAGE]
            np.testing.assert_array_equal(live, same[page, :, : length - PAGE])
        idle = int(cache.table[1, 0])
        np.testing.assert_array_equal(pool[idle], before[idle])


@pytest.mark.parametrize(("dtype", "holds"), [("bfloat16", True), ("float32", False)])
def test_a_step_on_a_tpu_holds_the_kernel(dtype: str, holds: bool) -> None:
    def step(params: Any, x: Any) -> Any:
        cache = jaxmha.PagedKVCache.empty(params, B, 64, pages=PAGES, page_size=PAGE)
        return jaxmha.decode_step(params, x, cache)

    given = jax.tree.map(lambda leaf: leaf.astype(dtype), (PARAMS, X[:, :1]))
    with jaxmha.lowering_for("tpu"):
        text = str(jax.make_jaxpr(step)(*given))
    assert ("pallas_call" in text) == holds


@pytest.mark.slow
def test_the_kernel_keeps_the_contract() -> None:
    """It leaks, and the cache zeroes its dead slots."""
    from jax.experimental.pallas import tpu

    attend = partial(cudnn_cached.attend, paged=True, one=tpu_paged.out)
    with jaxmha.lowering_for("tpu"), tpu.force_tpu_interpret_mode():
        found = probe._tried(
            attend, tpu_paged.unsupported_reason, Kind("bfloat16", heads=(H, H), queries=1)
        )
    assert found == probe.Finding(None, Leaks(1, 1))


@pytest.mark.slow
def test_steps_over_poisoned_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental.pallas import tpu

    def kernel_alone(kernel: Any, _: Any) -> Any:
        return kernel()

    clean, poisoned = filled()
    want = [jaxmha.decode_step(PARAMS, X[:, 19:], clean)[0]]
    monkeypatch.setattr(cache_kernels, "on_kernels_platform", kernel_alone)
    with jaxmha.lowering_for("tpu"), tpu.force_tpu_interpret_mode():
        got, _ = jaxmha.decode_step(PARAMS, X[:, 19:], poisoned)
    assert_close(got, np.asarray(want[0], np.float64))
