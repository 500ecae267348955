"""The layout of latent attention in transformers: DeepSeek-V2, DeepSeek-V3 and models like them.

Source: `DeepseekV3Attention` of transformers 5.23.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxmha.converters.layout import states
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.latent import LatentParams
from jaxmha.latent.params import CANONICAL, from_leaves, leaves, sizes


class Linear(NamedTuple):
    """A linear layer whose weight packs `leaves` along its output axis.

    Leaves with a head axis are packed within each head.
    """

    name: str
    leaves: tuple[str, ...]


_SHARED = (
    Linear("kv_a_proj_with_mqa", ("latent", "rotary_key")),
    Linear("kv_b_proj", ("key", "value")),
    Linear("o_proj", ("out",)),
)
_DIRECT = Linear("q_proj", ("query",))
_LOW_RANK = Linear("q_a_proj", ("query_latent",)), Linear("q_b_proj", ("query",))
NORMS = {"kv_a_layernorm.weight": "latent_norm", "q_a_layernorm.weight": "query_latent_norm"}
# Leaf of `LatentParams` -> its key in files of layout jaxmha.
OWN = {leaf: f"mla_{leaf.replace('.', '_')}" for leaf in CANONICAL}
# A prefix that has this key is a block of latent attention.
SIGN = "kv_a_proj_with_mqa.weight"


def known_keys(keys: Collection[str]) -> set[str]:
    """Every key that `import_latent_params` accepts; `keys` show whether queries have latents."""
    linears = linears_of("q_a_proj.weight" in keys)
    return {f"{x.name}.{end}" for x in linears for end in ("weight", "bias")} | {*NORMS}


def import_latent_params(state: Mapping[str, Any], *, prefix: str = "") -> LatentParams:
    """Latent attention from a dict of arrays by the keys of DeepSeek's models, or of a file
    that was converted to layout jaxmha.

    The shapes determine all sizes, also the head count. Rotary features keep the order of the file:
    the rotation of `latent_behaviour` applies to that order.

    Args:
      state: arrays or tensors by key, such as `model.layers.0.self_attn.kv_b_proj.weight`.
      prefix: takes only the keys below it, `model.layers.0.self_attn`.

    Raises:
      TypeError: the state is not a dict.
      ValueError: a key is missing or unknown, or a shape does not fit.

    >>> from jaxmha.latent import init_latent_params
    >>> import jax
    >>> params = init_latent_params(
    ...     jax.random.key(0), num_heads=3, features=8, latent_dim=6, rotary_dim=4, head_dim=5
    ... )
    >>> sorted(export_latent_params(params))[:2]
    ['kv_a_layernorm.weight', 'kv_a_proj_with_mqa.weight']
    >>> import_latent_params(export_latent_params(params)).key.kernel.shape
    (6, 3, 5)
    """
    state = states.flat(state, ".")
    start = f"{prefix.removesuffix('.')}." if prefix else ""
    arrays = {key.removeprefix(start): x for key, x in state.items() if key.startswith(start)}
    if OWN["latent.kernel"] in arrays:
        return _of_own(arrays)
    linears, known = linears_of("q_a_proj.weight" in arrays), known_keys(arrays)
    required = [f"{linear.name}.weight" for linear in linears] + ["kv_a_layernorm.weight"]
    missing = [key for key in required if key not in arrays]
    unknown = [key for key in arrays if key not in known]
    if missing or unknown:
        where = f" under {prefix!r}" if prefix else ""
        parts = [f"{' and '.join(missing)} missing"] * bool(missing)
        parts += [f"unknown {', '.join(unknown[:8])}"] * bool(unknown)
        raise ValueError(
            f"latent attention{where}: {'; '.join(parts)} (expected the keys of DeepSeek-V3, "
            f"{', '.join(sorted(known))})"
        )
    taken = {key: to_numpy(x, start + key) for key, x in arrays.items()}
    shapes = sizes_of(taken)
    found: dict[str, Any] = {NORMS[key]: x for key, x in taken.items() if key in NORMS}
    for linear in linears:
        for end in ("weight", "bias"):
            if (array := taken.get(f"{linear.name}.{end}")) is not None:
                found |= split(linear, end, array, shapes)
    params = from_leaves({name: np.ascontiguousarray(x) for name, x in found.items()})
    sizes(params)
    return params


def _of_own(arrays: Mapping[str, Any]) -> LatentParams:
    """Latent attention by the keys of layout jaxmha; ignores other keys.

    Raises ValueError if a required key is missing or a shape does not fit.
    """
    found = {leaf: to_numpy(arrays[key], key) for leaf, key in OWN.items() if key in arrays}
    required = ("query", "rotary_key", "key", "value")
    if missing := [OWN[f"{x}.kernel"] for x in required if f"{x}.kernel" not in found]:
        raise ValueError(f"latent attention of layout jaxmha: {' and '.join(missing)} missing")
    params = from_leaves(dict(found))
    sizes(params)
    return params


def export_latent_params(params: LatentParams, *, prefix: str = "") -> dict[str, NDArray]:
    """Latent attention as NumPy arrays by the keys of DeepSeek's models, `prefix.` before each.

    Raises:
      ValueError: the layout cannot hold the parameters; the message says why.
    """
    sizes(params)
    arrays = {name: to_numpy(x) for name, x in leaves(params).items()}
    lacking = [x for x in ("latent_norm", "out.kernel") if x not in arrays]
    if params.query_latent is not None and params.query_latent_norm is None:
        lacking.append("query_latent_norm")
    if lacking:
        raise ValueError(
            f"DeepSeek's latent attention has {', '.join(lacking)}, and params has not"
        )
    if "query.bias" in arrays and params.query_latent is not None:
        raise ValueError("DeepSeek's q_b_proj has no bias, and params.query has one")
    found: dict[str, NDArray] = {key: arrays[x] for key, x in NORMS.items() if x in arrays}
    for linear in linears_of(params.query_latent is not None):
        for end, leaf in (("weight", "kernel"), ("bias", "bias")):
            parts = [arrays.get(f"{name}.{leaf}") for name in linear.leaves]
            given = [part for part in parts if part is not None]
            if given and len(given) < len(parts):
                raise ValueError(
                    f"DeepSeek's {linear.name} has one bias for {' and '.join(linear.leaves)}, and "
                    "params has only one of both (a bias of zeros changes nothing)"
                )
            if given:
                found[f"{linear.name}.{end}"] = joined(linear, end, given)
    start = f"{prefix.removesuffix('.')}." if prefix else ""
    return {f"{start}{key}": np.ascontiguousarray(x) for key, x in found.items()}


def linears_of(low_rank: bool) -> tuple[Linear, ...]:
    return (*(_LOW_RANK if low_rank else (_DIRECT,)), *_SHARED)


def sizes_of(arrays: Mapping[str, NDArray]) -> dict[str, int]:
    """The sizes L, R, N, H and h from the shapes.

    `q_proj` (or `q_b_proj`) has N (H + R) rows, `kv_b_proj` has N (H + h) and `o_proj` N h columns,
    which together give N R. Raises ValueError if the shapes do not fit.
    """
    query = arrays["q_b_proj.weight" if "q_b_proj.weight" in arrays else "q_proj.weight"]
    down, up, out = (arrays[f"{linear.name}.weight"] for linear in _SHARED)
    for array in (query, down, up, out):
        if array.ndim != 2:
            raise ValueError(f"expected weights of two axes, got one of shape {array.shape}")
    L = arrays["kv_a_layernorm.weight"].shape[0]
    R = down.shape[0] - L
    rotated = query.shape[0] - up.shape[0] + out.shape[1]
    N = rotated // R if R > 0 else 0
    if R < 1 or rotated % R or N < 1 or out.shape[1] % N or up.shape[0] % N:
        raise ValueError(
            f"latent attention: shapes of queries {query.shape}, kv_a_proj_with_mqa {down.shape}, "
            f"kv_b_proj {up.shape}, kv_a_layernorm ({L},) and o_proj {out.shape} do not fit: "
            "expected (N (H + R), .), (L + R, Dq), (N (H + h), L), (L,) and (Do, N h)"
        )
    h = out.shape[1] // N
    return {"L": L, "R": R, "N": N, "h": h, "H": up.shape[0] // N - h}


def split(linear: Linear, end: str, array: NDArray, sizes: Mapping[str, int]) -> dict[str, NDArray]:
    """Splits an array, the "weight" or "bias" (`end`) of a layer, into its leaves."""
    leaf = "kernel" if end == "weight" else "bias"
    if linear.name == "o_proj":
        kernel = array.T.reshape(sizes["N"], sizes["h"], -1) if leaf == "kernel" else array
        return {f"out.{leaf}": kernel}
    columns = array.T  # kernel or bias; its last axis holds the outputs
    if linear.leaves in (("query",), ("key", "value")):
        columns = columns.reshape(*columns.shape[:-1], sizes["N"], -1)
    at = {"kv_a_proj_with_mqa": [sizes["L"]], "kv_b_proj": [sizes["H"]]}.get(linear.name, [])
    parts = np.split(columns, at, axis=-1)
    return {f"{name}.{leaf}": part for name, part in zip(linear.leaves, parts, strict=True)}


def joined(linear: Linear, end: str, parts: list[NDArray]) -> NDArray:
    """Joins leaves to an array: the inverse of `split`."""
    joined = np.concatenate(parts, axis=-1)
    if end == "bias":
        return joined.reshape(-1)
    inputs = joined.shape[0] * joined.shape[1] if linear.name == "o_proj" else joined.shape[0]
    transposed: NDArray = joined.reshape(inputs, -1).T
    return transposed
