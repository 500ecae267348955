"""Names the difference between two masks: inverted, shifted, aligned to the other corner etc."""

from collections.abc import Callable

import numpy as np

from jaxmha.converters.layout.arrays import NDArray

SHIFTS = (1, -1, 2, -2)


def explain(a: NDArray | None, b: NDArray | None, part: str = "mask") -> tuple[str, str]:
    """The name of the difference between two masks, and a sentence about it.

    Args:
      a, b: Boolean, `(#B, #N, #T, #S)`, True = attend; None allows every pair.
      part: the name, for the sentence, of the part of a mask that both arrays hold: `padding`.

    >>> padding = np.arange(5) < np.array([[[[3]]], [[[4]]]])
    >>> explain(padding, ~padding)[0], explain(padding, None)[0]
    ('mask polarity', 'mask ignored')
    """
    if a is None or b is None:
        return _missing("b" if a is None else "a", a if b is None else b, part)
    shape = np.broadcast_shapes(a.shape, b.shape)
    x, y = np.broadcast_to(a, shape), np.broadcast_to(b, shape)
    if (found := _inverted(x, y) or _ignored(x, y, part)) is not None:
        return found
    for check in _CHECKS:
        if (found := check(x, y)) is not None:
            return found
    only_a, only_b = (float(np.mean(one & ~other)) for one, other in ((x, y), (y, x)))
    return (
        "mask",
        f"the masks differ: {only_a:.0%} of the pairs attend in a alone, {only_b:.0%} in b alone",
    )


def _missing(owner: str, mask: NDArray | None, part: str) -> tuple[str, str]:
    """Name and sentence of the difference if only the mask of `owner`, "a" or "b", has this part.

    A dense triangle counts as the causal part.
    """
    other = "b" if owner == "a" else "a"
    title = "mask ignored"
    if part == "causal part" or (mask is not None and _is_triangle(mask)):
        title, part = "causality", "causal part"
    return title, f"{other} lacks the {part} of {owner}'s mask"


def _is_triangle(mask: NDArray) -> bool:
    T, S = mask.shape[2:]
    offset = _offset(mask)
    return T > 1 and offset < S - 1 and bool((mask == np.tri(T, S, offset, dtype=bool)).all())


def _inverted(x: NDArray, y: NDArray) -> tuple[str, str] | None:
    if not np.array_equal(x, ~y):
        return None
    return "mask polarity", "the mask means the opposite: a attends where b ignores"


def _ignored(x: NDArray, y: NDArray, part: str) -> tuple[str, str] | None:
    for one, other, full in (("a", "b", y), ("b", "a", x)):
        if full.all():
            return "mask ignored", f"the {part} of {one} blocks pairs, that of {other} blocks none"
    return None


def _triangles(x: NDArray, y: NDArray) -> tuple[str, str] | None:
    """Detects two causal masks with different offsets, or a causal mask in only one of the two."""
    T, S = x.shape[2:]
    if T == 1:
        return None
    at = _offset(x), _offset(y)
    low, wide = (x, y) if at[0] < at[1] else (y, x)
    if at[0] == at[1] or not np.array_equal(low, wide & np.tri(T, S, min(at), dtype=bool)):
        return None
    padding = wide.any(3, keepdims=True) & wide.any(2, keepdims=True)
    if max(at) >= S - 1 or np.array_equal(wide, padding):
        causal, other = ("a", "b") if at[0] < at[1] else ("b", "a")
        return "causality", f"{causal} hides the future, and {other} does not"
    corners = {0: "the top-left corner", S - T: "the bottom-right corner"}
    starts = [corners.get(k, f"the diagonal {k:+d}") for k in at]
    return "causal alignment", f"causality starts at {starts[0]} in a, at {starts[1]} in b"


def _offset(mask: NDArray) -> int:
    """The largest j - i of an attended pair."""
    i, j = np.nonzero(mask.any((0, 1)))
    return int((j - i).max(initial=-mask.shape[2]))


def _shifted(x: NDArray, y: NDArray) -> tuple[str, str] | None:
    S = x.shape[3]
    for k in SHIFTS:
        if abs(k) >= S:
            continue
        one, other = (x[..., : S - k], y[..., k:]) if k > 0 else (x[..., -k:], y[..., : S + k])
        if np.array_equal(one, other):
            by = f"{abs(k)} position{'s' * (abs(k) > 1)} to the {'right' if k > 0 else 'left'}"
            return "mask shifted", f"b's mask is a's, {by}: is a token more or less in front?"
    return None


def _rows_to_heads(x: NDArray, y: NDArray) -> tuple[str, str] | None:
    B, N = x.shape[:2]
    if B != N or not np.array_equal(x, np.swapaxes(y, 0, 1)):
        return None
    heads = "b" if (x == x[:, :1]).all() else "a"
    return "mask axis", f"{heads} applies row b of the mask to head b, not to batch row b"


def _transposed(x: NDArray, y: NDArray) -> tuple[str, str] | None:
    if x.shape[2] != x.shape[3] or not np.array_equal(x, np.swapaxes(y, 2, 3)):
        return None
    return "mask transposed", "the axes of queries and keys are exchanged in one of the masks"


_CHECKS: tuple[Callable[[NDArray, NDArray], tuple[str, str] | None], ...] = (
    _triangles,
    _rows_to_heads,
    _transposed,
    _shifted,
)
