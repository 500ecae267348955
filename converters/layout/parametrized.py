"""Finds parameters that torch computes from other tensors, such as weight norms; gives a remedy."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

# Endings of the tensors that stand for a parameter, and the function of torch.nn.utils that stores
# its values in their place.
_HOOKS = (
    ("_orig", "_mask", "prune.remove"),
    ("_orig", "_u", "_v", "remove_spectral_norm"),
    ("_g", "_v", "remove_weight_norm"),
)
_WITHIN = "parametrizations."
COMPUTES = "torch computes "
PARAMETRIZE = "parametrize.remove_parametrizations"

Shape = tuple[int, ...]


def remedies(keys: Iterable[str], names: Collection[str]) -> str:
    """Joins the `remedy` of each of `keys` that torch computes from tensors `names`; "" if none is.

    >>> remedies(["in_proj_weight"], ["in_proj_weight_g", "in_proj_weight_v"])
    "; torch computes in_proj_weight from in_proj_weight_g and others: store its values first by torch.nn.utils.remove_weight_norm(module, 'in_proj_weight')"
    """
    found = computed(names)
    return "".join(f"; {found[key]}" for key in keys if key in found)


class Parts(NamedTuple):
    """The tensors from which torch computes a parameter.

    `remove`: the function of torch.nn.utils that stores the computed values instead.
    """

    names: tuple[str, ...]
    remove: str


def computed(names: Collection[str]) -> dict[str, str]:
    """Maps each parameter that torch computes from tensors of these names to its `remedy`."""
    return {key: remedy(key, found) for key, found in parts(names).items()}


def remedy(key: str, found: Parts) -> str:
    """Says from which tensors torch computes a parameter, and how to store its values instead."""
    layer, _, leaf = key.rpartition(".")
    owner = f"module.get_submodule({layer!r})" if layer else "module"
    return (
        f"{COMPUTES}{key} from {found.names[0]} and others: store its values first by "
        f"torch.nn.utils.{found.remove}({owner}, {leaf!r})"
    )


def parts(names: Collection[str]) -> dict[str, Parts]:
    """Maps the parameters that torch computes to the tensors from which it computes them.

    >>> parts(["a.w_g", "a.w_v", "b.weight"])
    {'a.w': Parts(names=('a.w_g', 'a.w_v'), remove='remove_weight_norm')}
    """
    made: dict[str, Parts] = {}
    for key, name, remove in _computed(names):
        before = made.setdefault(key, Parts((), remove))
        made[key] = before._replace(names=(*before.names, *name))
    return made


def stored(shapes: Mapping[str, Shape]) -> dict[str, Parts]:
    """The `parts` whose shapes fit as well, so that names which end alike by chance do not count."""
    return {key: found for key, found in parts(shapes).items() if _fit(found, shapes)}


def _fit(found: Parts, shapes: Mapping[str, Shape]) -> bool:
    first, last = (shapes[found.names[n]] for n in (0, -1))
    if found.remove == PARAMETRIZE or len(found.names) > 2:
        return True
    return first == last if found.remove == "prune.remove" else norms(first, last)


def norms(norm: Shape, direction: Shape) -> bool:
    """True if a weight norm may have norms and directions of these shapes.

    >>> norms((6, 1), (6, 5)), norms((), (6, 5)), norms((6, 5), (6, 5))
    (True, True, False)
    """
    pairs = zip(norm, direction, strict=False)
    whole = len(norm) == len(direction) and all(a in (1, b) for a, b in pairs)
    return not norm or (whole and sum(n != 1 for n in norm) <= 1)


def _computed(names: Collection[str]) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yields (parameter, tensors from which torch computes it, `Parts.remove`).

    A parameter may come several times, each time with some of its tensors.
    """
    for name in names:
        for *ends, remove in _HOOKS:
            key = name.removesuffix(ends[0])
            own = tuple(f"{key}{end}" for end in ends if f"{key}{end}" in names)
            if key != name and len(own) == len(ends):
                yield key, own, remove
        layer, within, rest = name.rpartition(_WITHIN)
        if within:
            key = layer + rest.partition(".")[0]
            yield key, (name,), PARAMETRIZE
