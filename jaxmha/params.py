"""The parameters of one attention layer: a plain pytree of arrays."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxmha import notebook
from jaxmha.arrays import Array, params_hint
from jaxmha.dims import bind
from jaxmha.record_repr import record_repr


class Projection(NamedTuple):
    """One affine map. `bias` has the axes of `kernel` that are not contracted.

    Axes of the kernel: query `Dq N H`, key `Dk K H`, value `Dv K h`, out `N h Do`, gate `Dq N h` or
    `Dq N`; of the bias: query `N H`, key `K H`, value `K h`, out `Do`, gate `N h` or `N`.
    """

    kernel: Array
    bias: Array | None = None

    def __repr__(self) -> str:
        return record_repr(self)


class MHAParams(NamedTuple):
    """Parameters of multi-head attention. Heads are axes, so every size is read from a shape.

    Attributes:
      query: kernel `Dq N H`, bias `N H`.
      key: kernel `Dk K H`, bias `K H`. N is a multiple of K (K < N: grouped queries).
      value: kernel `Dv K h`, bias `K h`.
      out: kernel `N h Do`, bias `Do`; None: the heads are concatenated.
      bias_k: `K H`, a learned extra key position; comes with `bias_v` `K h`.
      bias_v: `K h`, the value of the extra position of `bias_k`.
      query_norm: `H` or `N H`, scale of the norm of projected queries (`Semantics.qk_norm`).
      key_norm: `H` or `K H`, scale of the norm of projected keys; comes with `query_norm`.
      query_norm_bias: `H` or `N H`, added to the scaled queries.
      key_norm_bias: `H` or `K H`, added to the scaled keys; comes with `query_norm_bias`.
      sinks: `N`, a learned logit of every query head that takes part in the softmax and has no
        value.
      gate: kernel `Dq N h` (a gate for every feature) or `Dq N` (for every head) with a bias `N h`
        or `N`: the sigmoid of this projection of the query features multiplies the output of the
        heads, before `out`.

    >>> import numpy as np
    >>> kernel = np.zeros((5, 2, 3), np.float32)
    >>> MHAParams(Projection(kernel), Projection(kernel), Projection(kernel), None).out is None
    True
    """

    query: Projection
    key: Projection
    value: Projection
    out: Projection | None = None
    bias_k: Array | None = None
    bias_v: Array | None = None
    query_norm: Array | None = None
    key_norm: Array | None = None
    query_norm_bias: Array | None = None
    key_norm_bias: Array | None = None
    sinks: Array | None = None
    gate: Projection | None = None

    def __repr__(self) -> str:
        return record_repr(self)

    def _repr_html_(self) -> str:
        # The leaves of a tree of partition specs or of strings have no shape.
        rows = [
            (name, CANONICAL[name], getattr(array, "shape", array), getattr(array, "dtype", ""))
            for name, array in leaves(self).items()
        ]
        count = sum(math.prod(x.shape) for x in leaves(self).values() if hasattr(x, "shape"))
        return notebook.table(f"MHAParams: {count:,} parameters", _COLUMNS, rows)


_COLUMNS = ("leaf", "axes", "shape", "dtype")

# Leaf of MHAParams -> its axes, in the order of the pytree: the reference for checks, converters
# and messages. An array in `FORMS` has one leaf name for each of its two shapes.
CANONICAL: dict[str, str] = {
    "query.kernel": "Dq N H",
    "query.bias": "N H",
    "key.kernel": "Dk K H",
    "key.bias": "K H",
    "value.kernel": "Dv K h",
    "value.bias": "K h",
    "out.kernel": "N h Do",
    "out.bias": "Do",
    "bias_k": "K H",
    "bias_v": "K h",
    "query_norm": "H",
    "query_norm_heads": "N H",
    "key_norm": "H",
    "key_norm_heads": "K H",
    "query_norm_bias": "H",
    "query_norm_bias_heads": "N H",
    "key_norm_bias": "H",
    "key_norm_bias_heads": "K H",
    "sinks": "N",
    "gate.kernel": "Dq N h",
    "gate_heads.kernel": "Dq N",
    "gate.bias": "N h",
    "gate_heads.bias": "N",
}
# Leaf -> the leaf name that the same array has in its other shape.
FORMS: dict[str, str] = {
    "query_norm": "query_norm_heads",
    "key_norm": "key_norm_heads",
    "query_norm_bias": "query_norm_bias_heads",
    "key_norm_bias": "key_norm_bias_heads",
    "gate.kernel": "gate_heads.kernel",
    "gate.bias": "gate_heads.bias",
}
_FIELDS = {other: name for name, other in FORMS.items()}
# NORM_SCALES: the leaves that are scales of norms. NORMS: their biases too.
NORM_SCALES = frozenset(("query_norm", "key_norm", "query_norm_heads", "key_norm_heads"))
NORMS = tuple(name for name in CANONICAL if "_norm" in name)


def field_of(leaf: str) -> str:
    """The field of `MHAParams` that holds a leaf: `query_norm` for `query_norm_heads`.

    >>> field_of("gate_heads.kernel"), field_of("query.bias")
    ('gate.kernel', 'query.bias')
    """
    return _FIELDS.get(leaf, leaf)


# Every leaf, its field, and the two parts of the field's name, such as `query` and `kernel`.
_PLACES = tuple(
    (leaf, field, *field.partition(".")[::2]) for leaf in CANONICAL for field in [field_of(leaf)]
)


def leaves(params: MHAParams) -> dict[str, Array]:
    """The leaves that are not None, by name (`query.kernel`), in the order of `CANONICAL`.

    The name of an array in `FORMS` depends on its number of axes: a `query_norm` with axes `N H` is
    `query_norm_heads`.
    """
    found: dict[str, Array] = {}
    leading = _rank(params.query.kernel) - 3
    for name, field, head, tail in _PLACES:
        value = getattr(params, head)
        if tail and value is not None:
            value = getattr(value, tail)
        if value is not None and name == _form(field, _rank(value) - leading):
            found[name] = value
    return found


def _rank(array: Array) -> int:
    return len(getattr(array, "shape", ()))


def _form(field: str, axes: int) -> str:
    """The leaf name of a field whose array has `axes` axes; `field` if `FORMS` has no such name."""
    other = FORMS.get(field, field)
    return other if len(CANONICAL[other].split()) == axes else field


def from_leaves(arrays: dict[str, Array]) -> MHAParams:
    """Builds parameters from the arrays by name; KeyError without kernels of query, key, value."""
    arrays = {field_of(name): array for name, array in arrays.items()}

    def projection(name: str) -> Projection:
        return Projection(arrays[f"{name}.kernel"], arrays.get(f"{name}.bias"))

    other = {name: arrays[name] for name in MHAParams._fields if name in arrays}
    return MHAParams(
        projection("query"),
        projection("key"),
        projection("value"),
        projection("out") if "out.kernel" in arrays else None,
        gate=projection("gate") if "gate.kernel" in arrays else None,
        **other,
    )


def check_projections(params: object, names: Sequence[str], optional: Sequence[str]) -> None:
    """Raises TypeError unless the fields `names` of params are projections with a kernel, as those
    of a partitioned or masked tree may not be; `optional`: the fields that may be None."""
    for name in names:
        part = getattr(params, name)
        if part is None and name in optional:
            continue
        if not isinstance(part, Projection):
            raise TypeError(f"params.{name} must be a Projection, got {type(part).__name__}")
        if part.kernel is None:
            raise TypeError(f"params.{name}.kernel must be an array, got None")


def check(params: MHAParams, leading: int = 0) -> dict[str, int]:
    """Checks every shape against the others and returns the sizes by letter.

    `leading` axes `*L` (stacked layers) are ignored.

    Raises:
      TypeError: params is no MHAParams, or a part of it is of a wrong type.
      ValueError: names the leaf, the axes expected and the shape received.
    """
    if not isinstance(params, MHAParams):
        raise TypeError(
            f"params must be a jaxmha.MHAParams, got {type(params).__name__}{params_hint(params)}"
        )
    check_projections(params, ("query", "key", "value", "out", "gate"), ("out", "gate"))
    sizes: dict[str, int] = {}
    found = leaves(params)
    for name, array in found.items():
        if not hasattr(array, "shape"):
            raise TypeError(f"params.{name} must be an array, got {type(array).__name__}")
        bind(f"params.{name}", array.shape, "*L " * (leading > 0) + CANONICAL[name], sizes)
    if sizes["K"] == 0 or sizes["N"] % sizes["K"]:
        raise ValueError(
            f"params: N={sizes['N']} query heads must be a multiple of K={sizes['K']} key/value "
            f"heads (params.query.kernel is {CANONICAL['query.kernel']}, params.key.kernel is "
            f"{CANONICAL['key.kernel']})"
        )
    if "gate_heads.kernel" in found and "gate.bias" in found:
        raise ValueError(
            "params: gate.kernel is (Dq, N), one gate per head, and gate.bias is (N, h)"
        )
    pairs = ("bias_k", "bias_v"), ("query_norm", "key_norm"), ("query_norm_bias", "key_norm_bias")
    for one, other in pairs:
        if (getattr(params, one) is None) != (getattr(params, other) is None):
            raise ValueError(f"params: {one} and {other} come together, or not at all")
    if params.query_norm_bias is not None and params.query_norm is None:
        raise ValueError("params: query_norm_bias is added to scaled queries, and needs query_norm")
    return sizes
