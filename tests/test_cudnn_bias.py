"""cuDNN's gradient where a bias leaves its log-sum-exp too few bits; on its contract."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from tests import cudnn_contract, tolerance
from tests.drawn import to_jax

FAR: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"local_window_size": (2, 0)},
    "lengths": {"key_value_seq_lengths": np.array([5, 4])},
    "shared": {"is_causal": True, "key_value_seq_lengths": np.array([13, 9])},
}


@pytest.mark.everyday(far=[-3e38], name=["causal"])
@pytest.mark.parametrize("far", [-5e3, -1e9, -3e38, 1e9])
@pytest.mark.parametrize("name", FAR)
def test_gradients_of_rows_whose_bias_is_far_from_zero(
    name: str, far: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A constant added to every key that a row attends changes nothing, whatever other keys have."""
    rng = np.random.default_rng(0)
    B, T, N, H = 2, 13, 3, 8
    heads = [to_jax(rng.standard_normal((B, T, N, H)), jnp.bfloat16) for _ in range(4)]
    options = FAR[name]
    bias = rng.standard_normal((1, 1, T, T) if name == "shared" else (B, 1, 1, T))
    bias[..., :5] = far

    def gradients(implementation: str, *arrays: Any) -> Any:
        run = partial(jaxmha.dot_product_attention, implementation=implementation, **options)
        return jax.jit(lambda *x: jax.vjp(run, *x[:4])[1](x[4]))(*arrays)

    arrays = *heads[:3], to_jax(bias, jnp.bfloat16), heads[3]
    cudnn_contract.install(monkeypatch)
    with jaxmha.lowering_for("h200"):
        found = gradients("cudnn", *arrays)
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in arrays]
        wide[3] = np.maximum(wide[3], -(2.0**40))  # added to less, float64 drops the logits
        want = gradients("reference", *wide)
    for x, y in zip(found, want, strict=True):
        tolerance.assert_gradients(x, np.asarray(y))
