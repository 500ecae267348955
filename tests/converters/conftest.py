"""Weights that tests replace at once are drawn cheaply; a layer that several modules read."""

from typing import Any

import jax
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def fresh_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy draws the weights that Keras' layers begin with; JAX compiles its draw for each shape.

    Nothing here tests what layers begin with; other keys give other weights.
    """

    traced = jax.random.uniform

    def uniform(
        key: Any, shape: Any = (), dtype: Any = "float32", minval: Any = 0.0, maxval: Any = 1.0
    ) -> Any:
        if isinstance(key, jax.core.Tracer):  # shapes alone are asked for
            return traced(key, shape, dtype, minval, maxval)
        raw = key if key.dtype == np.uint32 else jax.random.key_data(key)
        rng = np.random.default_rng(np.asarray(raw).ravel().tolist())
        return jax.numpy.asarray(rng.uniform(minval, maxval, size=shape), dtype)

    monkeypatch.setattr(jax.random, "uniform", uniform)


@pytest.fixture(scope="module")
def layer() -> Any:
    """A torch layer with every bias."""
    from tests.converters import layers

    return layers.build(layers.configs("torch")[0])
