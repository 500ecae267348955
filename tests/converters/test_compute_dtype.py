"""Layers that compute in a narrower dtype than that of their weights: float32, rounded to half."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch as framework
from flax import nnx

from jaxmha import MHAParams, Semantics
from jaxmha.converters import flax, keras, torch
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.verify import attribution, comparands, comparison, forward_check
from jaxmha.params import from_leaves
from tests.converters import layers
from tests.converters.test_diagnosis import draw
from tests.promotion import foreign

HALF = {"bfloat16": jnp.bfloat16, "float16": jnp.float16}
N, H, D = 3, 5, 13


def _keras(dtype: str, **options: Any) -> Any:
    import keras as library

    layer = library.layers.MultiHeadAttention(N, H, dtype=f"mixed_{dtype}", **options)
    with foreign():
        layer.build((None, None, D), (None, None, D), (None, None, D))
    rng = np.random.default_rng(0)
    for variable in layer.weights:
        variable.assign(0.35 * rng.normal(size=variable.shape))
    return layer


def _nnx(dtype: str) -> Any:
    layer = layers.build(layers.configs("nnx")[0])
    for part in (layer, layer.query, layer.key, layer.value, layer.out):
        part.dtype = HALF[dtype]
    return layer


def _linen(dtype: str) -> Any:
    module, variables = layers.build(layers.configs("linen")[0])
    return module.clone(dtype=HALF[dtype]), variables


def _torch(dtype: str) -> Any:
    return layers.build(layers.configs("torch")[0])


@contextmanager
def autocast(dtype: str) -> Iterator[None]:
    """A region of torch's autocast."""
    with framework.autocast("cpu", dtype=getattr(framework, dtype)):
        yield


BUILD: dict[str, Callable[[str], Any]] = {
    "keras": _keras,
    "nnx": _nnx,
    "linen": _linen,
    "torch": _torch,
}
READ: dict[str, Callable[..., Any]] = {
    "keras": keras.from_module,
    "nnx": flax.from_module,
    "linen": flax.from_module,
    "torch": torch.from_module,
}


@pytest.mark.slow_variants("*", "!torch-bfloat16")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", BUILD)
def test_a_mixed_layer_is_the_same_as_itself_and_its_weights(name: str, dtype: str) -> None:
    layer = BUILD[name](dtype)
    params = READ[name](*(layer if isinstance(layer, tuple) else (layer,)))
    with autocast(dtype) if name == "torch" else nullcontext():
        twice = comparison.compare(layer, layer).blocks[0]
        (found,) = comparison.compare(layer, params).blocks
        turned = comparison.compare(params, layer).blocks[0]
    assert twice.same, str(twice)
    assert found.same, str(found)
    assert turned.same
    assert (found.dtypes, found.compute_dtypes) == (("float32",) * 2, (dtype, "float32"))
    assert f"the first computes in {dtype}, narrower than its weights in float32" in str(found)
    assert "second computes" not in str(found)
    assert "second computes" in str(twice)
    assert all(1 < error < 24 for pair in found.errors.values() for error in pair)


def test_no_compute_dtype_is_named_where_it_is_that_of_the_weights() -> None:
    layer = layers.build(layers.configs("torch")[0], "bfloat16")
    (found,) = comparison.compare(layer, torch.from_module(layer)).blocks
    assert found.compute_dtypes == found.dtypes == ("bfloat16", "bfloat16")
    assert "computes" not in str(found)


class Wrong(nnx.MultiHeadAttention):  # type: ignore[misc]
    """A layer of Flax with an error in its forward."""

    wrong = ""
    attention_fn: Any

    def __call__(self, query: Any, key: Any, value: Any, mask: Any = None, **options: Any) -> Any:
        if self.wrong == "inverted mask" and mask is not None:
            mask = ~mask.astype(bool)
        if self.wrong == "mask ignored":
            mask = None
        if self.wrong == "key and value exchanged":
            key, value = value, key
        usual: Any = self.attention_fn
        if self.wrong == "missing scale":
            self.attention_fn = unscaled
        try:
            return super().__call__(query, key, value, mask=mask, **options)
        finally:
            self.attention_fn = usual


def unscaled(query: Any, *others: Any, **options: Any) -> Any:
    """Attention whose logits are not divided by the square root of H."""
    return nnx.dot_product_attention(query * query.shape[-1] ** 0.5, *others, **options)


ERRORS = ("inverted mask", "mask ignored", "key and value exchanged", "missing scale")


@pytest.mark.slow_variants("*", "!bfloat16-2.0-missing scale")
@pytest.mark.parametrize("wrong", ERRORS)
@pytest.mark.parametrize("deviation", [0.03, 0.1, 0.35, 1.0, 2.0])
@pytest.mark.parametrize("dtype", HALF)
def test_errors_are_found_in_half_precision(dtype: str, deviation: float, wrong: str) -> None:
    """Also where logits are so small or large that the softmax hardly shows a missing scale."""
    params = from_leaves(
        {
            name: np.asarray(np.random.default_rng(i).normal(0, deviation, x.shape), np.float32)
            for i, (name, x) in enumerate(draw(np.random.default_rng(1))[0].items())
        }
    )
    count, size = params.query.kernel.shape[1:]
    with foreign():
        layer = Wrong(
            count,
            count * size,
            dtype=HALF[dtype],
            decode=False,
            deterministic=True,
            rngs=nnx.Rngs(0),
        )
    filled = flax.to_module(
        params,
        like=nnx.MultiHeadAttention(
            count, count * size, decode=False, deterministic=True, rngs=nnx.Rngs(0)
        ),
    )
    nnx.update(layer, nnx.state(filled, nnx.Param))
    pairs: list[tuple[Any, Any]] = [(layer, params), (params, layer)]
    assert comparison.compare(*pairs[0]).same
    layer.wrong = wrong
    for pair in pairs:
        (found,) = comparison.compare(*pair).blocks
        assert not found.differences
        assert not found.same, str(found)
        assert found.explanation is not None
        assert found.explanation.startswith(wrong)


