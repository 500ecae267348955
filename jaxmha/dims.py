"""Checks shapes against the dimension key, the notation of signatures and error messages.

B batch, T query length, S key/value length, N query heads, K key/value heads, H head size of
query and key, h head size of value, Dq Dk Dv input features, Do output features. `(N H)` is one
array axis that holds two, the left one outermost.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

Shape = tuple[int, ...]


@lru_cache(maxsize=1024)  # cached: converters parse the same axes again for every block of a model
def parse(axes: str) -> tuple[tuple[str, ...], ...]:
    """Splits an axes string into array axes, each a tuple of letters.

    >>> parse("(qkv N H) Dq")
    (('qkv', 'N', 'H'), ('Dq',))
    """
    groups: list[tuple[str, ...]] = []
    rest = axes.split()
    while rest:
        word = rest.pop(0)
        if not word.startswith("("):
            groups.append((word,))
            continue
        group = [word]
        while not group[-1].endswith(")"):
            group.append(rest.pop(0))
        groups.append(tuple(w.strip("()") for w in group))
    return tuple(groups)


def bind(name: str, shape: Sequence[int], axes: str, sizes: dict[str, int]) -> None:
    """Checks `shape` against `axes`, and adds the size of every new letter to `sizes`.

    `#B` accepts size 1 as well as the size of B; a number stands for that size; a leading `*B`
    stands for any number of unchecked axes.

    Raises:
      ValueError: names the array, the axes expected with the sizes known so far, and the shape.

    >>> sizes = {"N": 2}
    >>> bind("in_proj_weight", (12, 5), "(qkv N H) Dq", sizes | {"qkv": 3})
    >>> bind("bias", (7,), "(N H)", sizes)
    Traceback (most recent call last):
    ValueError: bias: expected axes ((N H)) with N=2, got shape (7,)
    """
    groups = parse(axes)
    checked = groups[1:] if groups and groups[0][0].startswith("*") else groups
    free = len(shape) - len(checked)
    if free < 0 or (free > 0 and checked is groups):
        raise ValueError(_message(name, shape, groups, sizes))
    found: dict[str, int] = {}
    for size, group in zip(shape[free:], checked, strict=True):
        if len(group) == 1 and group[0].startswith("#"):
            letter = group[0][1:]
            if size not in (1, sizes.get(letter, size)):
                raise ValueError(_message(name, shape, groups, sizes))
            continue
        known = {**sizes, **found}
        unknown = [a for a in group if a not in known and not a.isdigit()]
        product = math.prod(int(a) if a.isdigit() else known.get(a, 1) for a in group)
        if len(unknown) > 1:
            raise ValueError(
                f"{name}: cannot split an axis of {size} into ({' '.join(group)}) without knowing "
                f"{' or '.join(unknown)}"
            )
        if unknown and product and size % product == 0:
            found[unknown[0]] = size // product
        elif unknown or size != product:
            raise ValueError(_message(name, shape, groups, sizes))
    sizes.update(found)


def _message(
    name: str, shape: Sequence[int], groups: Sequence[tuple[str, ...]], sizes: dict[str, int]
) -> str:
    expected = ", ".join(g[0] if len(g) == 1 else f"({' '.join(g)})" for g in groups)
    letters = dict.fromkeys(a.removeprefix("#") for g in groups for a in g)
    known = ", ".join(f"{a}={sizes[a]}" for a in letters if a in sizes)
    return (
        f"{name}: expected axes ({expected}){f' with {known}' if known else ''}, "
        f"got shape {tuple(shape)}"
    )
