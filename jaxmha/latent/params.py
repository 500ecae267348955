"""The parameters of one layer of multi-head latent attention: a plain pytree of arrays."""

from typing import NamedTuple

from jaxmha.arrays import Array, latent_hint
from jaxmha.dims import bind
from jaxmha.params import Projection, check_projections
from jaxmha.record_repr import record_repr


class LatentParams(NamedTuple):
    """Parameters of multi-head latent attention (MLA), in which a token has one latent vector from
    which the keys and values of all heads are projected, and one rotated key for all heads.

    Axes: P features of query latents, L of key/value latents, R rotary features, E = H + R features
    of a query, H features of a key without positions, h features of a value.

    Attributes:
      query: kernel `P N E`, or `Dq N E` if `query_latent` is None; bias `N E`. The last R of the E
        features are rotated.
      latent: kernel `Dq L`, bias `L`.
      rotary_key: kernel `Dq R`, bias `R`: projects the rotated key features that all heads share.
      key: kernel `L N H`, without a bias.
      value: kernel `L N h`, without a bias.
      out: kernel `N h Do`, bias `Do`; None: the heads are concatenated.
      latent_norm: `L`, scale of the RMS norm of latents; None: no norm.
      query_latent: kernel `Dq P`, bias `P`; None: queries are projected from the features.
      query_latent_norm: `P`, scale of the RMS norm of query latents; None: no norm.

    Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.

    >>> import numpy as np
    >>> kernels = [np.zeros(shape, np.float32) for shape in ((9, 2, 5), (9, 4), (9, 2), (4, 2, 3))]
    >>> query, latent, rotary_key, key = map(Projection, kernels)
    >>> sizes(LatentParams(query, latent, rotary_key, key, key))["L"]
    4
    """

    query: Projection
    latent: Projection
    rotary_key: Projection
    key: Projection
    value: Projection
    out: Projection | None = None
    latent_norm: Array | None = None
    query_latent: Projection | None = None
    query_latent_norm: Array | None = None

    def __repr__(self) -> str:
        return record_repr(self)


# Leaf of LatentParams -> its axes, for checks, converters and messages.
CANONICAL: dict[str, str] = {
    "latent.kernel": "Dq L",
    "latent.bias": "L",
    "rotary_key.kernel": "Dq R",
    "rotary_key.bias": "R",
    "latent_norm": "L",
    "key.kernel": "L N H",
    "value.kernel": "L N h",
    "query_latent.kernel": "Dq P",
    "query_latent.bias": "P",
    "query_latent_norm": "P",
    "query.kernel": "P N E",
    "query.bias": "N E",
    "out.kernel": "N h Do",
    "out.bias": "Do",
}
_PROJECTIONS = ("query", "latent", "rotary_key", "key", "value", "out", "query_latent")
_OPTIONAL = ("out", "query_latent")


def leaves(params: LatentParams) -> dict[str, Array]:
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


def from_leaves(arrays: dict[str, Array]) -> LatentParams:
    """Builds parameters from arrays by name; KeyError if a required kernel is missing."""

    def projection(name: str) -> Projection:
        return Projection(arrays[f"{name}.kernel"], arrays.get(f"{name}.bias"))

    found = {
        name: projection(name)
        for name in _PROJECTIONS
        if name not in _OPTIONAL or f"{name}.kernel" in arrays
    }
    norms = {name: arrays.get(name) for name in ("latent_norm", "query_latent_norm")}
    return LatentParams(**found, **norms)  # type: ignore[arg-type]


def sizes(params: LatentParams) -> dict[str, int]:
    """Checks every shape against the others and returns the sizes by letter.

    Raises:
      TypeError: params is no LatentParams, or a part of it is of a wrong type.
      ValueError: a shape does not fit; names the leaf, the axes expected and the shape received.
    """
    if not isinstance(params, LatentParams):
        raise TypeError(
            f"params must be a jaxmha.LatentParams, got {type(params).__name__}{latent_hint(params)}"
        )
    check_projections(params, _PROJECTIONS, _OPTIONAL)
    for name in ("key", "value"):
        if getattr(params, name).bias is not None:
            raise ValueError(
                f"params.{name} has a bias: keys and values of latent attention have none"
            )
    if params.query_latent is None and params.query_latent_norm is not None:
        raise ValueError("params.query_latent_norm is of query latents, and query_latent is None")
    found: dict[str, int] = {}
    for name, array in leaves(params).items():
        if not hasattr(array, "shape"):
            raise TypeError(f"params.{name} must be an array, got {type(array).__name__}")
        axes = CANONICAL[name]
        if name == "query.kernel" and params.query_latent is None:
            axes = axes.replace("P", "Dq")
        bind(f"params.{name}", array.shape, axes, found)
    if found["E"] != found["H"] + found["R"]:
        raise ValueError(
            f"params: queries have E={found['E']} features (params.query.kernel), expected H + R = "
            f"{found['H']} + {found['R']}: those of keys without positions (params.key.kernel) and "
            "the rotary features (params.rotary_key.kernel)"
        )
    return found
