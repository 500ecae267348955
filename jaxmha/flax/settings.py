"""Reads the arguments that the modules of linen and nnx share."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha import checks
from jaxmha.arrays import Array, DTypeLike, reject_foreign, require_arrays, to_dtype
from jaxmha.checks import require_type
from jaxmha.flax.parameters import EXTRA
from jaxmha.integers import require_sizes
from jaxmha.mask import Mask
from jaxmha.mask_arguments import with_window
from jaxmha.params import MHAParams, check, leaves
from jaxmha.projections import check_norms
from jaxmha.semantics import Precision, Semantics, reject_axes
from jaxmha.static_checks import flag, one_of

UseBias: TypeAlias = bool | Collection[str]
Tree = TypeVar("Tree")
Window: TypeAlias = int | Sequence[int | None] | None

_PROJECTIONS = ("query", "key", "value", "out")


def behaviour(
    semantics: Semantics | None,
    *,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool | None = None,
    precision: Precision = None,
    normalize_qk: bool = False,
    force_fp32_for_softmax: bool = False,
) -> Semantics:
    """Merges flax's arguments with `semantics`, which applies to arguments left at their defaults.

    Raises:
      ValueError: an argument and `semantics` contradict each other.

    >>> behaviour(None, dropout_rate=0.1).dropout_broadcast
    ('B', 'N')
    """
    given = Semantics() if semantics is None else semantics
    require_type(Semantics, semantics=given)
    reject_axes(given)
    default = ("B", "N") if semantics is None else given.dropout_broadcast  # flax's default
    from_arguments = Semantics(
        dropout_rate=dropout_rate,
        dropout_broadcast=shared_axes(broadcast_dropout, default),
        precision=precision,
        qk_norm="layer" if normalize_qk else None,
        softmax_dtype=np.float32 if force_fp32_for_softmax else None,
    )
    merged: dict[str, Any] = {}
    for name in ("dropout_rate", "dropout_broadcast", "precision", "qk_norm", "softmax_dtype"):
        own, other = getattr(from_arguments, name), getattr(given, name)
        stated = own or (name == "dropout_broadcast" and broadcast_dropout is False)
        if stated and other and own != other:
            raise ValueError(
                f"{name}={own!r} by flax's arguments and {name}={other!r} of semantics differ: "
                "give one"
            )
        merged[name] = own or other
    return replace(given, **merged)


def shared_axes(broadcast_dropout: bool | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Axes that share a dropout draw: B and N or none, or `default` if the argument is None."""
    one_of("broadcast_dropout", broadcast_dropout, (None, True, False))
    if broadcast_dropout is None:
        return default
    return ("B", "N") if broadcast_dropout else ()


INSTEAD = "leave it out, or use flax's own module with attention_fn=jaxmha.flax.attention_fn"


def reject_hooks(*accepted: object, instead: str = INSTEAD, **hooks: object) -> None:
    """Raises ValueError for a hook into computations of jaxmha, unless it is one of `accepted`."""
    for name, hook in hooks.items():
        if hook is not None and not any(hook is known for known in accepted):
            called = getattr(hook, "__qualname__", repr(hook))
            raise ValueError(
                f"{name}={called}: jaxmha computes this itself and cannot call another function; "
                f"{instead}"
            )


def reject_shardings(**shardings: object) -> None:
    """Raises ValueError for flax's sharding constraints on the results of a call."""
    for name, sharding in shardings.items():
        if sharding is not None:
            raise ValueError(
                f"{name}: shard the inputs and parameters (kernel_metadata), or constrain the "
                "output with jax.lax.with_sharding_constraint"
            )


