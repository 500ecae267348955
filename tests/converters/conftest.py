"""Keras' layers begin with weights that NumPy draws: JAX compiles its draw for every shape."""

from typing import Any

import jax
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def fresh_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here tests what layers begin with; other keys give other weights."""

    def uniform(
        key: Any, shape: Any = (), dtype: Any = "float32", minval: Any = 0.0, maxval: Any = 1.0
    ) -> Any:
        raw = (
            jax.random.key_data(key)
            if jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
            else key
        )
        rng = np.random.default_rng(np.asarray(raw).ravel().tolist())
        return jax.numpy.asarray(rng.uniform(minval, maxval, size=shape), dtype)

    monkeypatch.setattr(jax.random, "uniform", uniform)
