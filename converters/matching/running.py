"""Runs a model in float64, or float32, and records the output of each of its layers."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from jaxmha.converters.discovery import live_model
from jaxmha.converters.layout.arrays import NDArray, framework_of, is_float, to_numpy
from jaxmha.converters.matching.leaves import node, tree_leaves
from jaxmha.converters.matching.trees import keras_variables

Arguments = tuple[Any, ...] | Mapping[str, Any]
Place = tuple[int | str, ...]  # keys and positions that lead to an array in an output
Outputs = dict[Place, NDArray]


class Run(NamedTuple):
    """The arrays that a model returned, and path -> that of a layer, in the order of their returns.

    A path consists of attribute names; the path of the model is empty. Of a layer, only the first
    array of its first call is kept. Layers that returned traced arrays, as under `jit`, are left out.
    `refused`: the error that a model raised in float64, which then ran in float32; or None.
    """

    outputs: Outputs
    layers: dict[tuple[str, ...], NDArray]
    refused: Exception | None = None


class CopyError(Exception):
    """A model cannot be copied. Its cause says why."""


def run(model: Any, arguments: Arguments) -> Run:
    """Runs a copy of the model in float64, or in float32 if that raises, without dropout.

    Args:
      model: a torch, nnx, equinox or Keras model, or the pair of a linen module and its variables.
        A Keras model is not copied, and runs in its own dtype; during the call, layers that compute in
        half precision have the dtype policy float32, unless they are quantised.
      arguments: positional arguments as a tuple, or keyword arguments as a dict, of NumPy arrays
        and pytrees of them, such as a `Mask`. Other values are passed unchanged.

    Raises:
      TypeError: the model is of another framework. CopyError: it cannot be copied.
    """
    try:
        return _run(model, arguments, np.dtype(np.float64))
    except CopyError:
        raise
    except Exception as error:  # noqa: BLE001 (layers that cast to float32 raise all kinds)
        return _run(model, arguments, np.dtype(np.float32))._replace(refused=error)


def _run(model: Any, arguments: Arguments, dtype: np.dtype[Any]) -> Run:
    framework = framework_of(model)
    if framework == "torch":
        return _torch(model, arguments, dtype)
    import jax

    with ExitStack() as stack:
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        if framework == "keras":
            return _keras(model, arguments)
        stack.enter_context(jax.enable_x64(dtype == np.float64))
        if isinstance(model, tuple) and len(model) == 2:
            return _linen(*model, arguments, dtype)
        if framework == "flax":
            return _nnx(model, arguments, dtype)
        if framework == "equinox":
            return _equinox(model, arguments, dtype)
    raise TypeError(f"no model that can be run: {type(model).__name__}")


def check(model: Any, which: str) -> None:
    """Raises TypeError unless `run` can run `model`. `which`: its role in the message, "source" say."""
    pair = isinstance(model, tuple) and len(model) == 2
    if not pair and framework_of(model) not in ("torch", "keras", "flax", "equinox"):
        raise TypeError(
            "only a torch, nnx, linen, equinox or Keras model can be run, and the "
            f"{which} is {type(model).__name__}: pass the model object (for linen, the pair of module "
            "and variables; on the command line MODULE:FUNCTION that builds it), or leave out inputs, "
            "so that only arrays are compared"
        )


def _called(model: Callable[..., Any], arguments: Arguments, convert: Callable[[Any], Any]) -> Any:
    import jax

    def each(tree: Any) -> Any:
        return jax.tree.map(lambda x: convert(x) if hasattr(x, "dtype") else x, tree)

    if isinstance(arguments, Mapping):
        return model(**{name: each(value) for name, value in arguments.items()})
    return model(*map(each, arguments))


def _cast(array: Any, dtype: np.dtype[Any]) -> Any:
    return array.astype(dtype) if is_float(array.dtype) else array


def _first(output: object) -> NDArray | None:
    """Returns the first array in the output of a layer; None if it has none, or it is traced."""
    import jax

    for _, value in _flat(output):
        return None if isinstance(value, jax.core.Tracer) else to_numpy(value)
    return None


def _flat(output: object, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yields every array in an output of any framework, in order, with the keys that lead to it."""
    parts: Iterable[tuple[int | str, Any]] = ()
    if hasattr(output, "shape") and hasattr(output, "dtype"):
        yield place, output
    elif isinstance(output, Mapping):
        parts = ((str(key), value) for key, value in output.items())
    elif isinstance(output, tuple) and hasattr(output, "_fields"):
        parts = zip(output._fields, output, strict=True)
    elif isinstance(output, list | tuple):
        parts = enumerate(output)
    elif dataclasses.is_dataclass(output):
        parts = (
            (field.name, getattr(output, field.name, None)) for field in dataclasses.fields(output)
        )
    for key, value in parts:
        yield from _flat(value, (*place, key))


