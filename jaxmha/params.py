"""The parameters of one attention layer: a plain pytree of arrays."""

from typing import NamedTuple

from jaxmha.arrays import Array
from jaxmha.dims import bind


class Projection(NamedTuple):
    """One affine map. `bias` has the axes of `kernel` that are not contracted.

    Axes of the kernel: query `Dq N H`, key `Dk K H`, value `Dv K h`, out `N h Do`; of the bias:
    query `N H`, key `K H`, value `K h`, out `Do`.
    """

    kernel: Array
    bias: Array | None = None


class MHAParams(NamedTuple):
    """Parameters of multi-head attention. Heads are axes, so every size is read from a shape.

    Attributes:
      query: kernel `Dq N H`, bias `N H`.
      key: kernel `Dk K H`, bias `K H`. N is a multiple of K (K < N: grouped queries).
      value: kernel `Dv K h`, bias `K h`.
      out: kernel `N h Do`, bias `Do`; None: the heads are concatenated.
      bias_k: `K H`, a learned extra key position; comes with `bias_v` `K h`.
      bias_v: `K h`, the value of the extra position of `bias_k`.
      query_norm: `H`, scale of the normalisation of projected queries (`Semantics.qk_norm`).
      key_norm: `H`, scale of the normalisation of projected keys.

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


# Axes of every leaf of MHAParams: the reference for checks, converters and messages.
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
    "key_norm": "H",
}


def leaves(params: MHAParams) -> dict[str, Array]:
    """The leaves that are not None, by name (`query.kernel`), in the order of `CANONICAL`."""
    found: dict[str, Array] = {}
    for name in CANONICAL:
        head, _, tail = name.partition(".")
        value = getattr(params, head)
        if tail and value is not None:
            value = getattr(value, tail)
        if value is not None:
            found[name] = value
    return found


def from_leaves(arrays: dict[str, Array]) -> MHAParams:
    """Builds parameters from the arrays by name; KeyError without kernels of query, key, value."""

    def projection(name: str) -> Projection:
        return Projection(arrays[f"{name}.kernel"], arrays.get(f"{name}.bias"))

    return MHAParams(
        projection("query"),
        projection("key"),
        projection("value"),
        projection("out") if "out.kernel" in arrays else None,
        *(arrays.get(name) for name in ("bias_k", "bias_v", "query_norm", "key_norm")),
    )


def check(params: MHAParams, leading: int = 0) -> dict[str, int]:
    """Checks every shape against the others and returns the sizes by letter.

    `leading` axes `*L` (stacked layers) are ignored.

    Raises:
      ValueError: names the leaf, the axes expected and the shape received.
    """
    sizes: dict[str, int] = {}
    for name, array in leaves(params).items():
        bind(f"params.{name}", array.shape, "*L " * (leading > 0) + CANONICAL[name], sizes)
    if sizes["K"] == 0 or sizes["N"] % sizes["K"]:
        raise ValueError(
            f"params: N={sizes['N']} query heads must be a multiple of K={sizes['K']} key/value "
            f"heads (params.query.kernel is {CANONICAL['query.kernel']}, params.key.kernel is "
            f"{CANONICAL['key.kernel']})"
        )
    for one, other in (("bias_k", "bias_v"), ("query_norm", "key_norm")):
        if (getattr(params, one) is None) != (getattr(params, other) is None):
            raise ValueError(f"params: {one} and {other} come together, or not at all")
    return sizes
