"""Builds the nodes of multi-head attention from parameters and behaviour."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha import MHAParams, Semantics, bias_kv, init_params
from jaxmha.arrays import Array, DTypeLike, as_dtype, to_dtype
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.dims import bind
from jaxmha.implementations.base import accumulation_dtype
from jaxmha.introspect.framework_differences import Arrays, differences, stored
from jaxmha.introspect.graph import DataFlow
from jaxmha.introspect.node import Kind, Node, Stored
from jaxmha.params import CANONICAL, check, field_of, leaves
from jaxmha.semantics import logit_scale


def describe(
    params: MHAParams | None = None,
    semantics: Semantics = Semantics(),
    *,
    query_len: int,
    kv_len: int | None = None,
    batch: int = 1,
    dtype: DTypeLike | None = None,
    is_causal: bool = False,
    mask: Sequence[int] | None = None,
    framework: str | None = None,
    **sizes: int | bool | None,
) -> DataFlow:
    """Lists every node of a multi-head attention layer, without computing any.

    Args:
      params: its parameters, or `jax.ShapeDtypeStruct`s instead of arrays; None takes the shapes
        that `jaxmha.init_params` would create.
      semantics: its behaviour; dropout counts as active.
      query_len: T.
      kv_len: S, default T.
      batch: B.
      dtype: of the inputs, and of parameters if `params` is None; default the dtype of `params`, or
        float32.
      is_causal: query i attends keys j <= i.
      mask: shape of an additional Boolean mask, broadcastable to `(B, N, T, S)`.
      framework: `torch`, `keras`, `tensorflow`, `flax-linen`, `flax-nnx`, `jax`: lists parameters
        as this framework stores them, and only its differences; None lists all differences.
      sizes: if `params` is None: `num_heads`, `features` and other arguments of
        `jaxmha.init_params` (`num_kv_heads`, `head_dim`, `use_bias`, ...).

    Raises:
      ValueError: a size does not fit.
      TypeError: an unknown size, or a dtype that is not floating.

    >>> flow = describe(num_heads=8, features=512, query_len=10, batch=1)
    >>> flow["logits"].axes, flow["logits"].shape, flow["logits"].flops
    ('B N T S', (1, 8, 10, 10), 102400)
    """
    T, S = query_len, query_len if kv_len is None else kv_len
    for name, size in (("query_len", T), ("kv_len", S), ("batch", batch)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")
    given = None if dtype is None else as_dtype("dtype", dtype)
    if params is None:
        params = _shapes(given or np.dtype(np.float32), sizes)
    elif sizes:
        raise TypeError(f"params have their own sizes: leave out {', '.join(sizes)}")
    params = jax.tree.map(_placeholder, params)
    letters = {"B": batch, "T": T, "S": S, **check(params)}
    letters.setdefault("Do", letters["N"] * letters["h"])
    compute = _compute_dtype(params, given)
    arrays, refused = stored(framework, params, semantics, letters)
    graph = _Graph(letters, framework, arrays, params, semantics, compute)
    _build(graph, given or compute, is_causal, mask)
    pairs = sum(min(i + 1, S) for i in range(T)) + T * graph.extra if is_causal else None
    return DataFlow(letters, str(compute), framework, refused, tuple(graph.nodes.values()), pairs)


def _compute_dtype(params: MHAParams, given: np.dtype | None) -> np.dtype:
    """The promoted dtype of parameters and inputs.

    Raises:
      TypeError: one of them is not floating.
    """
    kinds: set[np.dtype] = {x.dtype for x in leaves(params).values()}
    kinds |= set() if given is None else {given}
    if wrong := [str(kind) for kind in kinds if not jnp.issubdtype(kind, jnp.floating)]:
        raise TypeError(f"dtype must be floating, got {', '.join(wrong)}")
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*kinds)


def _shapes(dtype: np.dtype, sizes: Mapping[str, Any]) -> MHAParams:
    """Shapes of initial parameters, checked as `init_params` does."""
    if missing := {"num_heads", "features"} - sizes.keys():
        raise TypeError(f"give params, or {' and '.join(sorted(missing, reverse=True))}")
    draw: Any = partial(init_params, **{**sizes, "dtype": dtype})
    with jax.enable_x64(dtype == jnp.float64):
        found: MHAParams = jax.eval_shape(lambda: draw(jax.random.key(0)))
    return found


def _placeholder(x: Array | jax.ShapeDtypeStruct) -> NDArray:
    """An array of the same shape and dtype that takes no memory."""
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)


class _Graph:
    """Nodes by name; `add` computes the cost of each."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        framework: str | None,
        arrays: Arrays,
        params: MHAParams,
        semantics: Semantics,
        compute: np.dtype,
    ) -> None:
        self.sizes, self.framework, self.arrays = sizes, framework, arrays
        self.params, self.semantics = params, semantics
        self.compute, self.wide = compute, np.dtype(accumulation_dtype(compute))
        self.extra = bias_kv.count(params, semantics)
        self.keys = f"S+{self.extra}" if self.extra else "S"
        self.pairs = f"B N T {self.keys}"
        self.nodes: dict[str, Node] = {}
        self.parameter_bytes = {
            leaf: math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
            for leaf, x in leaves(params).items()
        }

    def add(
        self,
        name: str,
        kind: Kind,
        formula: str,
        axes: str,
        dtype: np.dtype,
        inputs: Iterable[str] = (),
        parameters: Iterable[str] = (),
        cost: str = "0",
    ) -> str:
        """Adds a node and returns its name. `parameters` are leaves of MHAParams."""
        inputs, parameters = tuple(inputs), tuple(parameters)
        shape = tuple(extent(axis, self.sizes) for axis in axes.split())
        read = sum(self.nodes[other].size for other in inputs)
        written = math.prod(shape) * np.dtype(dtype).itemsize if kind != "input" else 0
        shown = dict.fromkeys(one for leaf in parameters for one in self.arrays.get(leaf, ()))
        self.nodes[name] = Node(
            name,
            kind,
            formula,
            axes,
            shape,
            str(dtype),
            inputs,
            tuple(Stored(*one) for one in shown),
            cost,
            evaluate(cost, self.sizes),
            read + sum(self.parameter_bytes[leaf] for leaf in parameters),
            written,
            differences(name, self.framework),
        )
        return name


