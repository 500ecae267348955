"""Peers that are functions of JAX: jaxmha, jax.nn, Flax linen and nnx, Keras on JAX.

Each peer has a function for attention on projected heads, and one that makes a whole layer;
`program` builds a case of the benchmark from them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxmha
from jaxmha import Mask, MHAParams
from jaxmha.bench.case import Case
from jaxmha.bench.data import Array, Data
from jaxmha.bench.program import Program, UnsupportedError, repeat
from jaxmha.converters import flax as flax_converter
from jaxmha.converters import keras as keras_converter
from jaxmha.implementations import SupportQuery

# (variables, query, key, value, conditions of the call) -> output
Layer = Callable[[Any, Any, Any, Any, "Attend"], Any]


class Attend(NamedTuple):
    """Conditions of a call. A query attends the first `lengths` (`B`) keys, or the keys where
    `keep` (`B S`) is True, or all; no later keys if `causal`; only keys of the same entry in
    `segments` (`B T`), and at most `window` away. `bias` (`B|1 N|1 T|1 S`) is added to the logits.
    `packed` (`B M`): lengths of the segments, for peers that take them."""

    lengths: Any = None
    keep: Any = None
    bias: Any = None
    causal: bool = False
    segments: Any = None
    window: int | None = None
    packed: Any = None

    @property
    def sides(self) -> tuple[int, int] | None:
        """The window as `(left, right)`."""
        if self.window is None:
            return None
        return self.window, 0 if self.causal else self.window

    def dense(self, T: int, S: int, *, causal: bool) -> jax.Array | None:
        """The conditions but the bias as one Boolean array `B|1 1 T|1 S`; None: all keys are attended.
        Causality is included if `causal` is True; False is for peers with an argument for it."""
        found = self.mask(S)
        i, j = jnp.arange(T)[:, None], jnp.arange(S)[None]
        parts = []
        if causal and self.causal:
            parts.append((j <= i)[None, None])
        if self.window is not None:
            parts.append((abs(i - j) <= self.window)[None, None])
        if self.segments is not None:
            parts.append((self.segments[:, :, None] == self.segments[:, None])[:, None])
        for part in parts:
            found = part if found is None else found & part
        return found

    def mask(self, S: int) -> jax.Array | None:
        """`lengths` or `keep` as `B 1 1 S`, True = attend; None: all keys are attended."""
        keep: jax.Array | None = self.keep
        if self.lengths is not None:
            keep = jnp.arange(S) < self.lengths[:, None]
        return None if keep is None else keep[:, None, None]


def of_jaxmha(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    to: Attend,
    implementation: str | SupportQuery | None = None,
) -> jax.Array:
    mask = None if to.keep is None else Mask.padding(key_value=to.keep)
    segments = None if to.segments is None else (to.segments, to.segments)
    if to.packed is not None:
        mask, segments = Mask.packed(to.packed, size=q.shape[1]), None
    out: jax.Array = jaxmha.dot_product_attention(
        *(q, k, v, to.bias, mask),
        is_causal=to.causal,
        key_value_seq_lengths=to.lengths,
        local_window_size=to.sides,
        segment_ids=segments,
        implementation=implementation,
    )
    return out


def of_jax_nn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    to: Attend,
    implementation: Literal["xla", "cudnn"] | None = None,
) -> jax.Array:
    mask = None if to.keep is None else to.keep[:, None, None]
    if to.segments is not None:  # jax.nn has arguments for all other conditions
        same = (to.segments[:, :, None] == to.segments[:, None])[:, None]
        mask = same if mask is None else mask & same
    if mask is not None and implementation == "cudnn":  # cuDNN broadcasts neither T nor S
        mask = jnp.broadcast_to(mask, (len(q), 1, q.shape[1], k.shape[1]))
    out: jax.Array = jax.nn.dot_product_attention(
        *(q, k, v, to.bias, mask),
        is_causal=to.causal,
        key_value_seq_lengths=to.lengths,
        local_window_size=to.sides,
        implementation=implementation,
    )
    return out


def _linen_mask(q: jax.Array, k: jax.Array, to: Attend) -> jax.Array | None:
    """Linen's mask with causality included, for which linen has no argument."""
    from flax import linen

    others = to.mask(1), to.window, to.segments
    square = q.shape[1] == k.shape[1]
    if to.causal and square and all(condition is None for condition in others):
        causal: jax.Array = linen.make_causal_mask(jnp.ones((len(q), q.shape[1])))
        return causal
    return to.dense(q.shape[1], k.shape[1], causal=True)