def _outputs(output: object) -> Outputs:
    return {place: to_numpy(value) for place, value in _flat(output)}


def _torch(model: Any, arguments: Arguments, dtype: np.dtype[Any]) -> Run:
    import torch

    module, found = _torch_copy(model).eval(), dict[tuple[str, ...], NDArray]()
    module = module.double() if dtype == np.float64 else module.float()

    def record(path: tuple[str, ...], _: Any, __: Any, output: Any) -> None:
        if path not in found and (value := _first(output)) is not None:
            found[path] = value

    for name, layer in module.named_modules():
        path = tuple(name.split(".")) if name else ()
        layer.register_forward_hook(functools.partial(record, path))

    def convert(value: Any) -> Any:
        return torch.as_tensor(_cast(np.array(value), dtype))

    # The fast path of nn.TransformerEncoder calls no layer: no hook would record an output.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            output = _called(module, arguments, convert)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return Run(_outputs(output), found)


def _torch_copy(model: Any) -> Any:
    """Copies a module, even if it holds computed tensors.

    Hooks of weight_norm and of pruning keep the weight that they compute as an attribute, and torch
    copies no tensor that has a gradient function. They compute it again in the copy.
    """
    import torch

    copy_leaf: Any = torch.Tensor.__deepcopy__

    def copied(tensor: Any, memo: dict[int, Any]) -> Any:
        return copy_leaf(tensor, memo) if tensor.is_leaf else tensor.detach().clone()

    with mock.patch.object(torch.Tensor, "__deepcopy__", copied):
        return _copied(copy.deepcopy, model)


def _copied(make: Callable[[Any], Any], model: Any) -> Any:
    try:
        return make(model)
    except Exception as error:
        raise CopyError from error


def _jax(value: Any, dtype: np.dtype[Any]) -> Any:
    import jax

    return jax.device_put(_cast(np.array(value), dtype))  # `jnp.asarray` would compile a program