def _build(graph: _Graph, given: np.dtype, is_causal: bool, mask: Sequence[int] | None) -> None:
    """Adds every node, in the order of computation in `jaxmha`."""
    for name, axes in (("query", "B T Dq"), ("key", "B S Dk"), ("value", "B S Dv")):
        graph.add(name, "input", "given", axes, given)
    query, key, value = _extend(graph, *_clip(graph, *_normalise(graph, *_project(graph))))
    logits = _mask(graph, _logits(graph, query, key), is_causal, mask)
    _combine(graph, _weights(graph, logits), value)


def _project(graph: _Graph) -> tuple[str, str, str]:
    """Adds the heads of query, key and value; returns the names of their nodes."""
    present = leaves(graph.params)

    def heads(name: str, axes: str, features: str) -> str:
        own = [leaf for leaf in (f"{name}.kernel", f"{name}.bias") if leaf in present]
        return graph.add(
            f"{name}_heads",
            "product",
            f"Σ_{features} {name} · " + " + ".join(own),
            f"B {axes}",
            graph.compute,
            [name],
            own,
            f"2 B {axes} {features}" + f" + B {axes}" * (len(own) > 1),
        )

    return heads("query", "T N H", "Dq"), heads("key", "S K H", "Dk"), heads("value", "S K h", "Dv")


def _normalise(graph: _Graph, query: str, key: str, value: str) -> tuple[str, str, str]:
    """Adds the normalisation of query and key heads, if there is one."""
    if graph.semantics.qk_norm is None:
        return query, key, value
    of_layer = graph.semantics.qk_norm == "layer"
    operation = "LayerNorm" if of_layer else "RMSNorm"

    over = "all heads" if graph.semantics.qk_norm_scope == "heads" else "H"

    def normed(name: str, heads: str, axes: str) -> str:
        own = [x for x in leaves(graph.params) if field_of(x).startswith(f"{name}_norm")]
        offset = graph.semantics.qk_norm_offset
        scale = f"({offset:g} + {name}_norm)" if offset else f"{name}_norm"
        biased = any("bias" in leaf for leaf in own)
        formula = f"{operation} over {over}" + f", times {scale}" * bool(own)
        return graph.add(
            f"{name}_normed",
            "elementwise",
            formula + f", plus {name}_norm_bias" * biased,
            f"{axes} H",
            graph.compute,
            [heads],
            own,
            f"{(6 if of_layer else 4) - (not own) + biased} {axes} H + 2 {axes}",
        )

    return normed("query", query, "B T N"), normed("key", key, "B S K"), value


