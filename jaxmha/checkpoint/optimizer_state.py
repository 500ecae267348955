"""Finds the state of an optimizer in a training checkpoint, such as the moments of Adam.

Its tensors have the shapes, and often the names, of the weights, but they are no weights.
"""

import re
from collections.abc import Container, Iterable, Mapping

# Keys of training states, at any depth: Flax, T5X, Lightning, and PyTorch by convention.
_SUBTREES = {
    "opt_state", "opt_states", "optimizer_state", "optimizer_states",
    "optimizer_state_dict", "optim_state", "optim_state_dict",
}  # fmt: skip
_FIRST = {"optimizer", "optimizers"}  # keys at the top: Keras, nnx and PyTorch by convention
# Entries that `torch.optim` stores per parameter, under `state.NUMBER`.
_OF_TORCH = re.compile(
    r"(?:^|(.*)\.)state\.\d+\."
    r"(exp_avg|exp_avg_sq|max_exp_avg_sq|exp_inf|momentum_buffer|square_avg|grad_avg|acc_delta)"
)
_OF_OPTAX = re.compile(r"((?:.*/)?)(mu|nu)(/.+)")  # of ScaleByAdamState: trees like the weights


def find(names: Iterable[str]) -> list[str]:
    """The names of all tensors of optimizers, in their order.

    >>> find(["w", "optimizer.state.0.exp_avg", "opt_state/0/mu/w", "a/mu/w", "a/nu/w", "mu/w"])
    ['optimizer.state.0.exp_avg', 'opt_state/0/mu/w', 'a/mu/w', 'a/nu/w']
    """
    every = dict.fromkeys(names)
    states = {f"{at[1]}." if at[1] else "" for n in every if (at := _OF_TORCH.fullmatch(n))}
    return [name for name in every if _is_named(name) or _is_moment(name, every, states)]


def _is_named(name: str) -> bool:
    parts = re.split(r"[./]", name)
    return parts[0] in _FIRST or not _SUBTREES.isdisjoint(parts)


def _is_moment(name: str, every: Mapping[str, None], states: Container[str]) -> bool:
    """True for a tensor next to the moments of `torch.optim`, or for a moment of optax."""
    if any(name[: at.start()] in states for at in re.finditer(r"state\.", name)):
        return True
    if (found := _OF_OPTAX.fullmatch(name)) is None:
        return False
    before, own, after = found.groups()
    return f"{before}{'nu' if own == 'mu' else 'mu'}{after}" in every