def rounding(params: MHAParams, dtype: Any, noise: float = 0.0) -> comparands.ComparedBlock:
    """A layer object with these weights that computes in a dtype, plus noise."""
    block = comparands.of_params("", "a layer", params, Semantics())
    narrow = forward_check._cast(block, np.dtype(dtype))

    def forward(*given: Any) -> NDArray:
        out = narrow.forward(*given)
        drawn = np.random.default_rng(0).normal(size=out.shape)
        noisy: NDArray = (out + noise * out.std() * drawn).astype(dtype)
        return noisy

    return narrow._replace(forward=forward, is_live=True)


def test_each_layer_of_two_is_measured_in_its_own_dtype() -> None:
    """A wrong float32 layer does not pass because the other computes in bfloat16."""
    params = from_leaves(dict(draw(np.random.default_rng(1))[0]))
    narrow = rounding(params, ml_dtypes.bfloat16)
    for noise, same in ((0.0, True), (1e-4, False)):
        wide = rounding(params, np.float32, noise)
        for pair in ((narrow, wide), (wide, narrow)):
            found = comparison.compare_blocks(*pair)
            assert found.same == same, str(found)
            assert set(found.compute_dtypes) == {"bfloat16", "float32"}


def test_float64_weights_computed_in_float32() -> None:
    x = {name: x.astype(np.float64) for name, x in draw(np.random.default_rng(1))[0].items()}
    params = from_leaves({name: array / 3 for name, array in x.items()})
    for noise, same in ((0.0, True), (1e-4, False)):
        narrow = rounding(params, np.float32, noise)
        exact = comparands.of_params("", "", params, Semantics())
        for pair in ((narrow, exact), (exact, narrow)):
            found = comparison.compare_blocks(*pair)
            assert found.same == same, str(found)


def test_two_mixed_layers_differ_by_rounding() -> None:
    layer = _keras("bfloat16")
    found = attribution.attribute(layer, layer)
    assert found.same
    assert [part.name for part in found.parts] == ["rounding"]
    found = attribution.attribute(layer, keras.from_module(layer))
    assert [part.name for part in found.parts] == ["compute dtype"]
    assert not found.same


def test_keras_fills_masked_pairs_by_its_compute_dtype() -> None:
    """Keras fills masked pairs with -3e4 where it computes in float16, whatever its weights."""
    layer = _keras("float16", dropout=0.1)  # for which Keras computes the scores itself
    mask = np.ones((2, 7, 7), bool)
    mask[0, :, 3:] = mask[1, 2] = False  # one row has no keys
    inputs = np.random.default_rng(0).normal(size=(2, 7, D)).astype(np.float32)
    with foreign():
        found = attribution.attribute(
            layer,
            keras.from_module(layer),
            inputs,
            masks_a={"attention_mask": mask},
            masks_b={"mask": mask[:, None]},
        )
    assert math.isclose(sum(part.share for part in found.parts), 1)
    assert "a fills with -30000" in str(found)
    assert "softmax is in float16 in a" in str(found)


def _drawn(deviation: float, **extra: tuple[int, ...]) -> MHAParams:
    """Random parameters of float32, with further leaves of the shapes `extra`."""
    rng = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {
        f"{x}.kernel": (D, N, H) for x in ("query", "key", "value")
    }
    shapes |= {"out.kernel": (N, H, D)} | {k.replace("_", "."): v for k, v in extra.items()}
    return from_leaves(
        {name: (deviation * rng.normal(size=s)).astype(np.float32) for name, s in shapes.items()}
    )


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("extra", [{}, {"sinks": (N,)}, {"gate_kernel": (D, N, H)}], ids=str)
def test_rounding_costs_no_more_with_sinks_and_gates(extra: Any, dtype: str) -> None:
    params = _drawn(0.35, **extra)
    block = comparands.of_params("", "", params, Semantics())
    given = forward_check.inputs(block, 0, 1.0)
    for mask in forward_check.masks().values():
        cost = forward_check.cost(params, Semantics(), given, mask, np.dtype(HALF[dtype]))
        assert 0 < cost < 12


@pytest.mark.parametrize("deviation", [0.02, 2.0])
def test_inputs_are_scaled_where_a_window_excludes_keys(deviation: float) -> None:
    def factor(semantics: Semantics) -> float:
        block = comparands.of_params("", "", _drawn(deviation), semantics)
        return forward_check._moderate(block, 0)

    assert factor(Semantics(local_window_size=(4, 0))) == factor(Semantics()) != 1.0
    assert factor(Semantics(qk_norm="rms", qk_norm_learned=False)) == 1.0


@pytest.mark.parametrize("name", ["mlp.weight", "out_proj.weight"])
def test_a_dtype_that_does_not_hold_the_values_is_refused(name: str) -> None:
    state = {
        k: x.detach().numpy()
        for k, x in framework.nn.MultiheadAttention(15, 3).state_dict().items()
    }
    state |= {"mlp.weight": np.ones((7, 5), np.float32)}
    state[name] = np.full(state[name].shape, 7e4, np.float32)
    with np.errstate(over="ignore"):
        narrow = {k: x.astype(np.float16) for k, x in state.items()}
    leaf = "mlp.weight" if name == "mlp.weight" else "out.kernel"
    with pytest.raises(ValueError, match=rf"values of {leaf} do not fit into float16"):
        comparison.compare(state, narrow, num_heads=3, dtype="float16")
