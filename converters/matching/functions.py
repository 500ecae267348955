"""Refuses to fill attention from attention that computes another function of the same arrays.

Scales, soft caps, windows, norms, rotations and `add_zero_attn` are settings, which no array shows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxmha import Semantics
from jaxmha.checkpoint import errors
from jaxmha.converters.discovery.layer_semantics import IN_CALL, Behaviour, differing, same_number
from jaxmha.converters.discovery.positions import Positions, Rotary
from jaxmha.converters.matching.stated import Stated, shown
from jaxmha.semantics import logit_scale

Facts = Mapping[str, Stated]
Fields = dict[str, tuple[Any, Any]]  # name of a setting -> its values in source and target
# Size of a head (H) -> the orders in which the lines of a plan may put a head's features.
OrdersOfHeads = Callable[[int], Iterable[tuple[int, ...]]]
Orders = Callable[
    [Iterable[str], int], Iterable[tuple[int, ...]]
]  # names of target arrays, H -> the orders for the lines that fill them
_WINDOW, _ROTATE = "local_window_size", "rotate"
_WHOLE = (None, None)  # bounds that stand for no window
# Positions at which rotations are compared. Only a difference at the first `_NEAR` proves that they
# differ: at 4000, angles of float32 err by 2e-4, and tables of angles may end before it.
_PLACES = np.array([[0, 1, 2, 7, 60, 700, 4000]])
_NEAR = 5
_FEATURES = 64  # size of the random heads that are rotated, if H is not known


def compare(
    sources: Mapping[str, Sequence[str]], mine: Facts, theirs: Facts, orders: Orders
) -> tuple[str, ...]:
    """Compares the behaviour of each layer of the source with that of the layer that it fills.

    Returns notes on norms of another epsilon, and on behaviour that cannot be compared.
    `sources`: target array -> names of the source arrays that fill it. `mine`, `theirs`: array ->
    what its layer states. `orders`: as `head_orders.of_heads` returns it.

    Raises ValueError if two layers compute different functions.
    """
    pairs: dict[tuple[str, str | None], tuple[Stated, Stated | None, set[str]]] = {}
    for name, several in sources.items():
        for a, b in ((mine.get(one), theirs.get(name)) for one in several):
            if a is not None:
                pairs.setdefault((a.layer, b and b.layer), (a, b, set()))[2].add(name)
    notes: dict[str, list[str]] = {}
    for a, b, names in pairs.values():
        for text in _notes(a, b, partial(orders, names)):
            notes.setdefault(text, []).append(a.layer or "a layer")
    return tuple(f"{errors.listed(names, 3)} of the source: {x}" for x, names in notes.items())


def _notes(a: Stated, b: Stated | None, orders: OrdersOfHeads) -> Iterator[str]:
    """Yields notes on layer `a`, which fills layer `b`; raises ValueError if their functions differ."""
    known = b is not None and None not in (a.epsilon, b.epsilon)
    if b and known and not same_number(a.epsilon, b.epsilon):
        yield f"epsilon={a.epsilon:g}, and {b.epsilon:g} in the model"
    if a.behaviour is None:
        return
    if b is None or b.behaviour is None:
        unknown = _differing(a.behaviour, Behaviour(Semantics()))
    else:
        fields, unknown = _compared(a.behaviour, b.behaviour, orders)
        if fields:
            raise ValueError(_refused(a, b, fields))
    if unknown:
        yield f"{_settings(unknown, 0)}, and nothing shows that the model computes the same"


def _refused(source: Stated, target: Stated, fields: Fields) -> str:
    return (
        f"{shown('the source', source)} has {_settings(fields, 0)}, and "
        f"{shown('the model', target)} has {_settings(fields, 1)}: the arrays fit, but the outputs "
        "would differ. Build the model with the settings of the source (layers of jaxmha.flax take "
        "semantics=); if its calls add them, give the arrays of the source as a dict, which has no "
        "settings"
    )


def _settings(fields: Fields, side: int) -> str:
    return ", ".join(f"{name}={_text(values[side])}" for name, values in fields.items())


def _text(value: object) -> str:
    if isinstance(value, Rotary):
        return f"({Positions('rotary', value)})"
    if not isinstance(value, partial):
        return str(getattr(value, "__qualname__", repr(value)))
    keywords = ", ".join(f"{key}={errors.shown(x)}" for key, x in value.keywords.items())
    return f"{_text(value.func)}({keywords})"


def _compared(a: Behaviour, b: Behaviour, orders: OrdersOfHeads) -> tuple[Fields, Fields]:
    """Returns the settings in which two layers differ, and those that cannot be compared."""
    fields, unknown = _differing(a, b), Fields()
    if (same := _same_rotation(a, b, orders)) is not True:
        (unknown if same is None else fields)[_ROTATE] = a.rotate, b.rotate
    x, y = _bounds(a), _bounds(b)
    if a.mask is not None and x not in (None, _WHOLE) and y is None:
        unknown[_WINDOW] = x, None  # calls of the target may pass a mask with this window
    if a.mask is b.mask is None and (x or _WHOLE)[1] != (y or _WHOLE)[1] and _WINDOW not in fields:
        unknown[_WINDOW] = x, y  # only the right bounds differ, and calls may pass causality
    return fields, unknown


def _differing(a: Behaviour, b: Behaviour) -> Fields:
    """The settings, apart from rotations, by which two layers compute different functions."""
    H = a.head_dim or b.head_dim
    scales = logit_scale(a.semantics, H or 1), logit_scale(b.semantics, H or 1)
    # Without H, the default scale is not known, so equal scales stand in: scales are not compared.
    names = [*differing(a.semantics, b.semantics, scales if H else (1.0, 1.0)), "attention_axes"]
    both = {name: (getattr(a.semantics, name), getattr(b.semantics, name)) for name in names}
    if "scale" in both:
        both["scale"] = scales
    found = {name: (x, y) for name, (x, y) in both.items() if name != _WINDOW and x != y}
    return found | ({_WINDOW: (_bounds(a), _bounds(b))} if _other_windows(a, b) else {})


def _bounds(one: Behaviour) -> tuple[int | None, int | None] | None:
    """The window (left, right) of a layer; None if it has none or its configuration leaves it open."""
    if one.mask is None:
        return one.semantics.local_window_size
    known = one.mask.scheme in ("causal", "full") and one.mask.chunk is None
    return (one.mask.left, one.mask.right) if known else None


def _other_windows(a: Behaviour, b: Behaviour) -> bool:
    """True if windows differ, unless a configuration leaves one open: calls may pass that window."""
    x, y = _bounds(a), _bounds(b)
    schemes = {one.mask.scheme for one in (a, b) if one.mask is not None}
    if schemes and (x is None or y is None):
        return False
    (left, right), (other, bound) = x or _WHOLE, y or _WHOLE
    # Causality is a right bound of 0, which the call of a layer may pass.
    in_call = "causal" in schemes or (not schemes and 0 in (right, bound))
    return left != other or (right != bound and not in_call)


def _same_rotation(a: Behaviour, b: Behaviour, orders: OrdersOfHeads) -> bool | None:
    """True if two layers rotate random heads alike, False if not, None if that is unknown.

    They need to agree in only one of the `orders` in which the plan may put a head's features. A
    rotation that only the calls determine (`IN_CALL`) counts as alike.
    """
    x, y = a.rotate, b.rotate
    if _alike(x, y) or IN_CALL in (x, y):
        return True
    if (x is None or y is None) and (b if x is None else a).mask is not None:
        return None  # the other model may rotate outside of its layers, where nothing shows it
    H = a.head_dim or b.head_dim
    features = H or _FEATURES
    heads = np.random.default_rng(0).normal(size=(1, _PLACES.size, 1, features)).astype(np.float32)
    same = _near(x, y, heads, np.arange(features))
    if same is False and H and x is not None and y is not None:
        return any(_near(x, y, heads, np.array(order)) for order in orders(H)) or same
    return same


def _near(x: Any, y: Any, heads: Any, order: Any) -> bool | None:
    """Compares two rotations on `heads`, whose features the second gets in `order`.

    True if they agree at all positions; False if shapes differ, or values at the first `_NEAR`
    positions; None if only values at later positions differ, or if a rotation raises an error.
    """
    try:
        rotated = ((heads, x), (heads[..., order], y))
        one, other = (np.asarray(h if f is None else f(h, _PLACES)) for h, f in rotated)
    except Exception:  # noqa: BLE001 (code of the user's own, made for other arguments)
        return None
    if one.shape != other.shape:
        return False
    one = one[..., order]
    if not np.allclose(one[:, :_NEAR], other[:, :_NEAR], atol=0.01):
        return False
    return True if np.allclose(one, other, atol=0.01) else None


def _alike(x: object, y: object) -> bool:
    if isinstance(x, partial) and isinstance(y, partial):
        x, y = ((f.func, f.args, f.keywords) for f in (x, y))
    try:
        return x is y or bool(x == y)
    except (TypeError, ValueError):  # of settings that hold arrays, `==` has no truth value
        return False
