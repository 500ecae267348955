"""Layers and models of equinox, and layers of `jaxmha.equinox`, are run and compared."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest

from jaxmha import Semantics
from jaxmha.converters import equinox
from jaxmha.converters.verify import attribution, comparands, comparison
from jaxmha.equinox import MultiheadAttention

SIZES: dict[str, Any] = {
    "num_heads": 3, "query_size": 13, "key_size": 11, "value_size": 17, "output_size": 7,
    "qk_size": 5, "vo_size": 2, "use_query_bias": True, "use_value_bias": True, "dropout_p": 0.5,
}  # fmt: skip


def _equinox() -> Any:
    return eqx.nn.MultiheadAttention(**SIZES, key=jax.random.key(0))


def _jaxmha() -> Any:
    semantics = Semantics(scale=0.3, local_window_size=(3, 1), fully_masked="mean")
    return MultiheadAttention(**SIZES, num_kv_heads=1, semantics=semantics, key=jax.random.key(0))


BUILD: dict[str, Callable[[], Any]] = {"equinox": _equinox, "jaxmha.equinox": _jaxmha}


@pytest.mark.slow_variants("equinox")
@pytest.mark.parametrize("name", BUILD)
def test_a_layer_is_run_and_is_the_same_as_its_parameters(name: str) -> None:
    layer = BUILD[name]()
    (block,) = comparands.read(layer).blocks
    assert (block.is_live, block.kind) == (True, name)
    params, semantics = equinox.from_module(layer)
    found = comparison.compare(layer, (params, semantics))
    assert found.same, str(found)
    assert not found.notes
    assert not comparison.compare(layer, (params, replace(semantics, scale=0.2))).same


class Careless(MultiheadAttention):
    """Ignores its mask."""

    def __call__(self, *inputs: Any, mask: Any = None, **options: Any) -> Any:
        return super().__call__(*inputs, **options)


@pytest.mark.slow  # like that of nnx in test_own_flax_layers
def test_a_forward_of_its_own_is_caught() -> None:
    layer = Careless(**SIZES, key=jax.random.key(0))
    found = comparison.compare(layer, layer.to_params()).blocks[0]
    assert not found.same
    assert found.explanation == "mask ignored"


class Projecting(eqx.nn.MultiheadAttention):  # type: ignore[misc]
    """The call of equinox, with projections of its own."""

    def _project(self, linear: Any, x: Any) -> Any:
        return 2 * super()._project(linear, x)


def test_projections_of_its_own_are_refused() -> None:
    layer = Projecting(2, 6, key=jax.random.key(0))
    with pytest.raises(ValueError, match="Projecting has a _project of its own"):
        equinox.from_module(layer)


class Model(eqx.Module):  # type: ignore[misc]
    """Two kinds of attention, other layers, and a key that is no weight."""

    layers: list[Any]
    up: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    key: Any

    def __init__(self, seed: int) -> None:
        a, b, c, self.key = jax.random.split(jax.random.key(seed), 4)
        self.layers = [eqx.nn.MultiheadAttention(2, 6, key=a), MultiheadAttention(3, 6, key=b)]
        self.up = eqx.nn.Linear(5, 3, key=c)
        self.norm = eqx.nn.LayerNorm(6)


@pytest.mark.slow
def test_models_are_compared_whole() -> None:
    found = comparison.compare(Model(0), Model(0))
    assert [block.a for block in found.blocks] == ["layers.0", "layers.1"]
    assert found.same, str(found)
    other = eqx.tree_at(lambda model: model.up.bias, Model(0), np.ones(3, np.float32))
    found = comparison.compare(Model(0), other)
    assert not found.same
    assert all(block.same for block in found.blocks)
    assert list(found.outside) == ["up.bias"]


def test_the_difference_from_equinox_is_attributed_to_rows_without_a_key() -> None:
    theirs = _equinox()
    ours = MultiheadAttention.from_params(*equinox.from_module(theirs))
    rng = np.random.default_rng(0)
    inputs = [
        rng.normal(size=(2, *shape)).astype(np.float32) for shape in ((3, 13), (5, 11), (5, 17))
    ]
    valid = np.arange(5) < np.array([3, 0])[:, None, None, None]
    found = attribution.attribute(ours, theirs, inputs, mask=valid)
    assert [part.name for part in found.parts] == ["fully masked rows", "rounding"], found
    assert found.parts[0].sentence.endswith("is 0 in a, the mean of the values in b")
