"""Argument checks shared by the public functions."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.arrays import (
    Array,
    DTypeLike,
    as_dtype,
    is_rounded,
    latent_hint,
    params_hint,
    reject_foreign,
    require_arrays,
    shown,
)
from jaxmha.integers import has_values, on_host
from jaxmha.mask import Mask
from jaxmha.mask_checks import side
from jaxmha.semantics import ReturnWeights
from jaxmha.static_checks import one_of


def reject_rounding(**arguments: object) -> None:
    """Raises TypeError for a float64 leaf that JAX, without x64, would round to float32."""
    if not is_rounded(np.float64):
        return
    # Paths of leaves cost more than all other checks: they are computed only for the message.
    if not any(getattr(leaf, "dtype", None) == np.float64 for leaf in jax.tree.leaves(arguments)):
        return
    for name, tree in arguments.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if getattr(leaf, "dtype", None) == np.float64:
                raise TypeError(
                    f"{name}{jax.tree_util.keystr(path)} is float64, which JAX would round to "
                    "float32: call jax.config.update('jax_enable_x64', True), or cast it yourself"
                )


def floating_dtype(dtype: DTypeLike, name: str = "dtype") -> np.dtype[np.floating]:
    """Converts the argument `name` to a dtype for heads; TypeError unless it is floating, has at
    least 8 bits, a sign and a zero, and JAX does not round it to another dtype."""
    dtype = as_dtype(name, dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name} must be floating, got {dtype}")
    # XLA cannot allocate numbers of 6 bits, and packs two of 4 bits in a byte.
    if jnp.finfo(dtype).bits < 8:  # type: ignore[no-untyped-call]
        raise TypeError(f"{name} must be floating, of at least 8 bits, got {dtype}")
    if np.array([-1, 0]).astype(dtype).tolist() != [-1, 0]:  # float8_e8m0fnu, made for scales
        raise TypeError(f"{name} must be floating with a sign and a zero, got {dtype}")
    if is_rounded(dtype):
        raise TypeError(
            f"{name}={dtype} would be rounded to float32: call "
            "jax.config.update('jax_enable_x64', True)"
        )
    return dtype


def prng_key(name: str, key: object) -> None:
    """Raises TypeError unless `key` is one PRNG key, typed or raw."""
    reject_foreign(name, key)
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        fits = shape == ()
    else:
        fits = isinstance(key, jax.Array | np.ndarray) and dtype == np.uint32
        fits = fits and isinstance(shape, tuple) and len(shape) == 1 and shape[0] >= 2
    if not fits:
        found = type(key).__name__ if dtype is None else f"an array of {dtype} of shape {shape}"
        raise TypeError(f"{name} must be one PRNG key, such as jax.random.key(0), got {found}")


def require_type(kind: type, **arguments: object) -> None:
    """Raises TypeError for an argument that is not of the type `kind`, or holds tensors of another
    framework."""
    for name, value in arguments.items():
        if not isinstance(value, kind):
            hints = {"MHAParams": params_hint, "LatentParams": latent_hint}
            remedy = hints[kind.__name__](value) if kind.__name__ in hints else ""
            if isinstance(value, tuple) and any(isinstance(x, kind) for x in value):
                remedy = ", a tuple that holds one: unpack it first, as in params, semantics = ..."
            raise TypeError(
                f"{name} must be a jaxmha.{kind.__name__}, got {type(value).__name__}{remedy}"
            )
        reject_foreign(name, value)


def is_flags(values: np.ndarray[Any, np.dtype[Any]]) -> bool:
    """True if no number is negative: modules may then read the array as Booleans, nonzero = attend."""
    return not bool((values < 0).any())


def reject_additive(mask: object) -> None:
    """Raises ValueError for a mask with negative numbers, if the host can read it: it is additive
    (0 keeps), and a module that reads nonzero = attend would invert it."""
    if not has_values(mask) or getattr(mask, "dtype", bool) == bool:
        return
    values = on_host("mask", mask)
    if not is_flags(values):
        raise ValueError(
            f"mask has {values.dtype} values from {values.min()} to {values.max()}, and numbers here "
            "mean False (0) or True (1), so that an additive mask would be inverted: give a Boolean "
            "mask, True = attend (of an additive mask, pass `mask == 0`), or the values as bias="
        )


def window(sides: int | Sequence[int | None] | Array | None) -> Mask:
    """Converts `local_window_size`, w or (left, right), to a mask."""
    if sides is None:
        return Mask()
    both: Any = sides
    if isinstance(sides, np.ndarray | jax.Array) and sides.ndim:
        if sides.ndim > 1:
            raise ValueError(f"local_window_size must be w or (left, right), got {shown(sides)}")
        both = tuple(sides)
    if not isinstance(both, Sequence) or isinstance(both, str):
        both = (both, both)
    if len(both) != 2:
        raise ValueError(f"local_window_size must be w or (left, right), got {shown(both)}")
    return Mask.window(*(side(x, both, "sides of local_window_size") for x in both))


def promoted(**arrays: Array | None) -> np.dtype[np.floating]:
    """The promoted dtype of the arrays that are not None; TypeError unless all are floating."""
    given = {name: array for name, array in arrays.items() if array is not None}
    for name, array in given.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} must be a floating array, got {array.dtype}")
    try:
        with jax.numpy_dtype_promotion("standard"):
            return np.dtype(jnp.result_type(*given.values()))
    except jax.dtypes.TypePromotionError:  # JAX does not promote float8
        dtypes = ", ".join(f"{name} is {array.dtype}" for name, array in given.items())
        raise TypeError(f"no common dtype: {dtypes}; cast them to one") from None


def check_groups(query: Array, key: Array) -> None:
    """Raises ValueError unless the number of query heads is a multiple of that of key/value heads."""
    N, K = query.shape[2], key.shape[2]
    if K == 0 or N % K:
        raise ValueError(
            f"query heads N={N} must be a multiple of key/value heads K={K}: query is "
            f"(B, T, N, H) = {query.shape}, key is (B, S, K, H) = {key.shape}"
        )


def weights_kind(return_weights: ReturnWeights) -> ReturnWeights:
    """Normalises `True` to "before_dropout"; ValueError for an unknown value."""
    if isinstance(return_weights, np.bool_):
        return_weights = bool(return_weights)
    if not isinstance(return_weights, bool | str):
        raise ValueError(  # noqa: TRY004
            f"return_weights must be a bool or a name, got {shown(return_weights)}"
        )
    one_of("return_weights", return_weights, (False, True, "before_dropout", "after_dropout"))
    return "before_dropout" if return_weights is True else return_weights


# Axes of every array in a Mask, after the batch axes.
_MASK_AXES = {
    "causal_offset": "",
    "query_lengths": "",
    "key_value_lengths": "",
    "query_padding": "T",
    "key_value_padding": "S",
    "query_segments": "T",
    "key_value_segments": "S",
    "packed_ends": "M",
    "array": "#N #T #S",
}


def flatten_mask(
    mask: Mask, batch: Sequence[int], sizes: dict[str, int], names: dict[str, str] | None = None
) -> Mask:
    """Checks every array of a mask, and returns the mask with one batch axis in each.

    `names`: field -> its argument, for error messages.
    """
    arrays: dict[str, Any] = {}
    for field, axes in _MASK_AXES.items():
        value = getattr(mask, field)
        if value is None or isinstance(value, int):
            continue
        name = {"array": "mask", **(names or {})}.get(field, f"mask.{field}")
        require_arrays(**{name: value})
        boolean = field == "array" or field.endswith("padding")
        if not jnp.issubdtype(value.dtype, np.bool_ if boolean else np.integer):
            kind = "a Boolean" if boolean else "an integer"
            raise TypeError(f"{name} must be {kind} array, got {value.dtype}")
        known = sizes | {"M": value.shape[-1]} if field == "packed_ends" else sizes
        arrays[field] = flatten_batch(name, value, batch, axes, known)
    if (mask.query_segments is None) != (mask.key_value_segments is None):
        raise ValueError("segments need both query_ids and key_value_ids")
    return replace(mask, **arrays)


def flatten_bias(bias: Array, batch: Sequence[int], sizes: dict[str, int]) -> jax.Array:
    """Reshapes a bias to four axes, each of full size or 1; TypeError unless it is floating."""
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        instead = "a Boolean array, True = attend, belongs in mask="
        instead = instead if bias.dtype == np.bool_ else "cast it, bias.astype(query.dtype)"
        raise TypeError(f"bias must be a floating array, got {bias.dtype}: {instead}")
    return flatten_batch("bias", bias, batch, "#N #T #S", sizes)


def flatten_batch(
    name: str, array: Array, batch: Sequence[int], axes: str, sizes: dict[str, int]
) -> jax.Array:
    """Flattens the leading axes `*B` of an array to one batch axis before `axes`.

    Leading axes broadcast to the batch; if all are 1 or absent, they become one axis of size 1.
    Axes written `#N` may be 1 or, from the left, missing.

    Raises:
      ValueError: names the array, the axes expected and the shape received.
    """
    letters = axes.split()
    array = jnp.asarray(array)
    given = array.shape
    if "#" in axes:
        array = array.reshape((1,) * (len(letters) - array.ndim) + given)
    split = array.ndim - len(letters)
    lead, core = array.shape[: max(split, 0)], array.shape[max(split, 0) :]
    padded = (1,) * (len(batch) - len(lead)) + lead
    if (
        split < 0
        or not all(
            size == sizes[a.removeprefix("#")] or (a.startswith("#") and size == 1)
            for a, size in zip(letters, core, strict=True)
        )
        or not (
            all(size == 1 for size in lead)
            or (
                len(padded) == len(batch)
                and all(a in (1, b) for a, b in zip(padded, batch, strict=True))
            )
        )
    ):
        known = ", ".join(f"{a}={sizes[a]}" for a in (x.removeprefix("#") for x in letters))
        raise ValueError(
            f"{name}: expected axes ({', '.join(['*B', *letters])}) with *B={tuple(batch)}"
            f"{f', {known}' if known else ''}"
            f"{' (# may be 1; axes on the left may be missing)' if '#' in axes else ''}, "
            f"got shape {given}{_missing_axes(name, given, batch, sizes) if '#' in axes else ''}"
        )
    if all(size == 1 for size in lead):
        return jnp.reshape(array, (1, *core))
    full = jnp.broadcast_to(array.reshape(*padded, *core), (*batch, *core))
    return jnp.reshape(full, (math.prod(batch), *core))


def _missing_axes(
    name: str, shape: tuple[int, ...], batch: Sequence[int], sizes: dict[str, int]
) -> str:
    """The end of an error message: how to insert axes N or T into a batched array; "" if none lack."""
    keys, scores = (*batch, sizes["S"]), (*batch, sizes["T"], sizes["S"])
    if batch and shape == keys:
        padding = f", or Mask.padding(key_value={name}); True = attend" * (name == "mask")
        return f": of (*B, S) make (*B, 1, 1, S), {name}[..., None, None, :]{padding}"
    if batch and shape in {(*batch, 1, sizes["S"]), scores}:
        T = "T" if shape == scores else "1"
        return f": of (*B, {T}, S) make (*B, 1, {T}, S), {name}[..., None, :, :]"
    return ""
