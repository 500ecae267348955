"""Peers that are functions of JAX: jaxmha, jax.nn, Flax linen and nnx, Keras on JAX.

Of each its attention on projected heads and its whole layer, as functions of arrays; and a case of
the benchmark as a compiled program of one of them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxmha
from experiments.benchmarks.cases import Case
from experiments.benchmarks.data import Array, Data
from experiments.benchmarks.program import Program, UnsupportedError
from jaxmha import Mask, MHAParams
from jaxmha.converters import flax as flax_converter
from jaxmha.converters import keras as keras_converter

# variables, query, key, value, which of them may be attended -> output
Layer = Callable[[Any, Any, Any, Any, "Attend"], Any]


class Attend(NamedTuple):
    """Which keys are attended: the first `lengths` (`B`), where `keep` is True (`B S`), or all; not
    those to come if `causal`. `bias` (`B|1 N|1 T|1 S`) is added to logits."""

    lengths: Any = None
    keep: Any = None
    bias: Any = None
    causal: bool = False

    def mask(self, S: int) -> Any:
        """`B 1 1 S`, True = attend; None where all keys are."""
        keep = self.keep
        if self.lengths is not None:
            keep = jnp.arange(S) < self.lengths[:, None]
        return None if keep is None else keep[:, None, None]


def of_jaxmha(q: Any, k: Any, v: Any, to: Attend) -> Any:
    mask = None if to.keep is None else Mask.padding(key_value=to.keep)
    return jaxmha.dot_product_attention(
        q, k, v, to.bias, mask, is_causal=to.causal, key_value_seq_lengths=to.lengths
    )


def of_jax_nn(q: Any, k: Any, v: Any, to: Attend, implementation: Any = None) -> Any:
    mask = None if to.keep is None else to.keep[:, None, None]
    if mask is not None and implementation == "cudnn":  # it broadcasts neither T nor S
        mask = jnp.broadcast_to(mask, (len(q), 1, q.shape[1], k.shape[1]))
    return jax.nn.dot_product_attention(
        *(q, k, v, to.bias, mask),
        is_causal=to.causal,
        key_value_seq_lengths=to.lengths,
        implementation=implementation,
    )


def _linen_mask(q: Any, k: Any, to: Attend) -> Any:
    """It has no argument for causal attention."""
    from flax import linen

    if to.causal:
        return linen.make_causal_mask(jnp.ones((len(q), q.shape[1])))
    return to.mask(k.shape[1])


def of_linen(q: Any, k: Any, v: Any, to: Attend, *, swapped: bool = False) -> Any:
    """`swapped`: by jaxmha's `attention_fn`."""
    return _flax_function("linen", swapped)(q, k, v, to.bias, _linen_mask(q, k, to))


def of_nnx(q: Any, k: Any, v: Any, to: Attend, *, swapped: bool = False) -> Any:
    """`swapped`: by jaxmha's `attention_fn`."""
    function = _flax_function("nnx", swapped)
    return function(q, k, v, bias=to.bias, mask=to.mask(k.shape[1]), is_causal=to.causal)


def of_keras(q: Any, k: Any, v: Any, to: Attend) -> Any:
    import keras

    options: Any = {"mask": to.mask(k.shape[1]), "is_causal": to.causal}
    return keras.ops.dot_product_attention(q, k, v, **options)


def _flax_function(kind: str, swapped: bool) -> Any:
    import flax

    from jaxmha.flax import attention_fn

    return attention_fn if swapped else getattr(flax, kind).dot_product_attention


def jaxmha_layer(params: MHAParams, implementation: Any = None) -> tuple[Any, Layer]:
    def layer(params: Any, q: Any, k: Any, v: Any, to: Attend) -> Any:
        mask = None if to.lengths is None else Mask.lengths(key_value=to.lengths)
        if to.keep is not None:
            mask = Mask.padding(key_value=to.keep)
        options: Any = {"mask": mask, "bias": to.bias, "is_causal": to.causal}
        return jaxmha.multi_head_attention(
            params, q, k, v, **options, implementation=implementation
        )

    return params, layer


def jax_nn_layer(params: MHAParams) -> tuple[Any, Layer]:
    """Projections as einsum around `jax.nn.dot_product_attention`."""

    def layer(params: Any, q: Any, k: Any, v: Any, to: Attend) -> Any:
        q, k, v = (
            jnp.einsum("btd,dnh->btnh", x, kernel) + bias
            for x, (kernel, bias) in zip((q, k, v), params[:3], strict=True)
        )
        context = of_jax_nn(q, k, v, to)
        return jnp.einsum("btnh,nhd->btd", context, params.out.kernel) + params.out.bias

    return params, layer


