"""Writes the arrays of a plan into a model of any framework, one at a time."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmha.checkpoint import Lazy
from jaxmha.converters.discovery import live_model
from jaxmha.converters.layout.arrays import NDArray, framework_of, to_torch
from jaxmha.converters.matching import leaves, trees


def fill(model: Any, ready: Lazy) -> Any:
    """Fills the arrays in `ready`; returns the model, or a new tree for linen, equinox and trees."""
    framework = framework_of(model)
    if framework == "torch":
        return into_torch(model, ready)
    if framework == "keras":
        return into_keras(model, ready)
    return (
        into_flax(model, ready)
        if framework == "flax" or isinstance(model, tuple)
        else into_tree(model, ready)
    )


def into_nnx(model: Any, ready: Lazy) -> Any:
    """Updates an nnx module in place, keeping the sharding of every array; returns the module."""
    from flax import nnx

    _check_dtypes(ready)
    variables = {"/".join(map(str, p)): (p, v) for p, v in nnx.to_flat_state(nnx.state(model))}
    for name in ready:
        path, variable = variables.pop(name)
        placed = _placed(ready[name], variable.get_value())
        nnx.update(model, nnx.from_flat_state([(path, variable.replace(placed))]))
    return model


def into_tree(tree: Any, ready: Lazy) -> Any:
    """Returns a tree of the same structure, in which arrays in `ready` replace those of their names."""
    import jax

    _check_dtypes(ready)
    values, structure = jax.tree_util.tree_flatten(tree)
    numbers = [n for n, x in enumerate(values) if hasattr(x, "shape") and hasattr(x, "dtype")]
    names = ["/".join(keys) for keys, _ in leaves.tree_leaves(tree)]
    place = dict(zip(names, numbers, strict=True))
    for name in ready:
        values[place[name]] = _placed(ready[name], values[place[name]])
    return jax.tree_util.tree_unflatten(structure, values)


def into_flax(model: Any, ready: Lazy) -> Any:
    """Updates and returns an nnx module; returns new linen variables, or a new `(module, variables)`."""
    if isinstance(model, tuple):
        return model[0], into_tree(model[1], ready)
    tree = isinstance(model, Mapping) and (hasattr(model, "flat_state") or not trees.is_nnx(model))
    return into_tree(model, ready) if tree else into_nnx(model, ready)


def _check_dtypes(ready: Lazy) -> None:
    """Raises ValueError if JAX would change a dtype (float64); called before the model is changed."""
    import jax

    for name, info in ready.info.items():
        if (made := jax.dtypes.canonicalize_dtype(info.dtype)) != info.dtype:
            raise ValueError(
                f"{name}: JAX would keep {info.dtype} as {made}: call "
                "jax.config.update('jax_enable_x64', True)"
            )


def _placed(value: NDArray, before: Any) -> Any:
    """Makes a JAX array with the sharding of the leaf that it replaces, if the leaf has one."""
    import jax

    sharding = getattr(before, "sharding", None)
    if sharding is None:
        return jax.device_put(np.array(value))  # `jnp.asarray` would compile one program per shape
    if not sharding.is_fully_addressable:  # each process places the shards of its own devices
        return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
    return jax.device_put(value, sharding)


def into_keras(model: Any, ready: Lazy) -> Any:
    """Assigns the arrays to the variables of a Keras model; returns the model."""
    live = live_model.keras(model)
    variables = {name: variable for name, _, variable in trees.keras_variables(live)}
    for name in ready:
        variables[name].assign(ready[name])
    return model


def into_torch(model: Any, ready: Lazy) -> Any:
    """Copies the arrays into the parameters and buffers of a torch module; returns the module.

    Raises ValueError, before the first copy, if a tensor of the module has another dtype or is on
    the meta device, or if `state_dict()` returns a copy of it, which would be filled in vain.
    """
    import torch

    state = model.state_dict()
    own = {_memory(x) for x in (*model.parameters(), *model.buffers())}
    for name, info in ready.info.items():
        if state[name].is_meta:
            raise ValueError(
                f"{name} is on the device meta, which keeps no values: call "
                'model.to_empty(device="cpu") first'
            )
        if state[name].numel() and _memory(state[name]) not in own:
            raise ValueError(
                f"{name} of model.state_dict() is a copy, and writing to it would leave the module as "
                "it is: pass the module before it is wrapped or quantised"
            )
        kept = str(state[name].dtype).removeprefix("torch.")
        if kept != info.dtype.name:
            raise ValueError(
                f"{name} is {kept} in the module, not {info.dtype}: convert the module with "
                ".to(...) first"
            )
    with torch.no_grad():
        for name in ready:
            state[name].copy_(to_torch(ready[name]))
    return model


def _memory(tensor: Any) -> int:
    """Returns the address of the storage that a tensor shares with its views; 0 if it has none."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except RuntimeError:  # a wrapper of other tensors, such as a DTensor
        return 0