def of_linen(
    q: jax.Array, k: jax.Array, v: jax.Array, to: Attend, *, swapped: bool = False
) -> jax.Array:
    """Attention by linen's function, or by jaxmha's `attention_fn` if `swapped`."""
    mask = _linen_mask(q, k, to)
    out: jax.Array = _flax_function("linen", swapped)(*_repeated(q, k, v, swapped), to.bias, mask)
    return out


def of_nnx(
    q: jax.Array, k: jax.Array, v: jax.Array, to: Attend, *, swapped: bool = False
) -> jax.Array:
    """Attention by nnx's function, or by jaxmha's `attention_fn` if `swapped`."""
    function = _flax_function("nnx", swapped)
    mask = to.dense(q.shape[1], k.shape[1], causal=False)
    q, k, v = _repeated(q, k, v, swapped)
    out: jax.Array = function(q, k, v, bias=to.bias, mask=mask, is_causal=to.causal)
    return out


def _repeated(
    q: jax.Array, k: jax.Array, v: jax.Array, swapped: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Repeats heads of keys and values for Flax's own functions, which have no grouped heads."""
    if swapped or q.shape[2] == k.shape[2]:
        return q, k, v
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    return q, k, v


def of_keras(q: jax.Array, k: jax.Array, v: jax.Array, to: Attend) -> jax.Array:
    import keras

    mask = to.dense(q.shape[1], k.shape[1], causal=False)
    options: Any = {"bias": to.bias, "mask": mask, "is_causal": to.causal}
    out: jax.Array = keras.ops.dot_product_attention(q, k, v, **options)
    return out


def _flax_function(kind: str, swapped: bool) -> Any:
    import flax

    from jaxmha.flax import attention_fn

    return attention_fn if swapped else getattr(flax, kind).dot_product_attention


def jaxmha_layer(params: MHAParams, implementation: Any = None) -> tuple[Any, Layer]:
    def layer(params: Any, q: Any, k: Any, v: Any, to: Attend) -> Any:
        mask = None if to.lengths is None else Mask.lengths(key_value=to.lengths)
        if to.keep is not None:
            mask = Mask.padding(key_value=to.keep)
        if to.sides is not None:
            sides = Mask.window(*to.sides)
            mask = sides if mask is None else mask & sides
        if to.segments is not None:
            same = Mask.segments(query_ids=to.segments, key_value_ids=to.segments)
            if to.packed is not None:
                same = Mask.packed(to.packed, size=q.shape[1])
            mask = same if mask is None else mask & same
        options: Any = {"mask": mask, "bias": to.bias, "is_causal": to.causal}
        return jaxmha.multi_head_attention(
            params, q, k, v, **options, implementation=implementation
        )

    return params, layer


def jax_nn_layer(params: MHAParams, implementation: Any = None) -> tuple[Any, Layer]:
    """Projections as einsum around `jax.nn.dot_product_attention`."""

    def layer(params: Any, q: Any, k: Any, v: Any, to: Attend) -> Any:
        q, k, v = (
            jnp.einsum("btd,dnh->btnh", x, kernel) + bias
            for x, (kernel, bias) in zip((q, k, v), params[:3], strict=True)
        )
        context = of_jax_nn(q, k, v, to, implementation)
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
        mask = to.dense(q.shape[1], k.shape[1], causal=False)
        options: Any = {"mask": mask, "is_causal": to.causal}
        return nnx.merge(graph, state, rest)(q, k, v, **options, deterministic=True)

    return state, layer


def keras_layer(params: MHAParams, *, scores: bool = False) -> tuple[Any, Layer]:
    """Makes Keras' layer; `scores`: its calls also ask for the attention scores, by another code path."""
    import keras

    if keras.backend.backend() != "jax":
        raise UnsupportedError(f"Keras runs on {keras.backend.backend()} here, not on jax")
    module = keras_converter.to_module(params)
    fixed = [variable.value for variable in module.non_trainable_variables]

    def layer(variables: Any, q: Any, k: Any, v: Any, to: Attend) -> Any:
        _no_bias(to)
        mask = to.dense(q.shape[1], k.shape[1], causal=False)
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


# Peer -> its attention on heads, and the function that makes its layer from parameters.
PEERS: dict[str, tuple[Callable[..., Any], Callable[[MHAParams], tuple[Any, Layer]]]] = {
    "jaxmha": (of_jaxmha, jaxmha_layer),
    "jax-nn": (of_jax_nn, jax_nn_layer),
    "flax-linen": (of_linen, linen_layer),
    "flax-nnx": (of_nnx, nnx_layer),
    "flax-linen+jaxmha": (partial(of_linen, swapped=True), partial(linen_layer, swapped=True)),
    "flax-nnx+jaxmha": (partial(of_nnx, swapped=True), partial(nnx_layer, swapped=True)),
    "keras-jax": (of_keras, keras_layer),
}


def functions(peer: str) -> tuple[Callable[..., Any], Callable[[MHAParams], tuple[Any, Layer]]]:
    """The entry of `PEERS` for a peer, whose name may end in `:` and an implementation."""
    name, _, implementation = peer.partition(":")
    core, layer = PEERS[name]
    if not implementation:
        return core, layer
    chosen: Any = {"implementation": implementation}
    return partial(core, **chosen), partial(layer, **chosen)


def program(peer: str, case: Case, data: Data) -> Program:
    """The program of a case. Weights, inputs and conditions are arguments: XLA would fold constants."""
    core, make = functions(peer)

    def placed(x: Array | jax.Array) -> jax.Array:
        return jnp.asarray(x, case.dtype)

    variables, layer = None, None
    if data.params is not None:
        variables, layer = make(jax.tree.map(placed, data.params))
    ids = list({id(x): x for x in (data.query, data.key, data.value)})
    places = [ids.index(id(x)) for x in (data.query, data.key, data.value)]
    fixed: Any = {"causal": case.is_causal, "window": case.window}

    def output(variables: Any, inputs: Any, conditions: Any) -> Any:
        q, k, v = (inputs[place] for place in places)
        to = Attend(**conditions, **fixed)
        return core(q, k, v, to) if layer is None else layer(variables, q, k, v, to)

    def both(variables: Any, inputs: Any, conditions: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(lambda v, x: output(v, x, conditions), variables, inputs)
        return out, pull(cotangent)

    backward = case.direction == "backward"
    arguments = [
        jax.tree.map(jnp.asarray, variables),
        [placed(x) for x in data.distinct],
        _conditions(case, data),
        *([placed(data.cotangent)] if backward else []),
    ]
    compiled: list[Any] = []

    def build() -> None:
        compiled.append(jax.jit(both if backward else output).lower(*arguments).compile())

    def run(calls: int = 1) -> None:
        repeat(lambda: compiled[0](*arguments), calls)

    def outputs(cotangent: Array) -> tuple[Any, Any]:
        if not backward:
            return np.asarray(compiled[0](*arguments), np.float32), None
        out, (_, gradients) = compiled[0](*arguments[:3], placed(cotangent))
        return np.asarray(out, np.float32), [np.asarray(g, np.float32) for g in gradients]

    text, nbytes = lambda: str(compiled[0].as_text()), lambda: bytes_of(compiled[0])
    return Program(build, run, outputs, text, nbytes)


def bytes_of(compiled: Any) -> int:
    """Bytes of temporaries and results of a compiled program; 0 if XLA reports none."""
    memory = compiled.memory_analysis()
    if memory is None:
        return 0
    made = memory.temp_size_in_bytes + memory.output_size_in_bytes
    return int(made - memory.alias_size_in_bytes)


def _conditions(case: Case, data: Data) -> dict[str, Any]:
    """The arrays of `Attend` that the case has."""
    found: dict[str, Any] = {}
    if case.lengths is not None:
        lengths = jnp.asarray(case.lengths, jnp.int32)
        found["lengths"] = lengths
        if case.boolean:
            found = {"keep": jnp.arange(case.S) < lengths[:, None]}
    if case.segment_ids is not None:
        found["segments"] = jnp.asarray(case.segment_ids)
        if case.by_lengths:
            found["packed"] = jnp.asarray(case.packed_lengths)
    if data.bias is not None:
        found["bias"] = jnp.asarray(data.bias, case.dtype)
    return found