def _clip(graph: _Graph, *heads: str) -> tuple[str, ...]:
    """Adds the clipping of query, key and value heads if `semantics.clip_qkv` is set."""
    clip = graph.semantics.clip_qkv
    if clip is None:
        return heads
    return tuple(
        graph.add(
            f"{name}_clipped",
            "elementwise",
            f"min(max({of}, -{clip:g}), {clip:g})",
            f"B {axes}",
            graph.compute,
            [of],
            (),
            f"2 B {axes}",
        )
        for name, of, axes in zip(
            ("query", "key", "value"), heads, ("T N H", "S K H", "S K h"), strict=True
        )
    )


def _extend(graph: _Graph, query: str, key: str, value: str) -> tuple[str, str, str]:
    """Adds the extra key positions, if there are any."""
    if not graph.extra:
        return query, key, value
    learned, zeros = graph.params.bias_k is not None, graph.semantics.add_zero_attn

    def extended(name: str, heads: str, leaf: str, size: str) -> str:
        rows = [heads, *[leaf] * learned, *["0"] * zeros]
        return graph.add(
            f"{name}_extended",
            "joined",
            f"[{', '.join(rows)}] along S",
            f"B {graph.keys} K {size}",
            graph.compute,
            [heads],
            [leaf] * learned,
        )

    return query, extended("key", key, "bias_k", "H"), extended("value", value, "bias_v", "h")


def _logits(graph: _Graph, query: str, key: str) -> str:
    """Adds the scaled query, the logits, and their soft cap if there is one."""
    semantics, pairs = graph.semantics, graph.pairs
    scale = logit_scale(semantics, graph.sizes["H"])
    root = " = 1/√H" if semantics.scale is None else ""
    formula = f"{query} × {scale:.4g}{root}"
    axes = "B T N H"
    scaled = graph.add("scaled_query", "elementwise", formula, axes, graph.wide, [query], cost=axes)
    group = graph.sizes["N"] // graph.sizes["K"]
    shared = f", head n with key head n // {group}" if group > 1 else ""
    formula = f"Σ_H {scaled} · {key}{shared}"
    logits = graph.add(
        "logits", "product", formula, pairs, graph.wide, [scaled, key], cost=f"2 {pairs} H"
    )
    if (cap := semantics.logits_soft_cap) is None:
        return logits
    formula = f"{cap:g} × tanh({logits} / {cap:g})"
    return graph.add(
        "capped_logits", "elementwise", formula, pairs, graph.wide, [logits], cost=f"3 {pairs}"
    )


def _mask(graph: _Graph, logits: str, is_causal: bool, mask: Sequence[int] | None) -> str:
    """Adds the masked logits, if anything is masked."""
    window = graph.semantics.local_window_size
    if mask is None and not is_causal and window is None:
        return logits
    hidden, inputs = [], [logits]
    if mask is not None:
        axes = _of_mask(mask, graph)
        inputs.append(graph.add("mask", "input", "True = attend", axes, np.dtype(bool)))
        hidden.append("not mask")
    if is_causal:
        hidden.append("i < j < S" if graph.extra else "j > i")
    if window is not None:
        left, right = window
        hidden += [f"j < i - {left}"] * (left is not None)
        hidden += [f"i + {right} < j" + " < S" * bool(graph.extra)] * (right is not None)
    formula = f"-inf where {' or '.join(hidden)}, else {logits}"
    return graph.add("masked_logits", "elementwise", formula, graph.pairs, graph.wide, inputs)


