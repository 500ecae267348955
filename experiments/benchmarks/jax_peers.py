"""Peers that are functions under `jax.jit`: jaxmha, jax.nn, Flax linen and nnx, Keras on JAX."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmha
from experiments.benchmarks.cases import Case
from experiments.benchmarks.data import Array, Data
from experiments.benchmarks.program import Program, UnsupportedError
from jaxmha.converters import flax as flax_converter
from jaxmha.converters import keras as keras_converter

# variables, lengths of the keys (or None), query, key, value -> output
Forward = Callable[[Any, Any, Any, Any, Any], Any]


def _program(case: Case, data: Data, forward: Forward, variables: Any) -> Program:
    lengths = None if case.lengths is None else jnp.asarray(case.lengths, jnp.int32)
    ids = list({id(x): x for x in (data.query, data.key, data.value)})
    places = [ids.index(id(x)) for x in (data.query, data.key, data.value)]

    def output(variables: Any, inputs: Any, lengths: Any) -> Any:
        return forward(variables, lengths, *(inputs[place] for place in places))

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

    def answer(cotangent: Array) -> tuple[Any, Any]:
        if not backward:
            return np.asarray(compiled[0](*arguments)), None
        out, (_, gradients) = compiled[0](*arguments[:3], jnp.asarray(cotangent))
        return np.asarray(out), [np.asarray(g) for g in gradients]

    return Program(build, run, answer, lambda: str(compiled[0].as_text()))


def _keys_there(lengths: Any, S: int) -> Any:
    """`B 1 1 S`, True = attend; None where all keys are."""
    return None if lengths is None else jnp.arange(S) < lengths[:, None, None, None]


def jaxmha_program(case: Case, data: Data) -> Program:
    causal = case.kind == "causal"

    def core(_: Any, lengths: Any, q: Any, k: Any, v: Any) -> Any:
        return jaxmha.dot_product_attention(
            q, k, v, is_causal=causal, key_value_seq_lengths=lengths
        )

    def layer(params: Any, lengths: Any, q: Any, k: Any, v: Any) -> Any:
        mask = None if lengths is None else jaxmha.Mask.lengths(key_value=lengths)
        return jaxmha.multi_head_attention(params, q, k, v, mask=mask, is_causal=causal)

    return _program(case, data, layer if data.params else core, data.params)


def jax_nn_program(case: Case, data: Data) -> Program:
    """The layer: projections as einsum around `jax.nn.dot_product_attention`."""

    def core(_: Any, lengths: Any, q: Any, k: Any, v: Any) -> Any:
        causal = case.kind == "causal"
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, key_value_seq_lengths=lengths
        )

    def layer(params: Any, lengths: Any, *inputs: Any) -> Any:
        q, k, v = (
            jnp.einsum("btd,dnh->btnh", x, kernel) + bias
            for x, (kernel, bias) in zip(inputs, params[:3], strict=True)
        )
        context = core(None, lengths, q, k, v)
        return jnp.einsum("btnh,nhd->btd", context, params.out.kernel) + params.out.bias

    return _program(case, data, layer if data.params else core, data.params)


def linen_program(case: Case, data: Data, *, swapped: bool = False) -> Program:
    """`swapped`: with jaxmha's `attention_fn`."""
    from flax import linen

    from jaxmha.flax import attention_fn as own

    attention_fn = own if swapped else linen.dot_product_attention

    def mask(lengths: Any) -> Any:
        if case.kind == "causal":
            return linen.make_causal_mask(jnp.ones((case.B, case.T)))
        return _keys_there(lengths, case.S)

    if data.params is None:

        def core(_: Any, lengths: Any, q: Any, k: Any, v: Any) -> Any:
            return attention_fn(q, k, v, mask=mask(lengths))

        return _program(case, data, core, None)
    module, variables = flax_converter.to_module(data.params, kind="linen")
    module = module.clone(attention_fn=attention_fn)

    def layer(variables: Any, lengths: Any, q: Any, k: Any, v: Any) -> Any:
        return module.apply(variables, q, k, v, mask=mask(lengths), deterministic=True)

    return _program(case, data, layer, variables)


def nnx_program(case: Case, data: Data, *, swapped: bool = False) -> Program:
    """`swapped`: with jaxmha's `attention_fn`."""
    from flax import nnx

    from jaxmha.flax import attention_fn as own

    attention_fn = own if swapped else nnx.dot_product_attention
    causal = case.kind == "causal"
    if data.params is None:

        def core(_: Any, lengths: Any, q: Any, k: Any, v: Any) -> Any:
            mask = _keys_there(lengths, case.S)
            return attention_fn(q, k, v, mask=mask, is_causal=causal)

        return _program(case, data, core, None)
    made = flax_converter.to_module(data.params)
    made.attention_fn = attention_fn
    graph, state, rest = nnx.split(made, nnx.Param, ...)

    def layer(state: Any, lengths: Any, q: Any, k: Any, v: Any) -> Any:
        module = nnx.merge(graph, state, rest)
        mask = _keys_there(lengths, case.S)
        return module(q, k, v, mask=mask, is_causal=causal, deterministic=True)

    return _program(case, data, layer, state)


def keras_program(case: Case, data: Data) -> Program:
    import keras

    if keras.backend.backend() != "jax":
        raise UnsupportedError(f"Keras runs on {keras.backend.backend()} here, not on jax")
    causal = case.kind == "causal"
    if data.params is None:

        def core(_: Any, lengths: Any, q: Any, k: Any, v: Any) -> Any:
            mask = _keys_there(lengths, case.S)
            return keras.ops.dot_product_attention(q, k, v, mask=mask, is_causal=causal)

        return _program(case, data, core, None)
    module = keras_converter.to_module(data.params)
    fixed = [variable.value for variable in module.non_trainable_variables]

    def layer(variables: Any, lengths: Any, q: Any, k: Any, v: Any) -> Any:
        mask = None if lengths is None else _keys_there(lengths, case.S)[:, 0]
        options = {"attention_mask": mask, "use_causal_mask": causal, "training": False}
        return module.stateless_call(variables, fixed, q, v, k, **options)[0]

    return _program(case, data, layer, [v.value for v in module.trainable_variables])
