"""Everyday programs compiled for a TPU v5e, where libtpu is installed: they run JAX's kernels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

import jaxmha
from jaxmha import Mask
from tests.h100.compiled import MIB

pytestmark = pytest.mark.slow
OPTIMISED = True
SHAPE: Any = jax.ShapeDtypeStruct
# Options of a call of 2 x 2048 queries with 16 heads of 128 features, K heads of keys; `gradient`.
CALLS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "causal gradient": {"is_causal": True, "gradient": True},
    "lengths, grouped": {"mask": Mask.lengths(key_value=np.array([2048, 100])), "K": 4},
    "window": {"local_window_size": (256, 0)},
    "packed gradient": {"mask": Mask.packed(np.array([[900, 70]]), size=2048), "gradient": True},
}


@pytest.fixture(scope="module")
def device() -> Any:
    """One TPU v5e, which libtpu describes without one."""
    try:
        return topologies.get_topology_desc("v5e:2x2", "tpu").devices[0]
    except Exception as error:  # noqa: BLE001  an absent plugin raises any
        pytest.skip(f"no compiler for a TPU here (make h100 installs one): {error}"[:150])


@pytest.mark.parametrize("name", CALLS)
def test_splash(device: Any, name: str) -> None:
    options = dict(CALLS[name])
    gradient, K = options.pop("gradient", False), options.pop("K", 16)
    place = jax.sharding.SingleDeviceSharding(device)
    heads = [SHAPE((2, 2048, n, 128), jnp.bfloat16, sharding=place) for n in (16, K, K)]

    def value(q: Any, k: Any, v: Any) -> Any:
        out = jaxmha.dot_product_attention(q, k, v, **options)
        return out.astype(jnp.float32).sum() if gradient else out

    function: Any = jax.grad(value, (0, 1, 2)) if gradient else value
    with (
        jaxmha.lowering_for("tpu"),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        program = jax.jit(function).trace(*heads).lower(lowering_platforms=("tpu",)).compile()
    text = program.as_text()
    assert text.count("tpu_custom_call") >= (2 if gradient else 1)
    whole = 2 * 16 * 2048 * 2048 * 2
    assert program.memory_analysis().temp_size_in_bytes < min(whole, 200 * MIB)


def test_a_step_over_pages(device: Any) -> None:
    """One kernel, which reads the pages of a donated cache where they lie."""
    place = jax.sharding.SingleDeviceSharding(device)

    def made(key: Any) -> Any:
        params = jaxmha.init_params(
            key, num_heads=16, num_kv_heads=4, head_dim=128, features=512, dtype=jnp.bfloat16
        )
        cache = jaxmha.PagedKVCache.empty(params, 8, 8192, pages=1100, page_size=64)
        return params, jnp.zeros((8, 1, 512), jnp.bfloat16), cache

    shapes = jax.eval_shape(made, jax.random.key(0))
    given = jax.tree.map(lambda x: SHAPE(x.shape, x.dtype, sharding=place), shapes)
    step: Any = jax.jit(jaxmha.decode_step, donate_argnums=2)
    with (
        jaxmha.lowering_for("tpu"),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        program = step.trace(*given).lower(lowering_platforms=("tpu",)).compile()
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 1
    pool = 1100 * 4 * 64 * 128 * 2
    assert program.memory_analysis().temp_size_in_bytes < pool / 4
