"""Builds the nodes of multi-head attention from parameters and behaviour."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha import MHAParams, Semantics, bias_kv, init_params
from jaxmha.arrays import DTypeLike
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.dims import bind
from jaxmha.implementations.base import accumulation_dtype
from jaxmha.introspect.framework_differences import Arrays, differences, stored
from jaxmha.introspect.graph import DataFlow, Kind, Node, Stored
from jaxmha.params import check, leaves


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
    **sizes: Any,
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
    if params is None:
        params = _shapes(jnp.dtype(dtype or jnp.float32), sizes)
    elif sizes:
        raise TypeError(f"params have their sizes, so {', '.join(sizes)} cannot be given beside")
    params = jax.tree.map(_placeholder, params)
    letters = {"B": batch, "T": T, "S": S, **check(params)}
    letters.setdefault("Do", letters["N"] * letters["h"])
    kinds = {jnp.dtype(x.dtype) for x in leaves(params).values()}
    kinds |= {jnp.dtype(dtype)} if dtype is not None else set()
    if wrong := [str(kind) for kind in kinds if not jnp.issubdtype(kind, jnp.floating)]:
        raise TypeError(f"dtype must be floating, got {', '.join(wrong)}")
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        compute = jnp.result_type(*kinds)
    given = jnp.dtype(dtype) if dtype is not None else compute
    arrays, refused = stored(framework, params, semantics, letters)
    graph = _Graph(letters, framework, arrays)
    _build(graph, params, semantics, given, compute, is_causal, mask)
    extra = bias_kv.count(params, semantics)
    pairs = sum(min(i + 1, S) for i in range(T)) + T * extra if is_causal else None
    return DataFlow(letters, str(compute), framework, refused, tuple(graph.nodes.values()), pairs)


def _shapes(dtype: np.dtype[Any], sizes: Mapping[str, Any]) -> MHAParams:
    """Shapes of initial parameters, checked as `init_params` does."""
    if missing := {"num_heads", "features"} - sizes.keys():
        raise TypeError(f"give params, or {' and '.join(sorted(missing, reverse=True))}")
    draw: Any = partial(init_params, **{**sizes, "dtype": dtype})
    with jax.enable_x64(dtype == jnp.float64):
        found: MHAParams = jax.eval_shape(lambda: draw(jax.random.key(0)))
    return found


def _placeholder(x: Any) -> NDArray:
    """An array of the same shape and dtype that takes no memory."""
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)


class _Graph:
    """Nodes by name; `add` computes the cost of each."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        framework: str | None,
        arrays: Arrays,
    ) -> None:
        self.sizes, self.framework, self.arrays = sizes, framework, arrays
        self.nodes: dict[str, Node] = {}
        self.parameter_bytes: dict[str, int] = {}

    def add(
        self,
        name: str,
        kind: Kind,
        formula: str,
        axes: str,
        dtype: Any,
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


def _build(
    graph: _Graph,
    params: MHAParams,
    semantics: Semantics,
    given: np.dtype[Any],
    compute: np.dtype[Any],
    is_causal: bool,
    mask: Sequence[int] | None,
) -> None:
    """Adds every node, in the order of computation in `jaxmha`."""
    there = leaves(params)
    graph.parameter_bytes = {
        leaf: math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for leaf, x in there.items()
    }
    wide = accumulation_dtype(compute)
    extra = bias_kv.count(params, semantics)
    E = f"S+{extra}" if extra else "S"
    pairs = f"B N T {E}"

    for name, axes in (("query", "B T Dq"), ("key", "B S Dk"), ("value", "B S Dv")):
        graph.add(name, "input", "given", axes, given)
    heads = {}
    for name, axes, D in (
        ("query", "T N H", "Dq"),
        ("key", "S K H", "Dk"),
        ("value", "S K h", "Dv"),
    ):
        own = [leaf for leaf in (f"{name}.kernel", f"{name}.bias") if leaf in there]
        heads[name] = graph.add(
            f"{name}_heads",
            "product",
            f"Σ_{D} {name} · " + " + ".join(own),
            f"B {axes}",
            compute,
            [name],
            own,
            f"2 B {axes} {D}" + f" + B {axes}" * (len(own) > 1),
        )
    if semantics.qk_norm is not None:
        of_layer = semantics.qk_norm == "layer"
        word = "LayerNorm" if of_layer else "RMSNorm"
        for name, axes in (("query", "B T N"), ("key", "B S K")):
            heads[name] = graph.add(
                f"{name}_normed",
                "elementwise",
                f"{word} over H, times {name}_norm",
                f"{axes} H",
                compute,
                [heads[name]],
                [f"{name}_norm"],
                f"{6 if of_layer else 4} {axes} H + 2 {axes}",
            )
    if extra:
        learned = params.bias_k is not None
        for name, leaf, size in (("key", "bias_k", "H"), ("value", "bias_v", "h")):
            rows = [heads[name], *[leaf] * learned, *["0"] * semantics.add_zero_attn]
            heads[name] = graph.add(
                f"{name}_extended",
                "joined",
                f"[{', '.join(rows)}] along S",
                f"B {E} K {size}",
                compute,
                [heads[name]],
                [leaf] * learned,
            )

    scale = graph.sizes["H"] ** -0.5 if semantics.scale is None else semantics.scale
    root = " = 1/√H" if semantics.scale is None else ""
    scaled = graph.add(
        "scaled_query",
        "elementwise",
        f"{heads['query']} × {scale:.4g}{root}",
        "B T N H",
        wide,
        [heads["query"]],
        cost="B T N H",
    )
    group = graph.sizes["N"] // graph.sizes["K"]
    shared = f", head n with key head n // {group}" if group > 1 else ""
    last = graph.add(
        "logits",
        "product",
        f"Σ_H {scaled} · {heads['key']}{shared}",
        pairs,
        wide,
        [scaled, heads["key"]],
        cost=f"2 {pairs} H",
    )
    if (cap := semantics.logits_soft_cap) is not None:
        formula = f"{cap:g} × tanh({last} / {cap:g})"
        last = graph.add(
            "capped_logits", "elementwise", formula, pairs, wide, [last], cost=f"3 {pairs}"
        )
    if mask is not None or is_causal:
        hidden, inputs = [], [last]
        if mask is not None:
            inputs.append(
                graph.add("mask", "input", "True = attend", _of_mask(mask, graph), "bool")
            )
            hidden.append("not mask")
        if is_causal:
            hidden.append("j > i" if not extra else "i < j < S")
        formula = f"-inf where {' or '.join(hidden)}, else {last}"
        last = graph.add("masked_logits", "elementwise", formula, pairs, wide, inputs)
    of_softmax = np.dtype(semantics.softmax_dtype or wide)
    inside = f" in {of_softmax}" if of_softmax != wide else ""
    last = graph.add(
        "weights",
        "softmax",
        f"softmax over S of {last}{inside}",
        pairs,
        wide,
        [last],
        # Per row: S - 1 comparisons, S differences, S exponentials, S - 1 additions, S divisions.
        cost=f"5 {pairs} - 2 B N T",
    )
    if semantics.dropout_rate:
        last = graph.add(
            "kept_weights",
            "elementwise",
            f"dropout: 0, or {last} / {1 - semantics.dropout_rate:g}",
            pairs,
            wide,
            [last],
            cost=pairs,
        )
    context = graph.add(
        "context",
        "product",
        f"Σ_S {last} · {heads['value']}",
        "B T N h",
        compute,
        [last, heads["value"]],
        cost=f"2 {pairs} h",
    )
    if params.out is None:
        graph.add("out", "joined", "heads side by side", "B T Do", compute, [context])
        return
    own = [leaf for leaf in ("out.kernel", "out.bias") if leaf in there]
    cost = "2 B T N h Do" + " + B T Do" * (len(own) > 1)
    formula = f"Σ_N,h {context} · " + " + ".join(own)
    graph.add("out", "product", formula, "B T Do", compute, [context], own, cost)


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