def linen_layer(params: MHAParams, *, swapped: bool = False) -> tuple[Any, Layer]:
    module, variables = flax_converter.to_module(params, kind="linen")
    module = module.clone(attention_fn=_flax_function("linen", swapped))

    def layer(variables: Any, q: Any, k: Any, v: Any, to: Attend) -> Any:
        _no_bias(to)
        mask = _linen_mask(q, k, to)
        return module.apply(variables, q, k, v, mask=mask, deterministic=True)

    return variables, layer


def nnx_layer(params: MHAParams, *, swapped: bool = False) -> tuple[Any, Layer]:
    from flax import nnx

    made = flax_converter.to_module(params)
    made.attention_fn = _flax_function("nnx", swapped)
    graph, state, rest = nnx.split(made, nnx.Param, ...)

    def layer(state: Any, q: Any, k: Any, v: Any, to: Attend) -> Any:
        _no_bias(to)
        options: Any = {"mask": to.mask(k.shape[1]), "is_causal": to.causal}
        return nnx.merge(graph, state, rest)(q, k, v, **options, deterministic=True)

    return state, layer


def keras_layer(params: MHAParams, *, scores: bool = False) -> tuple[Any, Layer]:
    """`scores`: with the attention scores asked for."""
    import keras

    if keras.backend.backend() != "jax":
        raise UnsupportedError(f"Keras runs on {keras.backend.backend()} here, not on jax")
    module = keras_converter.to_module(params)
    fixed = [variable.value for variable in module.non_trainable_variables]

    def layer(variables: Any, q: Any, k: Any, v: Any, to: Attend) -> Any:
        _no_bias(to)
        mask = to.mask(k.shape[1])
        out, _ = module.stateless_call(
            *(variables, fixed, q, v, k),
            attention_mask=None if mask is None else mask[:, 0],
            use_causal_mask=to.causal,
            training=False,
            return_attention_scores=scores,
        )
        return out[0] if scores else out

    return [variable.value for variable in module.trainable_variables], layer


def _no_bias(to: Attend) -> None:
    if to.bias is not None:
        raise UnsupportedError("the layer takes no additive mask")


# Of every peer its attention on heads, and its layer.
PEERS: dict[str, tuple[Callable[..., Any], Callable[[MHAParams], tuple[Any, Layer]]]] = {
    "jaxmha": (of_jaxmha, jaxmha_layer),
    "jax-nn": (of_jax_nn, jax_nn_layer),
    "flax-linen": (of_linen, linen_layer),
    "flax-nnx": (of_nnx, nnx_layer),
    "flax-linen+jaxmha": (partial(of_linen, swapped=True), partial(linen_layer, swapped=True)),
    "flax-nnx+jaxmha": (partial(of_nnx, swapped=True), partial(nnx_layer, swapped=True)),
    "keras-jax": (of_keras, keras_layer),
}


def program(peer: str, case: Case, data: Data) -> Program:
    """A case, compiled; weights, inputs and lengths are arguments."""
    core, make = PEERS[peer]
    variables, layer = (None, None) if data.params is None else make(data.params)
    lengths = None if case.lengths is None else jnp.asarray(case.lengths, jnp.int32)
    ids = list({id(x): x for x in (data.query, data.key, data.value)})
    places = [ids.index(id(x)) for x in (data.query, data.key, data.value)]

    def output(variables: Any, inputs: Any, lengths: Any) -> Any:
        q, k, v = (inputs[place] for place in places)
        to = Attend(lengths, causal=case.kind == "causal")
        return core(q, k, v, to) if layer is None else layer(variables, q, k, v, to)

    def both(variables: Any, inputs: Any, lengths: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(lambda v, x: output(v, x, lengths), variables, inputs)
        return out, pull(cotangent)

    backward = case.direction == "backward"
    arguments = [
        jax.tree.map(jnp.asarray, variables),
        [jnp.asarray(x) for x in data.distinct],
        lengths,
        *([jnp.asarray(data.cotangent)] if backward else []),
    ]
    compiled: list[Any] = []

    def build() -> None:
        compiled.append(jax.jit(both if backward else output).lower(*arguments).compile())

    def run() -> None:
        jax.block_until_ready(compiled[0](*arguments))  # type: ignore[no-untyped-call]

    def outputs(cotangent: Array) -> tuple[Any, Any]:
        if not backward:
            return np.asarray(compiled[0](*arguments)), None
        out, (_, gradients) = compiled[0](*arguments[:3], jnp.asarray(cotangent))
        return np.asarray(out), [np.asarray(g) for g in gradients]

    return Program(build, run, outputs, lambda: str(compiled[0].as_text()))