def _weights(graph: _Graph, logits: str) -> str:
    """Adds the softmax, and dropout if there is any."""
    pairs, wide, rate = graph.pairs, graph.wide, graph.semantics.dropout_rate
    of_softmax = to_dtype(graph.semantics.softmax_dtype or wide)
    inside = f" in {of_softmax}" if of_softmax != wide else ""
    sinks = ["sinks"] * (graph.params.sinks is not None)
    formula = f"softmax over S{' and sinks' * len(sinks)} of {logits}{inside}"
    # Per row: S - 1 comparisons, S differences, S exponentials, S - 1 additions, S divisions.
    cost = f"5 {pairs} - 2 B N T" + " + 4 B N T" * len(sinks)
    weights = graph.add("weights", "softmax", formula, pairs, wide, [logits], sinks, cost)
    if not rate:
        return weights
    formula = f"dropout: 0, or {weights} / {1 - rate:g}"
    return graph.add("kept_weights", "elementwise", formula, pairs, wide, [weights], cost=pairs)


def _combine(graph: _Graph, weights: str, value: str) -> None:
    """Adds the weighted values and the output projection, or the concatenated heads."""
    context = graph.add(
        "context",
        "product",
        f"Σ_S {weights} · {value}",
        "B T N h",
        graph.compute,
        [weights, value],
        cost=f"2 {graph.pairs} h",
    )
    context = _gate(graph, context)
    if graph.params.out is None:
        graph.add("out", "joined", "heads side by side", "B T Do", graph.compute, [context])
        return
    present = leaves(graph.params)
    own = [leaf for leaf in ("out.kernel", "out.bias") if leaf in present]
    cost = "2 B T N h Do" + " + B T Do" * (len(own) > 1)
    formula = f"Σ_N,h {context} · " + " + ".join(own)
    graph.add("out", "product", formula, "B T Do", graph.compute, [context], own, cost)


def _gate(graph: _Graph, context: str) -> str:
    """Adds the gate, which multiplies the output of the heads, if `params` has one."""
    own = [leaf for leaf in leaves(graph.params) if field_of(leaf).startswith("gate")]
    if not own:
        return context
    axes = "B T N h" if CANONICAL[own[0]].endswith("h") else "B T N"
    cost = f"2 {axes} Dq + 4 {axes}" + f" + {axes}" * (len(own) > 1)
    formula = f"sigmoid(Σ_Dq query · {' + '.join(own)})"
    gate = graph.add("gate", "product", formula, axes, graph.compute, ["query"], own, cost)
    inputs = [context, gate]
    formula = f"{context} × {gate}"
    return graph.add(
        "gated_context", "elementwise", formula, "B T N h", graph.compute, inputs, cost="B T N h"
    )


def _of_mask(mask: Sequence[int], graph: _Graph) -> str:
    """Axes of a mask of this shape: letters, or 1 for a broadcast axis."""
    extra = graph.nodes["logits"].axes.split()[-1]
    letters = ["B", "N", "T", "S" if mask and mask[-1] == graph.sizes["S"] else extra]
    sizes = {**graph.sizes, extra: extent(extra, graph.sizes)}
    if len(mask) > 4 or not mask:
        raise ValueError(f"mask: expected axes (B, N, T, S) or the last of them, got {tuple(mask)}")
    letters = letters[-len(mask) :]
    bind("mask", mask, " ".join(f"#{letter}" for letter in letters), sizes)
    pairs = zip(letters, mask, strict=True)
    return " ".join("1" if n == 1 != sizes[letter] else letter for letter, n in pairs)


def extent(axis: str, sizes: Mapping[str, int]) -> int:
    """The size of an axis: a number, a letter, or `S+1`.

    >>> extent("S+2", {"S": 5})
    7
    """
    return sum(int(part) if part.isdigit() else sizes[part] for part in axis.split("+"))


def evaluate(cost: str, sizes: Mapping[str, int]) -> int:
    """Evaluates a sum of products of sizes.

    >>> evaluate("2 B T - 3 B", {"B": 2, "T": 5})
    14
    """
    terms = cost.replace(" - ", " + -1 ").split(" + ")
    return sum(
        math.prod(-1 if a == "-1" else extent(a, sizes) for a in term.split()) for term in terms
    )
