"""Layers of `jaxmha.flax` are read, run and compared like those of flax."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as their_linen
from flax import nnx

import jaxmha
from jaxmha import Semantics
from jaxmha.converters import flax, haiku, matching
from jaxmha.converters.verify import attribution, comparands, comparison
from jaxmha.flax import attention_fn, latent, linen
from jaxmha.flax.nnx import MultiHeadAttention
from tests.drawn import to_jax

N, H, D = 3, 5, 13
EVERYTHING: dict[str, Any] = {
    "num_kv_heads": 1,
    "value_head_dim": 7,
    "out_features": 11,
    "use_bias_kv": True,
    "extra_params": ("sinks", "gate.kernel"),
    "normalize_qk": True,
    "local_window_size": (5, 1),
    "semantics": Semantics(scale=0.3, logits_soft_cap=3.0, local_window_size=(3, 2)),
    "dropout_rate": 0.5,
}


def _nnx(qkv_features: int = N * H, **settings: Any) -> Any:
    layer = MultiHeadAttention(N, D, qkv_features, rngs=nnx.Rngs(0), **settings)
    graph, state = nnx.split(layer)
    return nnx.merge(graph, _noisy(state))


def _linen(qkv_features: int = N * H, **settings: Any) -> Any:
    module = linen.MultiHeadAttention(num_heads=N, qkv_features=qkv_features, **settings)
    draw = partial(module.init, deterministic=True)
    shapes = jax.eval_shape(draw, jax.random.key(0), jnp.ones((2, 3, D)))["params"]
    return module, _noisy({"params": jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)})


def _noisy(state: Any) -> Any:
    """The state with noise in its parameters: none is 0 or 1."""
    rng = np.random.default_rng(0)

    def noisy(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return to_jax(np.asarray(x) + 0.3 * rng.normal(size=x.shape), x.dtype)

    return jax.tree.map(noisy, state)


BUILD: dict[str, Callable[..., Any]] = {"nnx": _nnx, "linen": _linen}


def imported(layer: Any) -> Any:
    return flax.from_module(*(layer if isinstance(layer, tuple) else (layer,)))


@pytest.mark.slow_variants("nnx-*", "*-plain")
@pytest.mark.parametrize("settings", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("name", BUILD)
def test_a_layer_is_run_and_is_the_same_as_its_parameters(name: str, settings: Any) -> None:
    layer = BUILD[name](**settings, decode=name == "linen" or None)
    (block,) = comparands.read(layer).blocks
    assert (block.is_live, block.kind) == (True, "jaxmha.flax")
    found = comparison.compare(layer, imported(layer))
    assert found.same, str(found)
    assert not found.notes
    assert imported(layer)[1].local_window_size == ((3, 1) if settings else None)


@pytest.mark.slow_variants("linen")
@pytest.mark.parametrize("name", BUILD)
def test_a_layer_is_compared_in_the_dtype_in_which_it_computes(name: str) -> None:
    layer = BUILD[name](dtype=jnp.bfloat16)
    found = comparison.compare(layer, imported(layer)).blocks[0]
    assert found.same, str(found)
    assert (found.dtypes, found.compute_dtypes) == (("float32",) * 2, ("bfloat16", "float32"))


class Careless(MultiHeadAttention):
    """Ignores its mask."""

    def __call__(self, *inputs: Any, mask: Any = None, **options: Any) -> Any:
        return super().__call__(*inputs, **options)


def test_a_forward_of_its_own_is_caught() -> None:
    layer = Careless(N, D, N * H, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="Careless has a __call__ of its own"):
        flax.from_module(layer)
    found = comparison.compare(layer, layer.to_params()).blocks[0]
    assert not found.same
    assert found.explanation == "mask ignored"


@pytest.mark.slow_variants("nnx")
@pytest.mark.parametrize("name", BUILD)
def test_a_layer_that_rotates_is_not_run(name: str) -> None:
    # An even H, and parameters that no layout for files has.
    settings = {"rotate": jaxmha.rope, "use_bias_kv": True, "num_kv_heads": 1}
    layer = BUILD[name](qkv_features=N * 4, **settings)
    found = comparison.compare(layer, layer)
    assert found.same, str(found)
    assert "rotates its queries and keys (rotate): its weights were compared" in str(found.notes)
    with pytest.raises(ValueError, match=r"rotates .*module\.to_params"):
        imported(layer)
    with pytest.raises(ValueError, match=r"no outputs to attribute: .* rotates"):
        attribution.attribute(layer, layer)


@pytest.mark.slow
def test_models_are_compared_layer_by_layer() -> None:
    class Model(nnx.Module):  # type: ignore[misc]
        def __init__(self, seed: int) -> None:
            rngs = nnx.Rngs(seed)
            self.ours = MultiHeadAttention(N, N * H, rngs=rngs)
            self.theirs = nnx.MultiHeadAttention(N, N * H, rngs=rngs, decode=True)
            self.up = nnx.Linear(3, 2, rngs=rngs)

    found = comparison.compare(Model(0), Model(0))
    assert sorted(block.a for block in found.blocks) == ["ours", "theirs"]
    assert found.same, str(found)
    assert not found.notes


@pytest.mark.slow_variants("mask")
@pytest.mark.parametrize("own", [False, True], ids=["mask", "own masks"])
def test_the_difference_from_flax_is_attributed_to_rows_without_a_key(own: bool) -> None:
    layer = _nnx(use_bias=False)
    theirs = flax.to_module(*imported(layer))
    x = np.random.default_rng(0).normal(size=(2, 5, D)).astype(np.float32)
    valid = np.arange(5) < np.array([3, 0])[:, None, None, None]
    given: dict[str, Any] = {"mask": valid}
    if own:
        given = {"masks_a": {"mask": valid, "is_causal": True}}
        given["masks_b"] = given["masks_a"]
    found = attribution.attribute(layer, theirs, x, **given)
    assert [part.name for part in found.parts] == ["fully masked rows", "rounding"], found
    assert found.parts[0].sentence.endswith("is 0 in a, the mean of the values in b")


def test_masks_of_the_layer_itself_are_read() -> None:
    layer, rng = _linen(), np.random.default_rng(0)
    x = rng.normal(size=(2, 5, D)).astype(np.float32)
    bias = rng.normal(size=(N, 5, 5)).astype(np.float32)
    masks = {"mask": jaxmha.Mask.window(1, 2), "bias": bias}
    same = {"mask": jaxmha.Mask.window(1, 2), "bias": bias[None]}
    found = attribution.attribute(layer, imported(layer), x, masks_a=masks, masks_b=same)
    assert [part.name for part in found.parts] == ["rounding"], found


def theirs(kind: str, function: Any) -> Any:
    """A layer of flax that attends by a function."""
    if kind == "nnx":
        fixed = {"decode": False, "rngs": nnx.Rngs(0)}
        return nnx.MultiHeadAttention(
            N, D, N * H, attention_fn=function, normalize_qk=True, **fixed
        )
    module = their_linen.MultiHeadDotProductAttention(N, qkv_features=N * H, attention_fn=function)
    return module, module.init(jax.random.key(0), jnp.ones((2, 3, D)))


SET = Semantics(scale=0.3, logits_soft_cap=3.0, fully_masked="mean", local_window_size=(2, 1))


@pytest.mark.slow_variants("*-plain", "linen-*")
@pytest.mark.parametrize("semantics", [None, SET], ids=["plain", "set"])
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_layer_of_flax_that_attends_by_jaxmha(kind: str, semantics: Semantics | None) -> None:
    function = attention_fn if semantics is None else partial(attention_fn, semantics=semantics)
    layer = theirs(kind, function)
    params, read = imported(layer)
    assert (read.scale, read.fully_masked) == ((0.3, "mean") if semantics else (None, "zero"))
    assert read.qk_norm == ("layer" if kind == "nnx" else None)
    found = comparison.compare(layer, (params, read))
    assert found.same, str(found)
    (block,) = comparands.read(layer).blocks
    assert (block.is_live, block.kind) == (True, "jaxmha.flax")


def test_functions_that_no_semantics_hold_are_refused() -> None:
    for function in (partial(attention_fn, deterministic=True), lambda *x, **_: x[2]):
        with pytest.raises(ValueError, match=r"module.attention_fn=.* is not the default"):
            imported(theirs("linen", function))


def _latent() -> Any:
    sizes: dict[str, Any] = {"latent_dim": 5, "rotary_dim": 2, "head_dim": 3}
    return latent.nnx.LatentAttention(2, 7, **sizes, rngs=nnx.Rngs(0))


def test_latent_attention_is_not_compared_as_a_layer() -> None:
    layer = nnx.eval_shape(_latent)
    with pytest.raises(
        TypeError, match=r"jaxmha.converters.matching.prove\(source, model, inputs="
    ):
        comparison.compare(layer, layer)


@pytest.mark.slow
def test_latent_attention_is_compared_by_prove() -> None:
    layer = _latent()
    proof = matching.prove(layer, layer, inputs=lambda rng: (rng.normal(size=(1, 5, 7)),))
    assert proof.same
    assert proof.difference == 0


def test_variables_of_haiku_are_compared() -> None:
    import haiku as library

    params, semantics = imported(_nnx())
    variables = haiku.to_module(params, semantics).variables
    transformed = library.transform(lambda x: library.MultiHeadAttention(N, H, w_init_scale=1.0)(x))
    for given in (transformed, (transformed, variables)):
        with pytest.raises(
            TypeError, match="give the parameters that init returns, with num_heads"
        ):
            comparison.compare(given, given)
    found = comparison.compare(variables, (params, semantics), num_heads=N)
    assert found.same, str(found)