def read_inputs(
    query: Array, key: Array | None, value: Array | None, dtype: DTypeLike | None
) -> tuple[Array, Array, Array]:
    """Inputs of a flax call with defaults filled in, cast to `dtype` unless that is None. Raises
    ValueError for values without keys, TypeError for an input that is no array of numbers."""
    if key is None and value is not None:
        raise ValueError("inputs_v without inputs_k: give inputs_k, which serves as both")
    named = {"inputs_q": query, "inputs_k": key, "inputs_v": value}
    require_features(
        **{name: x for name, x in named.items() if name == "inputs_q" or x is not None}
    )
    key = query if key is None else key
    value = key if value is None else value
    made = {id(x): cast(x, dtype) for x in (query, key, value)}  # identical inputs stay identical
    return made[id(query)], made[id(key)], made[id(value)]


def require_features(**inputs: object) -> None:
    """Raises TypeError for an input that is not an array or is Boolean. A Boolean input probably is
    a mask, which a cast to the module's dtype would turn into zeros and ones."""
    require_arrays(optional=False, **inputs)
    for name, x in inputs.items():
        if getattr(x, "dtype", None) == bool:
            raise TypeError(f"{name} must not be Boolean: give a mask by its name, mask=")


def read_mask(
    mask: Array | Mask | None,
    window: Window = None,
    is_causal: bool = False,
    semantics: Semantics = Semantics(),
) -> Mask:
    """Combines mask, windows and causality of a flax call; nonzero entries of an array attend.

    Raises ValueError for a mask of known numbers that looks additive."""
    if isinstance(mask, Mask):
        read = mask
    elif mask is None:
        read = Mask()
    elif not (hasattr(mask, "shape") and hasattr(mask, "dtype")):
        raise TypeError(f"mask must be an array or a jaxmha.Mask, got {type(mask).__name__}")
    else:
        reject_foreign("mask", mask)
        checks.reject_additive(mask)  # before a conversion, which may be traced
        # A NumPy array is compared in NumPy: JAX might round 64-bit values to zero.
        array = mask if isinstance(mask, np.ndarray) else jnp.asarray(mask)
        read = Mask(array=array if array.dtype == np.bool_ else array != 0)
    causal = Mask.causal() if flag("is_causal", is_causal) else Mask()
    return with_window(read & checks.window(window) & causal, semantics)


def as_tuple(several: object) -> Any:
    """Converts lists and sets to tuples, which can be static attributes of a module."""
    if isinstance(several, set | frozenset):
        return tuple(sorted(several))
    return tuple(several) if isinstance(several, list) else several


def cast(tree: Tree, dtype: DTypeLike | None) -> Tree:
    """Casts every array of a tree to `dtype`; None: returns the tree unchanged."""
    if dtype is None:
        return tree
    cast_tree: Tree = jax.tree.map(lambda x: jnp.asarray(x).astype(to_dtype(dtype)), tree)
    return cast_tree


def widened(tree: Tree) -> Tree:
    """Casts to float32 if no array is wider than half precision, as flax casts the weights with
    `force_fp32_for_softmax`."""
    widest = max(x.dtype.itemsize for x in jax.tree.leaves(tree))
    return cast(tree, np.float32) if widest == 2 else tree


def biased(use_bias: UseBias, name: str) -> bool:
    """True if the projection `query`, `key`, `value` or `out` has a bias."""
    if isinstance(use_bias, bool | np.bool_):
        return bool(use_bias)
    if not isinstance(use_bias, tuple) or not all(x in _PROJECTIONS for x in use_bias):
        raise ValueError(
            f"use_bias must be a bool or names among query, key, value, out, got {use_bias!r}"
        )
    return name in use_bias


def input_sizes(
    in_features: int, in_kv_features: int | tuple[int, int], out_features: int | None
) -> tuple[int, int]:
    """Checks the widths of inputs and outputs; returns Dk and Dv."""
    Dk, Dv = in_kv_features if isinstance(in_kv_features, tuple) else (in_kv_features,) * 2
    require_sizes(in_features=in_features)
    require_sizes(optional=True, out_features=out_features)
    for size in (Dk, Dv):
        require_sizes(in_kv_features=size)
    return Dk, Dv