def _patched(
    layers: Mapping[tuple[str, ...], Any], call: Callable[[], Any]
) -> tuple[Any, dict[tuple[str, ...], NDArray]]:
    """Calls `call` while the classes of these layers record the outputs of their `__call__`.

    Returns the result, and path -> first recorded output.
    """
    paths = {id(layer): path for path, layer in reversed(list(layers.items()))}
    found: dict[tuple[str, ...], NDArray] = {}
    active: set[int] = set()

    def recording(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def record(self: Any, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(id(self))
            # A `__call__` that calls that of its base class returns once: only then it is recorded.
            if path is None or id(self) in active:
                return original(self, *args, **kwargs)
            active.add(id(self))
            try:
                output = original(self, *args, **kwargs)
            finally:
                active.discard(id(self))
            if path not in found and (value := _first(output)) is not None:
                found[path] = value
            return output

        return record

    called = {base for layer in layers.values() for base in type(layer).__mro__}
    with ExitStack() as stack:
        for kind in called - {object}:
            if "__call__" in vars(kind):
                patch = mock.patch.object(kind, "__call__", recording(vars(kind)["__call__"]))
                stack.enter_context(patch)
        output = call()
    return output, found


def _nnx(model: Any, arguments: Arguments, dtype: np.dtype[Any]) -> Run:
    from flax import nnx

    cast = functools.partial(_jax, dtype=dtype)
    module = _copied(nnx.clone, model)
    module.eval()
    state = nnx.state(module)
    floats = [
        (path, leaf.replace(cast(leaf.get_value())))
        for path, leaf in nnx.to_flat_state(state)
        if is_float(leaf.get_value().dtype)
    ]
    nnx.update(module, nnx.from_flat_state(floats))
    layers = {tuple(map(str, path)): one for path, one in nnx.iter_modules(module)}
    for layer in layers.values():
        if _computes_in_float(layer):
            layer.dtype = dtype
    output, found = _patched(layers, lambda: _called(module, arguments, cast))
    return Run(_outputs(output), found)


def _computes_in_float(layer: object) -> bool:
    """True if a layer of Flax has a floating compute dtype."""
    dtype = getattr(layer, "dtype", None)
    return dtype is not None and is_float(dtype)


def _linen(module: Any, variables: Any, arguments: Arguments, dtype: np.dtype[Any]) -> Run:
    import jax
    from flax import linen

    cast = functools.partial(_jax, dtype=dtype)
    found: dict[tuple[str, ...], NDArray] = {}

    def record(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if _computes_in_float(context.module):  # a clone: the user's module keeps its dtype
            object.__setattr__(context.module, "dtype", dtype)
        output = call(*args, **kwargs)
        path = tuple(map(str, context.module.path))
        fresh = context.method_name == "__call__" and path not in found
        if fresh and (value := _first(output)) is not None:
            found[path] = value
        return output

    applied = functools.partial(module.apply, jax.tree.map(cast, variables))
    with linen.intercept_methods(record):
        output = _called(applied, arguments, cast)
    return Run(_outputs(output), found)


def _equinox(model: Any, arguments: Arguments, dtype: np.dtype[Any]) -> Run:
    import equinox
    import jax

    cast = functools.partial(_jax, dtype=dtype)
    arrays, rest = equinox.partition(equinox.nn.inference_mode(model), equinox.is_array)
    module = equinox.combine(jax.tree.map(cast, arrays), rest)
    layers: dict[tuple[str, ...], Any] = {(): module}
    for path, _ in tree_leaves(module):
        at, done = module, tuple[str, ...]()
        for key in path[:-1]:
            at, done = node(at, (key,)), (*done, key)
            if isinstance(at, equinox.Module):
                layers[done] = at
    output, found = _patched(layers, lambda: _called(module, arguments, cast))
    return Run(_outputs(output), found)


def _keras(model: Any, arguments: Arguments) -> Run:
    import keras

    paths: dict[tuple[str, ...], Any] = {(): model}
    for name, layer, _ in keras_variables(live_model.keras(model)):
        # The other model may compute an activation in a layer of its own, and the outputs of the
        # dense layers would differ: layers with an activation are not recorded.
        if getattr(layer, "activation", None) in (None, keras.activations.linear):
            paths[tuple(name.split("/")[:-1])] = layer
    with _keras_in_float32(model):
        output, found = _patched(paths, lambda: _called(model, arguments, np.asarray))
        return Run(_outputs(output), found)


@contextmanager
def _keras_in_float32(model: Any) -> Iterator[None]:
    """Lets the layers of a Keras model that compute in half precision compute in float32.

    Layers cast their inputs and variables to the compute dtype of their policy, and functional
    models cast inputs to the dtype of their symbolic inputs. Float64 would not be kept: on JAX and
    torch, operations of Keras round it to float32.
    """
    import keras

    half, single = ("float16", "bfloat16"), keras.DTypePolicy("float32")
    whole = model._flatten_layers()
    inner = (getattr(layer, "_functional", None) for layer in whole)  # inside a Sequential
    layers = {id(layer): layer for layer in (*whole, *filter(None, inner))}
    with ExitStack() as stack:
        for layer in layers.values():
            quantised = getattr(layer.dtype_policy, "quantization_mode", None) is not None
            if layer.compute_dtype in half and not quantised:
                stack.enter_context(mock.patch.object(layer, "_dtype_policy", single))
            for tensor in getattr(layer, "_inputs", None) or ():
                if tensor.dtype in half:
                    stack.enter_context(mock.patch.object(tensor, "_dtype", "float32"))
        yield
