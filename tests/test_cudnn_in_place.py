"""cuDNN reads caches, pages and padded keys in place, by tables; on its contract."""

import contextlib
from collections.abc import Sequence
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
from jaxmha.implementations.fused import cudnn_cached
from jaxmha.implementations.probe_cases import Kind
from tests import cudnn_contract, drawn
from tests.drawn import to_jax
from tests.simulated_gpu import small


def by_steps(params: Any, cache: Any, sizes: Sequence[int], **options: Any) -> tuple[Any, Any]:
    """Outputs of tokens that steps of these sizes append, here and in plain XLA."""
    rng = np.random.default_rng(0)
    found, want = [], []
    for T in sizes:
        x = to_jax(rng.standard_normal((2, T, 32)), jnp.bfloat16)
        counts = np.asarray([T, T - (T > 1)])
        with jaxmha.lowering_for("cpu"):
            want.append(jaxmha.extend(params, x, cache, q_lengths=counts, **options)[0])
        out, cache = jaxmha.extend(params, x, cache, q_lengths=counts, **options)
        found.append(out)
    one, other = (np.asarray(jnp.concatenate(x, 1), np.float32) for x in (found, want))
    return one, other


def cached_params() -> Any:
    return drawn.params(num_heads=4, num_kv_heads=2, features=32, dtype=jnp.bfloat16)


ALONE = {"T": 1, "S": 12, "lse": False}


SINKS = {"sinks": jnp.asarray([0.5, -1, 2, 0], jnp.bfloat16)}


# Parameters of a layer, slots and window of its cache, sizes of steps, and the calls for the last step.
STEPS: dict[str, tuple[dict[str, Any], int, Any, tuple[int, ...], list[dict[str, Any]]]] = {
    "one": ({}, 12, None, (1, 1, 1), [ALONE]),
    "ring": ({}, 4, Mask.window(3, 0), (1,) * 9, [ALONE | {"S": 4}]),
    "window": ({}, 12, Mask.window(3, 0), (1,) * 6, [ALONE | {"S": 4}]),
    "window of a ring": ({}, 6, Mask.window(3, 0), (1,) * 9, [ALONE | {"S": 4}]),
    "several in a ring": (
        {}, 27, Mask.window(9, 0), (8, 8, 8, 2, 3, 3), [{"T": 6, "S": 8, "lse": True}]
    ),
    "several": (
        {}, 12, None, (3, 1, 5),
        [{"T": 10, "S": 12, "lse": True}, {"T": 5, "S": 5, "lse": True}],
    ),
    "sinks": (SINKS, 12, None, (2, 1), [{"T": 2, "S": 12, "lse": True}]),
}  # fmt: skip


@pytest.mark.everyday(name=["window of a ring"])
@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("name", STEPS)
def test_a_step_reads_the_cache_as_it_lies(gpu: list[Any], name: str) -> None:
    """The same as in plain XLA, whatever the free slots hold; also in a ring as large as a window."""
    more, slots, mask, sizes, calls = STEPS[name]
    params = cached_params()._replace(**more)
    cache = jaxmha.KVCache.empty(params, 2, slots)
    cache = cache._replace(value=jnp.full_like(cache.value, jnp.nan))
    one, other = by_steps(params, cache, sizes, mask=mask)
    np.testing.assert_allclose(one, other, atol=0.03 * np.abs(other).max(), rtol=0)
    asked = [{key: call[key] for key in ("T", "S", "lse")} for call in gpu]
    assert all(call in asked for call in calls), asked


@pytest.mark.slow
@pytest.mark.parametrize("leaks", [(), ("value",)])
def test_a_step_reads_pages_where_they_lie(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch, leaks: tuple[str, ...]
) -> None:
    """By cuDNN unless the probe finds that it reads dead slots; pages of any pool, after a fork."""
    cudnn_contract.install(monkeypatch, leaks=leaks)
    params = cached_params()
    cache = jaxmha.PagedKVCache.empty(params, 2, 12, pages=9, page_size=4)
    cache = cache._replace(value=jnp.full_like(cache.value, jnp.nan))
    x = to_jax(np.random.default_rng(1).standard_normal((2, 4, 32)), jnp.bfloat16)
    with jaxmha.lowering_for("cpu"):
        _, cache = jaxmha.extend(params, x, cache, q_lengths=np.asarray([4, 1]))
    one, other = by_steps(params, cache.fork(0, 1), (1, 3, 1))
    np.testing.assert_allclose(one, other, atol=0.03 * np.abs(other).max(), rtol=0)
    asked = {call["T"] for call in gpu if call.get("pages") == 9}
    assert asked == (set() if leaks else {1, 6})
    found = probe.leaks(cudnn_cached.PAGED, Kind("bfloat16", queries=1))
    assert found == Leaks(*2 * [len(leaks)])


@pytest.mark.everyday(broken=[False])
@pytest.mark.parametrize("broken", [False, True])
def test_padded_keys_are_read_where_they_lie(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch, *, broken: bool
) -> None:
    """By a table, which no NaN of a padded key gets past; by copies where the probe finds it wrong."""
    if broken:

        def refuse(*_: Any, **__: Any) -> Any:
            raise ValueError("no pages of one position")

        monkeypatch.setattr(private, "_dot_product_attention_fwd_p", cudnn_contract.Bound(refuse))
    else:
        monkeypatch.setenv("JAXMHA_PROBE", "trust")
    x, valid = small(), np.asarray([[False, True, True, False, True, False]])
    spoiled = jnp.where(valid[..., None, None], x, jnp.nan)

    def out(key: Any, value: Any) -> Any:
        mask = Mask.padding(key_value=jnp.asarray(valid))
        return jaxmha.dot_product_attention(x, key, value, mask=mask)

    warns = pytest.warns(RuntimeWarning, match="keys in place does not work here in bfloat16")
    with warns if broken else contextlib.nullcontext():
        found = jax.jit(out)(spoiled, spoiled)
    assert gpu[-1].get("table", False) != broken
    with jaxmha.lowering_for("cpu"):
        want = jax.jit(out)(x, x)
    one, other = (np.asarray(y, np.float32) for y in (found, want))
    np.testing.assert_allclose(one, other, atol=0.02 * np.abs(other).max(), rtol=0)
    jax.grad(lambda y: out(y, y).astype(np.float32).sum())(spoiled)
    assert "table" not in gpu[-1]