def head_sizes(
    num_heads: int, qkv_features: int, num_kv_heads: int | None, value_head_dim: int | None
) -> tuple[int, int, int]:
    """Returns K, H and h of a module. Raises ValueError for an invalid size, or unless N divides
    `qkv_features` and K divides N."""
    require_sizes(num_heads=num_heads, qkv_features=qkv_features)
    require_sizes(optional=True, num_kv_heads=num_kv_heads, value_head_dim=value_head_dim)
    K = num_heads if num_kv_heads is None else num_kv_heads
    if qkv_features % num_heads:
        raise ValueError(
            f"qkv_features={qkv_features} must be a multiple of num_heads N={num_heads}"
        )
    if num_heads % K:
        raise ValueError(f"num_heads N={num_heads} must be a multiple of num_kv_heads K={K}")
    H = qkv_features // num_heads
    return K, H, H if value_head_dim is None else value_head_dim


def settings_of(
    params: MHAParams, semantics: Semantics, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Constructor arguments, common to linen and nnx, of a module that holds these parameters.

    `given`: further arguments of the caller.

    Raises:
      ValueError: parameters contradict `semantics` or the arguments in `given`.
    """
    made, sizes = _settings_of(params, semantics), check(params)
    defaults = {
        "num_kv_heads": sizes["N"],
        "qkv_features": sizes["Dq"],
        "value_head_dim": sizes["H"],
        "out_features": sizes["Dq"],
    }
    free = ("dropout_rate", "precision")
    reject_others({name: x for name, x in made.items() if name not in free}, given, defaults)
    return {**made, **given}


def reject_others(
    made: Mapping[str, Any], given: Mapping[str, Any], defaults: Mapping[str, int]
) -> None:
    """Raises ValueError if an argument in `given` differs from `made`, the values that the
    parameters determine. `defaults`: the sizes that None stands for."""
    for name in (x for x in given if x in made):
        value, own = as_tuple(given[name]), made[name]
        if value is None and own is not None:
            value = defaults.get(name)
        same = value == own
        if name == "param_dtype" and value is not None:
            same = np.dtype(value) == own
        elif name == "use_bias":
            held = _PROJECTIONS if made.get("use_out", True) else _PROJECTIONS[:3]
            same = all(biased(value, x) == biased(own, x) for x in held)
        elif name == "extra_params" and isinstance(value, tuple):
            same = set(value) == set(own)
        if not same:
            raise ValueError(
                f"{name}={given[name]!r} is not that of the parameters, {own!r}: leave it out, or "
                "change the parameters first"
            )


def reject_known(given: Mapping[str, Any], *names: str) -> None:
    """Raises ValueError if `given` has an argument in `names`: the parameters determine these."""
    for name in names:
        if name in given:
            raise ValueError(f"{name} is that of the parameters: leave it out")


def _settings_of(params: MHAParams, semantics: Semantics) -> dict[str, Any]:
    require_type(MHAParams, params=params)
    require_type(Semantics, semantics=semantics)
    sizes = check(params)
    with_bias = tuple(
        name
        for name in _PROJECTIONS
        if getattr(params, name) is not None and getattr(params, name).bias is not None
    )
    every = 3 + (params.out is not None)
    check_norms(params, semantics)
    return {
        "num_heads": sizes["N"],
        "num_kv_heads": sizes["K"],
        "qkv_features": sizes["N"] * sizes["H"],
        "value_head_dim": sizes["h"],
        "out_features": None if params.out is None else sizes["Do"],
        "use_bias": bool(with_bias) if len(with_bias) in (0, every) else with_bias,
        "use_out": params.out is not None,
        "use_bias_kv": params.bias_k is not None,
        "extra_params": tuple(leaf for leaf in leaves(params) if leaf in EXTRA),
        "normalize_qk": semantics.qk_norm == "layer",
        # Passed as arguments, so that the caller can override them.
        "dropout_rate": semantics.dropout_rate,
        "precision": semantics.precision,
        "semantics": replace(semantics, dropout_rate=0.0, precision=None),
        "param_dtype": np.dtype(params.query.kernel.dtype),
    }
