"""Checks of arguments that are static in a program: Python numbers, flags, names and axes."""

import math
from collections.abc import Collection
from contextlib import suppress
from numbers import Integral, Real

import jax
import numpy as np

from jaxmha.arrays import shown

_ARRAYS = (
    ": dot_product_attention takes an array as scale; in a layer, multiply the query kernel by it"
)


def number(name: str, value: object) -> float:
    """Returns `value` as a Python float; TypeError unless it is a real number and not traced,
    ValueError unless it is finite."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name} must be a Python number, since it is static, got {_kind(value)}"
            f"{_ARRAYS if name == 'scale' else ''}"
        )
    try:
        found = float(value)
    except OverflowError:  # an int that no float holds, which may be too long to print
        found = math.inf
    if not math.isfinite(found):
        raise ValueError(f"{name} must be finite and at most 1.8e308, got {found}")
    return found


def flag(name: str, value: object) -> bool:
    """Returns `value` as a Python bool; TypeError unless it is a static bool (0 and 1 are not)."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    traced = isinstance(value, jax.core.Tracer)
    raise TypeError(
        f"{name} must be a bool, True or False, got {_kind(value)}"
        f"{': it shapes the program and cannot be traced' if traced else ''}"
    )


def _kind(value: object) -> str:
    """The type of a wrong value, for a message; "a JAX array" for JAX's, whose names are private."""
    return "a JAX array" if isinstance(value, jax.Array) else type(value).__name__


def names_of_axes(names: object) -> tuple[str, ...]:
    """Returns `dropout_broadcast` as a tuple; ValueError unless it has only B, N, T and S."""
    if isinstance(names, Collection) and all(name in ("B", "N", "T", "S") for name in names):
        return tuple(names)
    raise ValueError(
        f"dropout_broadcast must be names of axes among B, N, T, S, got {shown(names)}"
    )


def precision(value: object) -> object:
    """Converts a precision to JAX's name, or a name per operand; leaves algorithms unchanged."""
    presets = jax.lax.DotAlgorithmPreset
    if value is None or isinstance(value, jax.lax.DotAlgorithm | presets):
        return value
    if isinstance(value, tuple) and len(value) == 2:
        one, other = map(precision, value)
        return one if one == other else (one, other)
    if isinstance(value, str) and value in presets.__members__:
        return value
    if isinstance(value, str | jax.lax.Precision):
        with suppress(ValueError):
            return jax.lax.Precision(value).name.lower()
    raise ValueError(
        f"precision must be 'default', 'high', 'highest' or another that JAX knows, got {shown(value)}"
    )


def window(value: object) -> tuple[int | None, int | None] | None:
    """Normalises `local_window_size`: w means (w, w)."""
    if value is None:
        return None
    sides = (value, value) if isinstance(value, Integral) else value
    if not isinstance(sides, tuple | list) or len(sides) != 2:
        raise ValueError(f"local_window_size must be w or (left, right), got {shown(value)}")
    for side in sides:
        if side is not None and (isinstance(side, bool) or not isinstance(side, Integral)):
            raise TypeError(f"local_window_size must hold integers or None, got {shown(value)}")
        if side is not None and side < 0:
            raise ValueError(f"sides of local_window_size must be >= 0 or None, got {shown(value)}")
    left, right = (None if side is None else int(side) for side in sides)
    return None if left is None and right is None else (left, right)


def attention_axes(value: object) -> tuple[int, ...] | None:
    """Normalises `attention_axes`: one integer means a tuple of it."""
    if value is None:
        return None
    axes = (value,) if isinstance(value, Integral) else value
    if not isinstance(axes, tuple | list) or not axes:
        raise ValueError(f"attention_axes must be one or more integers, got {shown(value)}")
    if any(isinstance(axis, bool) or not isinstance(axis, Integral) for axis in axes):
        raise TypeError(f"attention_axes must be integers, got {shown(value)}")
    found = tuple(int(axis) for axis in axes)
    if len(set(found)) < len(found) or -1 in found:
        raise ValueError(
            f"attention_axes must be different axes, and not the last, of features, got {shown(value)}"
        )
    return found


def one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if isinstance(value, jax.Array | np.ndarray) or value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {shown(value)}")
