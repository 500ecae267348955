"""Layers whose class, object, sublayers or settings change the computation, unseen in the arrays."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import keras as keras_library
import numpy as np
import pytest
import torch as torch_library
from flax import linen, nnx

import jaxmha.equinox
from jaxmha import multi_head_attention
from jaxmha.converters import equinox, flax, keras, torch
from jaxmha.converters.layout import torch_arrays
from tests.drawn import to_jax
from tests.promotion import foreign
from tests.tolerance import assert_close

N, H, D, T = 2, 3, 6, 5
X = to_jax(np.random.default_rng(0).normal(size=(1, T, D)), jnp.float32)
OWN = "has a __call__ of its own"


def twice(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes another result than `function`."""
    return lambda *given, **named: 2 * function(*given, **named)


def factory() -> Callable[..., Any]:
    return twice(jax.lax.dot_general)


class Doubled:
    """Before a layer among the bases: its output is another."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        return 2 * super().__call__(*given, **named)  # type: ignore[misc]


def of_torch() -> torch_library.nn.MultiheadAttention:
    return torch_library.nn.MultiheadAttention(D, N, batch_first=True)


def of_keras(**settings: Any) -> Any:
    layer = keras_library.layers.MultiHeadAttention(N, H, **settings)
    layer.build(*[(None, None, D)] * 2)
    return layer


def of_nnx(**settings: Any) -> Any:
    with foreign():
        return nnx.MultiHeadAttention(N, D, decode=False, rngs=nnx.Rngs(0), **settings)


def of_linen(**settings: Any) -> tuple[Any, Any]:
    module = linen.MultiHeadDotProductAttention(N)
    with foreign():
        return module.clone(**settings), module.init(jax.random.key(0), X)


def of_equinox(kind: Any = eqx.nn.MultiheadAttention) -> Any:
    return kind(N, D, key=jax.random.key(0))


def torch_object() -> Any:
    layer = of_torch()
    layer.forward = twice(layer.forward)  # type: ignore[method-assign]
    return layer


def torch_of_other() -> Any:
    layer = of_torch()
    layer.forward = of_torch().forward  # type: ignore[method-assign]
    return layer


def torch_subclass() -> Any:
    class Own(Doubled, torch_library.nn.MultiheadAttention):
        pass

    return Own(D, N)


def keras_object() -> Any:
    layer = of_keras()
    layer.call = twice(layer.call)
    return layer


def keras_subclass() -> Any:
    class Own(Doubled, keras_library.layers.MultiHeadAttention):  # type: ignore[misc]
        pass

    layer = Own(N, H)
    layer.build(*[(None, None, D)] * 2)
    return layer


def keras_activation() -> Any:
    layer = of_keras(use_gate=True)
    layer._gate_dense.activation = keras_library.activations.relu
    return layer


def keras_sublayer() -> Any:
    layer = of_keras()
    layer._softmax.call = twice(layer._softmax.call)
    return layer


def nnx_sublayer(name: str, layer: Any, **settings: Any) -> Any:
    module = of_nnx(**settings)
    setattr(module, name, layer)
    return module


def nnx_own() -> Any:
    class Own(Doubled, nnx.LinearGeneral):  # type: ignore[misc]
        pass

    return nnx_sublayer("query", Own(D, (N, H), rngs=nnx.Rngs(0)))


def norm(kind: Any = nnx.LayerNorm, **settings: Any) -> Any:
    no_bias = {"use_bias": False} if kind is nnx.LayerNorm else {}
    return kind(H, rngs=nnx.Rngs(0), **no_bias, **settings)


def equinox_own(kind: Any) -> Any:
    class Own(Doubled, eqx.nn.Linear):  # type: ignore[misc]
        pass

    linear = Own(D, D, use_bias=False, key=jax.random.key(1))
    return eqx.tree_at(lambda m: m.query_proj, of_equinox(kind), linear)


class Adapted(eqx.Module):  # type: ignore[misc]
    """A linear layer with an adapter, which its weight and bias do not show."""

    base: eqx.nn.Linear
    added: jax.Array

    @property
    def weight(self) -> Any:
        return self.base.weight

    @property
    def bias(self) -> Any:
        return self.base.bias

    def __call__(self, x: jax.Array) -> Any:
        return self.base(x) + self.added @ x


def equinox_with(layer: Callable[[Any], Any], name: str = "query_proj") -> Any:
    module = of_equinox()
    return eqx.tree_at(lambda m: getattr(m, name), module, layer(getattr(module, name)))


class DoubledDropout(Doubled, eqx.nn.Dropout):  # type: ignore[misc]
    pass


DOT = jax.lax.dot_general
REFUSED: dict[str, tuple[Any, Callable[[], Any], str]] = {
    "torch object": (torch, torch_object, "this MultiheadAttention object has a forward of its"),
    "torch of other": (torch, torch_of_other, "this MultiheadAttention object has a forward"),
    "torch subclass": (torch, torch_subclass, f"Doubled {OWN}"),
    "keras object": (keras, keras_object, "this MultiHeadAttention object has a call of its own"),
    "keras subclass": (keras, keras_subclass, f"Doubled {OWN}"),
    "keras gate": (keras, keras_activation, "_gate_dense.activation=relu is not the default sig"),
    "keras sublayer": (keras, keras_sublayer, "_softmax: this Softmax object has a call of its"),
    "nnx sublayer": (flax, nnx_own, f"module.query: Doubled {OWN}"),
    "nnx function": (
        flax, lambda: nnx_sublayer("query", twice(jnp.sin)),
        "module.query: expected LinearGeneral, got function, which may compute anything",
    ),
    "nnx product": (
        flax, lambda: of_nnx(qkv_dot_general=twice(DOT)),
        r"module.query.dot_general=.* is not the default dot_general, and may compute anything",
    ),
    "nnx out product": (
        flax, lambda: of_nnx(out_dot_general_cls=factory),
        "module.out.dot_general_cls=factory is not the default None",
    ),
    "nnx promote": (
        flax, lambda: of_nnx(qkv_promote_dtype=twice(jnp.sin)),
        "module.query.promote_dtype=.* is not the default promote_dtype",
    ),
    "nnx axis": (
        flax,
        lambda: nnx_sublayer("query", nnx.LinearGeneral(D, (N, H), axis=-2, rngs=nnx.Rngs(0))),
        r"module.query.axis=\(-2,\) is not the default \(-1,\)",
    ),
    "nnx norm": (
        flax, lambda: nnx_sublayer("query_ln", norm(epsilon=0.5), normalize_qk=True),
        "module.query_ln and module.key_ln differ, .*0.5",
    ),
    "nnx norm over devices": (
        flax, lambda: nnx_sublayer("key_ln", norm(axis_name="data"), normalize_qk=True),
        "module.key_ln.axis_name='data' is not the default None",
    ),
    **{
        f"linen {name}": (flax, partial(of_linen, **{name: twice(DOT)}), message)
        for name, message in {
            "qkv_dot_general": "module.qkv_dot_general=.* is not the default dot_general",
            "out_dot_general": "module.out_dot_general=.* is not the default dot_general",
            "qkv_dot_general_cls": "module.qkv_dot_general_cls=.* is not the default None",
            "out_dot_general_cls": "take the weights alone by import_params",
            "qk_attn_weights_einsum_cls": "module.qk_attn_weights_einsum_cls=.* is not the def",
            "attn_weights_value_einsum_cls": "module.attn_weights_value_einsum_cls=.* is not",
        }.items()
    },
    "linen fp8": (
        flax, lambda: of_linen(qkv_dot_general_cls=flax_fp8()),
        "module.qkv_dot_general_cls=.*Fp8.* is not the default None",
    ),
    "equinox sublayer": (
        equinox, lambda: equinox_own(eqx.nn.MultiheadAttention), f"query_proj: Doubled {OWN}",
    ),
    "equinox of jaxmha": (
        equinox, lambda: equinox_own(jaxmha.equinox.MultiheadAttention),
        f"query_proj: Doubled {OWN}",
    ),
    "equinox adapter": (
        equinox, lambda: equinox_with(lambda base: Adapted(base, jnp.ones((D, D)))),
        "query_proj: expected Linear, got Adapted",
    ),
    "equinox weight norm": (
        equinox, lambda: equinox_with(eqx.nn.WeightNorm),
        "query_proj: expected Linear, got WeightNorm, which may compute anything",
    ),
    "equinox dropout": (
        equinox, lambda: equinox_with(lambda _: DoubledDropout(0.1), "dropout"),
        f"dropout: Doubled {OWN}",
    ),
}  # fmt: skip


def flax_fp8() -> Any:
    return linen.Fp8DotGeneralOp


@pytest.mark.slow_variants("linen fp8")
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    converter, make, message = REFUSED[case]
    with foreign():
        layer = make()
    with pytest.raises(ValueError, match=message):
        converter.from_module(*(layer if isinstance(layer, tuple) else (layer,)))


@pytest.fixture(params=["hook", "pre hook", "class"])
def everywhere(request: pytest.FixtureRequest) -> Iterator[str]:
    """Changes every module of torch, or every layer of the class; the message about it."""
    modules = torch_library.nn.modules.module
    if request.param == "class":
        with pytest.MonkeyPatch.context() as patch:
            own = twice(torch_library.nn.MultiheadAttention.forward)
            patch.setattr(torch_library.nn.MultiheadAttention, "forward", own)
            yield "MultiheadAttention has a forward of its own"
        return
    pre = request.param == "pre hook"
    register: Any = (
        modules.register_module_forward_pre_hook if pre else modules.register_module_forward_hook
    )
    handle = register(lambda *_: None)
    yield "all modules of torch have forward hooks"
    handle.remove()


def test_changes_of_every_module_of_torch(everywhere: str) -> None:
    with pytest.raises(ValueError, match=everywhere):
        torch.from_module(of_torch())


def restored() -> Any:
    layer = of_torch()
    layer.forward = layer.forward  # type: ignore[method-assign]  # as accelerate leaves it
    return layer


def compiled() -> Any:
    layer = of_torch()
    layer.forward = torch_library.compile(layer.forward, backend="eager")  # type: ignore[method-assign]
    layer.compile(backend="eager")
    return layer


class SameName(linen.SelfAttention):  # type: ignore[misc]
    """A subclass that computes the same."""


def recorded() -> Any:
    layer = of_nnx()
    layer.query.seen = nnx.Intermediate(X)
    return layer


def lifted(*transforms: Any) -> tuple[Any, Any]:
    kind = linen.MultiHeadDotProductAttention
    for transform in transforms:
        kind = transform(kind)
    return kind(N), of_linen()[1]


STANDARD: dict[str, tuple[Any, Callable[[], Any]]] = {
    "torch restored": (torch, restored),
    "torch compiled": (torch, compiled),
    "keras": (keras, of_keras),
    "nnx": (flax, lambda: of_nnx(normalize_qk=True, qkv_dot_general=DOT)),
    "linen": (flax, lambda: of_linen(qkv_dot_general=DOT, out_dot_general=DOT)),
    "nnx recorded": (flax, recorded),
    "linen remat and jit": (flax, lambda: lifted(linen.remat, linen.jit)),
    "linen subclass": (flax, lambda: (SameName(N), of_linen()[1])),
    "equinox": (equinox, of_equinox),
    "equinox of jaxmha": (equinox, lambda: of_equinox(jaxmha.equinox.MultiheadAttention)),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=pytest.mark.slow) if "compiled" in x else x for x in STANDARD],
)
def test_standard_layers_are_taken(case: str) -> None:
    converter, make = STANDARD[case]
    layer = make()
    params, _ = converter.from_module(*(layer if isinstance(layer, tuple) else (layer,)))
    assert params.query.kernel.shape == (D, N, H)


def test_lifted_methods_of_one_s_own_are_refused() -> None:
    class Own(linen.MultiHeadDotProductAttention):  # type: ignore[misc]
        __call__ = twice(linen.MultiHeadDotProductAttention.__call__)

    mapped = linen.map_variables(linen.MultiHeadDotProductAttention, "params", lambda x: x)
    for kind in (linen.remat(Own), mapped):
        with pytest.raises(ValueError, match=OWN):
            flax.from_module(kind(N), of_linen()[1])


def test_dtypes_of_torch_under_another_default_device() -> None:
    layer = of_torch()
    torch_arrays._dtype_of.cache_clear()
    with torch_library.device("meta"):
        params, _ = torch.from_module(layer)
    assert params.query.kernel.shape == (D, N, H)


@pytest.mark.slow_variants("LayerNorm")
@pytest.mark.parametrize("kind", [nnx.LayerNorm, nnx.RMSNorm])
def test_norms_of_nnx_are_those_of_its_sublayers(kind: Any) -> None:
    layer = of_nnx(normalize_qk=True)
    layer.query_ln, layer.key_ln = (norm(kind, epsilon=0.5) for _ in range(2))
    layer.query_ln.scale[...] = layer.query_ln.scale[...] * 3
    params, semantics = flax.from_module(layer)
    assert semantics.qk_norm_epsilon == 0.5
    with foreign():
        expected = layer(X)
    assert_close(multi_head_attention(params, X, semantics=semantics), expected)


def test_the_scale_of_keras_is_that_of_the_layer() -> None:
    layer = of_keras()
    assert keras.from_module(layer)[1].scale is None
    layer._inverse_sqrt_key_dim = 1.0
    params, semantics = keras.from_module(layer)
    with foreign():
        expected = layer(X, X)
    assert_close(multi_head_attention(params, X, semantics=semantics), np.asarray(expected))


def test_parameters_of_an_equinox_module_with_another_layer() -> None:
    layer = equinox_own(jaxmha.equinox.MultiheadAttention)
    with pytest.raises(TypeError, match=r"query_proj must be an equinox.nn.Linear, got Own"):
        layer.to_params()


@pytest.mark.parametrize("kind", [eqx.nn.MultiheadAttention, jaxmha.equinox.MultiheadAttention])
def test_a_comparison_reads_the_weights_of_a_changed_projection(kind: Any) -> None:
    """It runs the layer, so that the arrays need not determine the output."""
    own, plain = equinox_own(kind), of_equinox(kind)
    params, _ = equinox.weights_of(own)
    np.testing.assert_array_equal(
        np.asarray(params.query.kernel).reshape(D, -1), np.asarray(own.query_proj.weight).T
    )
    np.testing.assert_array_equal(params.key.kernel, equinox.weights_of(plain)[0].key.kernel)
