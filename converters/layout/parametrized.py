"""Names the parameters that torch computes from other tensors of a state dict, and the remedy."""

from collections.abc import Collection, Iterable, Iterator

# Endings of the tensors that stand for a parameter, and the function of torch.nn.utils that stores
# its values in their place.
_HOOKS = (
    ("_orig", "_mask", "prune.remove"),
    ("_orig", "_u", "remove_spectral_norm"),
    ("_g", "_v", "remove_weight_norm"),
)
_WITHIN = "parametrizations."


def remedies(keys: Iterable[str], names: Collection[str]) -> str:
    """Says how to get those of the keys that torch computes from tensors of these names; or "".

    >>> remedies(["in_proj_weight"], ["in_proj_weight_g", "in_proj_weight_v"])
    "; torch computes in_proj_weight from in_proj_weight_g and others: store its values first by torch.nn.utils.remove_weight_norm(module, 'in_proj_weight')"
    """
    found = computed(names)
    return "".join(f"; {found[key]}" for key in keys if key in found)


def computed(names: Collection[str]) -> dict[str, str]:
    """Maps the parameters that torch computes from tensors of these names to the remedy."""
    made: dict[str, str] = {}
    for key, name, remove in _computed(names):
        layer, _, leaf = key.rpartition(".")
        owner = f"module.get_submodule({layer!r})" if layer else "module"
        made.setdefault(
            key,
            f"torch computes {key} from {name} and others: store its values first by "
            f"torch.nn.utils.{remove}({owner}, {leaf!r})",
        )
    return made


def _computed(names: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Yields parameters, one of the tensors each is computed from, and the function that ends it."""
    for name in names:
        for first, second, remove in _HOOKS:
            key = name.removesuffix(first)
            if key != name and f"{key}{second}" in names:
                yield key, name, remove
        layer, within, rest = name.rpartition(_WITHIN)
        if within:
            yield layer + rest.partition(".")[0], name, "parametrize.remove_parametrizations"
