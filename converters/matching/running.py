"""Runs a model in float64 and records the output of each of its layers."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from jaxmha.converters.layout.arrays import NDArray, packages_of, to_numpy
from jaxmha.converters.matching.trees import keras_variables, node, tree_leaves

Arguments = tuple[Any, ...] | Mapping[str, Any]


class Run(NamedTuple):
    """The outputs of a model, and path -> output of its layers, in the order of their returns.

    A path consists of attribute names; the path of the model is empty. A layer has only the first
    array of its first call. Layers that returned traced arrays, as under `jit`, are left out.
    """

    outputs: list[NDArray]
    layers: dict[tuple[str, ...], NDArray]


def run(model: Any, arguments: Arguments) -> Run:
    """Runs a copy of the model in float64, without dropout.

    Args:
      model: a torch, nnx, equinox or Keras model, or the pair of a linen module and its variables.
        A Keras model runs in its own dtype.
      arguments: positional arguments as a tuple, or keyword arguments as a dict, of NumPy arrays
        and pytrees of them, such as a `Mask`. Other values are passed unchanged.

    Raises:
      TypeError: the model is of another kind.
    """
    packages = packages_of(model)
    if "torch" in packages:
        return _torch(model, arguments)
    if "keras" in packages:
        return _keras(model, arguments)
    import jax

    with jax.enable_x64(True), ExitStack() as stack:
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        if isinstance(model, tuple) and len(model) == 2:
            return _linen(*model, arguments)
        if "flax" in packages:
            return _nnx(model, arguments)
        if "equinox" in packages:
            return _equinox(model, arguments)
    raise TypeError(
        f"only a torch, nnx, linen, equinox or Keras model can be run, not {type(model).__name__}"
    )


def _called(model: Callable[..., Any], arguments: Arguments, convert: Callable[[Any], Any]) -> Any:
    import jax

    def each(tree: Any) -> Any:
        return jax.tree.map(lambda x: convert(x) if hasattr(x, "dtype") else x, tree)

    if isinstance(arguments, Mapping):
        return model(**{name: each(value) for name, value in arguments.items()})
    return model(*map(each, arguments))


def _wide(array: Any) -> Any:
    return array.astype(np.float64) if np.issubdtype(array.dtype, np.floating) else array


def _first(output: Any) -> Any:
    """Returns the first array in the output of a layer; None if it has none, or it is traced."""
    import jax

    for value in _flat(output):
        return None if isinstance(value, jax.core.Tracer) else to_numpy(value)
    return None


def _flat(output: Any) -> Iterator[Any]:
    """All arrays in an output of any framework, in order."""
    if hasattr(output, "shape") and hasattr(output, "dtype"):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _flat(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _flat(value)


def _outputs(output: Any) -> list[NDArray]:
    return [to_numpy(value) for value in _flat(output)]


def _torch(model: Any, arguments: Arguments) -> Run:
    import torch

    module, found = copy.deepcopy(model).double().eval(), dict[tuple[str, ...], NDArray]()

    def record(path: tuple[str, ...], _: Any, __: Any, output: Any) -> None:
        if path not in found and (value := _first(output)) is not None:
            found[path] = value

    for name, layer in module.named_modules():
        path = tuple(name.split(".")) if name else ()
        layer.register_forward_hook(functools.partial(record, path))

    def convert(value: Any) -> Any:
        return torch.as_tensor(_wide(np.array(value)))

    # The fast path of nn.TransformerEncoder calls no layer.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            output = _called(module, arguments, convert)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return Run(_outputs(output), found)


def _jax(value: Any) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(_wide(np.array(value)))


def _patched(
    layers: Mapping[tuple[str, ...], Any], call: Callable[[], Any]
) -> tuple[Any, dict[tuple[str, ...], NDArray]]:
    """Calls `call` while the classes of these layers record the outputs of their `__call__`.

    Returns the result, and path -> first recorded output.
    """
    paths = {id(layer): path for path, layer in reversed(list(layers.items()))}
    found: dict[tuple[str, ...], NDArray] = {}

    def recording(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def record(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            path = paths.get(id(self))
            if path is not None and path not in found and (value := _first(output)) is not None:
                found[path] = value
            return output

        return record

    with ExitStack() as stack:
        for kind in {type(layer) for layer in layers.values()}:
            if "__call__" in vars(kind):
                patch = mock.patch.object(kind, "__call__", recording(vars(kind)["__call__"]))
                stack.enter_context(patch)
        output = call()
    return output, found


def _nnx(model: Any, arguments: Arguments) -> Run:
    from flax import nnx

    module = nnx.clone(model)
    module.eval()
    state = nnx.state(module)
    floats = [
        (path, leaf.replace(_jax(leaf.get_value())))
        for path, leaf in nnx.to_flat_state(state)
        if np.issubdtype(leaf.get_value().dtype, np.floating)
    ]
    nnx.update(module, nnx.from_flat_state(floats))
    layers = {tuple(map(str, path)): one for path, one in nnx.iter_modules(module)}
    for layer in layers.values():
        if getattr(layer, "dtype", None) is not None:
            layer.dtype = np.dtype(np.float64)
    output, found = _patched(layers, lambda: _called(module, arguments, _jax))
    return Run(_outputs(output), found)


def _linen(module: Any, variables: Any, arguments: Arguments) -> Run:
    import jax
    from flax import linen

    found: dict[tuple[str, ...], NDArray] = {}

    def record(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        output = call(*args, **kwargs)
        path = tuple(map(str, context.module.path))
        fresh = context.method_name == "__call__" and path not in found
        if fresh and (value := _first(output)) is not None:
            found[path] = value
        return output

    wide = jax.tree.map(_jax, variables)
    with linen.intercept_methods(record):
        output = _called(functools.partial(module.apply, wide), arguments, _jax)
    return Run(_outputs(output), found)


def _equinox(model: Any, arguments: Arguments) -> Run:
    import equinox
    import jax

    arrays, rest = equinox.partition(equinox.nn.inference_mode(model), equinox.is_array)
    module = equinox.combine(jax.tree.map(_jax, arrays), rest)
    layers: dict[tuple[str, ...], Any] = {(): module}
    for path, _ in tree_leaves(module):
        at, done = module, tuple[str, ...]()
        for key in path[:-1]:
            at, done = node(at, (key,)), (*done, key)
            if isinstance(at, equinox.Module):
                layers[done] = at
    output, found = _patched(layers, lambda: _called(module, arguments, _jax))
    return Run(_outputs(output), found)


def _keras(model: Any, arguments: Arguments) -> Run:
    paths: dict[tuple[str, ...], Any] = {(): model}
    for name, layer, _ in keras_variables(model):
        paths[tuple(name.split("/")[:-1])] = layer
    output, found = _patched(paths, lambda: _called(model, arguments, np.asarray))
    return Run(_outputs(output), found)
