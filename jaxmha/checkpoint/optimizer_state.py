"""Finds the state of an optimizer in a training checkpoint, such as the moments of Adam.

Its tensors have the shapes, and often the names, of the weights, but they are no weights.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from jaxmha.checkpoint.errors import listed

Path = tuple[str, ...]  # a name, split at "." and "/"


def _set_of(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keys of training states, at any depth: Flax, T5X, Lightning, and PyTorch by convention.
_SUBTREES = {
    "opt_state", "opt_states", "optimizer_state", "optimizer_states",
    "optimizer_state_dict", "optim_state", "optim_state_dict",
}  # fmt: skip
_FIRST = {"optimizer", "optimizers"}  # keys at the top: Keras, nnx and PyTorch by convention

# Entries that `torch.optim` stores per parameter, under `state.NUMBER` or `state.NAME`. Weak ones
# are also names of weights: they need a number, or `step` next to them.
_OF_TORCH = _set_of(
    "exp_avg exp_avg_sq max_exp_avg_sq exp_inf momentum_buffer square_avg grad_avg acc_delta "
    "row_var col_var prev_flat_grad mu_product"
)
_WEAK_OF_TORCH = {"sum", "variance", "prev", "step_size", "ax", "eta"}
_GROUPS = "param_groups"  # next to `state` in each state dict of `torch.optim`

# Fields of states in optax and optax.contrib: trees with the keys of the weights.
_TREES = _set_of(
    "mu nu nu_max m1 m2 trace sum_of_squares e_g e_x v_row v_col step_sizes prev_updates "
    "previous_gradient grad_acc acc_grads avg_grad mean_grads sum_sq_diff_grads mean_grads_ema "
    "variance_grads_ema exp_avg exp_avg_sq grad_sum grad_sum_sq params0 init_params max_dist "
    "grad_sum_of_squares diff_params_memory diff_updates_memory init_particles "
    "cumulative_gradients subgradients reward"
)
_SHORT = {"mu", "nu"}
# Such fields whose names are also those of weights -> the fields of which one is next to them.
_AMBIGUOUS = {
    "v": {"v_row", "g"},
    "m": {"n"},
    "n": {"m"},
    "g": {"n"},
    "s": {"grad_sum_sq"},
    "x0": {"base_optimizer_state", "grad_sum_sq"},
    "z": {"base_optimizer_state"},
    "projector": {"base_optimizer_state"},
    "cache": {"steps_since_sync"},
    "grad": {"learning_rate"},
    "params": {"diff_params_memory"},
    "updates": {"diff_updates_memory"},
    "scale": {"subgradients"},
}
_NESTED = _set_of(
    "inner_state inner_states inner_opt_state base_optimizer_state fast_state adv_state "
    "hessian_fn_state hyperparams hyperparams_states skip_state info"
)
_STATES = {"opt", "optim", "optimizer", "optimiser", "state", "states", *_NESTED}
# Names of the arrays of any layer: a field directly above them may be a layer.
_LEAVES = {"weight", "bias", "kernel", "scale", "embedding"}
_NUMBERS = _set_of(
    "count count_m2 t r b1 step step_count micro_step mini_step gradient_step steps_since_sync "
    "ready weight_sum max_lr lr learning_rate value weights_memory estim_lr numerator_weighted "
    "barf gamma lb rng_key key ns_coeffs found_nan is_init_step is_initial_step "
    "sum_sq_norm_grads weighted_sq_norm_grads estim_sq_dist notfinite_count last_finite "
    "total_notfinite best_value plateau_count cooldown_count avg_value ema_decay"
)
# In a chain, `optax.ema` averages gradients; elsewhere, often the weights.
_IN_CHAIN = "ema"
_FIELDS = {*_TREES, *_AMBIGUOUS, *_NESTED, *_NUMBERS, _IN_CHAIN}


def find(names: Iterable[str], others: Iterable[str] = ()) -> list[str]:
    """The names of all tensors of optimizers, in their order.

    `others`: names of entries of the file that are not tensors, such as learning rates.

    >>> find(["w", "optimizer.state.0.exp_avg", "opt_state/0/mu/w", "a/mu/w", "a/nu/w", "mu/w"])
    ['optimizer.state.0.exp_avg', 'opt_state/0/mu/w', 'a/mu/w', 'a/nu/w']
    """
    every = {name: _split(name) for name in names}
    found = {path for path in every.values() if _is_named(path)}
    roots = {*_of_torch(every.values()), *_with_groups([*every.values(), *map(_split, others)])}
    found |= {path for path in every.values() if any(p in roots for p in _prefixes(path))}
    found |= _of_optax([path for path in every.values() if path not in found])
    return [name for name, path in every.items() if path in found]


def described(count: int, others: Iterable[str]) -> str:
    """The parts of an optimizer in a file: `count` arrays, and settings such as learning rates; or "".

    `others`: as in `find`.

    >>> described(6, ["epoch", "optimizer.param_groups.0.lr", "optimizer.param_groups.0.eps"])
    '6 arrays and the settings (optimizer.param_groups) of an optimizer'
    """
    found = _with_groups(map(_split, others))
    groups = dict.fromkeys(".".join(path) for path in found if path[-1] == _GROUPS)
    parts = [f"{count} array{'s' * (count > 1)}"] * bool(count)
    parts += [f"the settings ({listed(list(groups))})"] * bool(groups)
    return f"{' and '.join(parts)} of an optimizer" if parts else ""


def key(name: str) -> Path | None:
    """The key of the weight of a moment of optax: the path below the field of its state.

    >>> key("opt_state/0/mu/dense/kernel"), key("optimizer.state.0.exp_avg")
    (('dense', 'kernel'), None)
    """
    path = _split(name)
    fields = [i for i, part in enumerate(path[:-1], 1) if part in _TREES]
    return path[fields[-1] :] if fields else None


def keys(names: Iterable[str]) -> set[Path]:
    """The keys that weights may have below a field of a state: all ends of their names."""
    return _ends(map(_split, names))


def _ends(paths: Iterable[Path]) -> set[Path]:
    return {path[i:] for path in paths for i in range(len(path))}


def _split(name: str) -> Path:
    return tuple(re.split(r"[./]", name))


def _prefixes(path: Path) -> Iterator[Path]:
    return (path[:i] for i in range(1, len(path)))


def _is_named(path: Path) -> bool:
    return path[0] in _FIRST or not _SUBTREES.isdisjoint(path)


def _of_torch(paths: Iterable[Path]) -> Iterator[Path]:
    """Yields the paths of `state` in states of `torch.optim`, found by the entries of parameters."""
    weak = dict[Path, set[str]]()  # parameter -> its entries
    for path in paths:
        key, own = path[-1], path[:-1]
        for i in (i for i, part in enumerate(own) if part == "state" and i + 1 < len(own)):
            if key in _OF_TORCH:
                yield path[: i + 1]
            elif key in _WEAK_OF_TORCH or key == "step":
                weak.setdefault(own, set()).add(key)
                if key != "step" and own[i + 1].isdigit() and len(own) == i + 2:
                    yield path[: i + 1]
    for own, keys in weak.items():
        if "step" in keys and len(keys) > 1:
            yield own[: own.index("state") + 1]


def _with_groups(paths: Iterable[Path]) -> Iterator[Path]:
    """Yields the paths of `param_groups`, and of `state` next to each."""
    for path in paths:
        if _GROUPS in path:
            before = path[: path.index(_GROUPS)]
            yield (*before, "state")
            yield (*before, _GROUPS)


def _of_optax(paths: Sequence[Path]) -> set[Path]:
    """The tensors of states of optax.

    A state is a node with no children but fields of states. Below one of its fields is a tree with
    the keys of the weights, or two of its fields have trees with the same keys.
    """
    possible = {*_TREES, *_AMBIGUOUS, _IN_CHAIN}
    nodes: dict[Path, list[Path]] = {
        path[:i]: [] for path in paths for i, part in enumerate(path[:-1]) if part in possible
    }
    for path in paths if nodes else ():
        for node in (path[:i] for i in range(len(path)) if path[:i] in nodes):
            nodes[node].append(path)
    states = {node: own for node, own in nodes.items() if _has_fields(node, own)}
    at_top = _trees((), {path[0] for path in states.get((), ())})
    weights = _ends(
        path
        for path in (paths if states else ())
        if path[0] not in at_top and not any(p in states for p in _prefixes(path))
    )
    return {path for node, own in states.items() for path in _in_state(node, own, weights)}


def _has_fields(node: Path, own: Sequence[Path]) -> bool:
    """True if all children of a node are fields of states; at the top there are also weights."""
    children = {path[len(node)] for path in own}
    if not node:
        return bool(_trees(node, children))
    if not children <= _FIELDS:
        return False
    chained = node[-1].isdigit()
    if not any(map(_is_state, node)) and not (chained and len(node) == 1):
        return children >= _SHORT  # layers have the name of one field, but rarely of both
    return chained or _is_state(node[-1]) or len(children) > 1


def _is_state(part: str) -> bool:
    return part in _STATES or part.endswith("_state")


def _trees(node: Path, children: set[str]) -> set[str]:
    """The children of a node that hold one array per weight, if the node is a state."""
    if not node:  # of few states alone: a VAE has `mu`, and weights are often under `params`
        return {*_TREES & children} - (set() if children >= _SHORT else _SHORT)
    more = {field for field, near in _AMBIGUOUS.items() if near & children}
    return {*_TREES & children} | more | ({_IN_CHAIN} if node[-1].isdigit() else set())


def _in_state(node: Path, own: Sequence[Path], weights: set[Path]) -> Iterator[Path]:
    """Yields the tensors of a node, if it is a state of optax."""
    start = len(node) + 1
    trees = _trees(node, {path[start - 1] for path in own})
    fields = defaultdict[Path, set[str]](set)  # key of a weight -> the fields with it
    for path in own:
        if path[start - 1] in trees and len(path) > start:
            fields[path[start:]].add(path[start - 1])
    keys = [rest for rest in fields if len(_unnumbered(rest)) > 1 or rest[0] not in _LEAVES]
    named = [rest for rest in keys if rest in weights or _unnumbered(rest) in weights]
    twice = [rest for rest in keys if node and len(fields[rest]) > 1]
    if named or twice:
        numbers = _NUMBERS if node else set()
        for path in own:
            if path[start - 1] in trees or (path[start - 1] in numbers and len(path) == start):
                yield path


def _unnumbered(rest: Path) -> Path:
    """The path without a number at its end: SM3 has one array per axis of a weight."""
    return rest[:-1] if rest[-1].isdigit() else rest
