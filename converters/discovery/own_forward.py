"""Refuses layers whose parameters do not determine their output.

A class of the user's own, an attribute of one object, a sublayer of another class and a setting can
each change what a layer computes, and none of them shows in its arrays.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from inspect import getattr_static, getclosurevars
from types import MethodType
from typing import Any

import jax

Settings = Mapping[str, Sequence[object]]


def refuse_own_forward(
    layer: object, kinds: Sequence[type], names: Collection[str], instead: str, path: str = ""
) -> None:
    """Raises ValueError unless a layer computes as the first of `kinds` that it is an instance of.

    Args:
      layer: a layer of a framework.
      kinds: classes of the framework, or of jaxmha.
      names: the methods that compute. It raises if a subclass, an attribute of the layer, or an
        assignment to the class replaced one of them.
      instead: the call that imports the parameters nevertheless, for the message.
      path: where a sublayer is in its layer, for the message; "" for the layer itself.
    """
    where = f"{path}: " * bool(path)
    kind = next((one for one in kinds if isinstance(layer, one)), None)
    if kind is None:
        expected = " or ".join(one.__name__ for one in kinds)
        raise ValueError(
            f"{where}expected {expected}, got {type(layer).__name__}, which may compute anything: "
            f"take the weights alone by {instead}"
        )
    for name in names:
        if owner := _replaced_by(layer, kind, name):
            if _is_jitted(layer, name):
                raise ValueError(
                    f"{where}jax.jit compiled the {name} of this object, and keeps the weights of "
                    f"its first call as constants, even if they change: undo it by delattr(layer, "
                    f"{name!r}), or take the weights by {instead}"
                )
            if _is_stack(layer, name):
                raise ValueError(
                    f"{where}linen.vmap runs the layers of a stack, and semantics are of one: "
                    f"take the stack by {instead}, and one layer of it by "
                    "jax.tree.map(lambda x: x[0], params)"
                )
            raise ValueError(
                f"{where}{owner} has a {name} of its own, so its parameters do not determine its "
                f"output: take them by {instead}"
            )


def _replaced_by(layer: object, kind: type, name: str) -> str:
    """Names the class or object whose method `name` replaces that of `kind`; "" if none does."""
    standard = getattr_static(kind, name, None)
    if _unlifted(getattr_static(type(layer), name, None)) is not standard:
        return next(base for base in type(layer).__mro__ if name in vars(base)).__name__
    if standard is not None and not _is_of(standard, kind):
        return kind.__name__  # something was assigned to the class
    own = None if name.startswith("__") else vars(layer).get(name)
    if own is None or own is standard:
        return ""
    bound = _uncompiled(own)
    if isinstance(bound, MethodType) and bound.__self__ is layer:
        # torch.nn.Module.compile sets _compiled_call_impl to the compiled _call_impl.
        names = {"_compiled_call_impl": "_call_impl"}
        if bound.__func__ is getattr_static(kind, names.get(name, name)):
            return ""
    return f"this {type(layer).__name__} object"


def _unlifted(method: Any) -> Any:
    """The method that `linen.remat` or `linen.jit` wraps, which computes the same.

    Any other method is returned as it is.

    linen makes a subclass, whose methods close over those of the layer's class.
    """
    while _module_of(method) == "flax.linen.transforms":
        from flax.core import lift

        held = getclosurevars(method).nonlocals
        if held.get("transform") not in (lift.checkpoint, lift.jit):
            return method
        method = held["fn"]
    return method


def _is_stack(layer: object, name: str) -> bool:
    """True if `linen.vmap` lifted a method of the layer, with parameters stacked on their first axis."""
    method = getattr_static(type(layer), name, None)
    if _module_of(method) != "flax.linen.transforms":
        return False
    from flax.core import lift

    held = getclosurevars(method).nonlocals
    axes = held["trafo_args"][0] if held.get("transform") is lift.vmap else {}
    return isinstance(axes, Mapping) and axes.get("params", axes.get(True)) == 0


# Modules of frameworks whose wrappers compute as the function that they wrap.
_SAME = (
    "contextlib",
    "jax._src.source_info_util",
    "jaxtyping",
    "tensorflow.python.eager",
    "torch.",
)


def _is_of(method: Any, kind: type) -> bool:
    """True if a method is the own code of `kind`, of one of its bases, or of jaxmha.

    Wrappers are allowed if they compute the same (`_SAME`) or are of the framework itself. Globals
    tell whose code it is: `functools.wraps` copies `__module__` and `__name__`, but not globals.
    """
    classes = {base.__module__ for base in kind.__mro__}
    packages = {name.partition(".")[0] for name in classes}
    while (wrapped := getattr(method, "__wrapped__", None)) is not None:
        module = _module_of(method)
        if not module.startswith(_SAME) and module.partition(".")[0] not in packages:
            return False
        method = wrapped
    module = _module_of(method)
    return module in classes or module.startswith("jaxmha.")


def _module_of(function: Any) -> str:
    """The module that defines a function's code; for another callable, the module of its class."""
    if hasattr(function, "__globals__"):
        return str(function.__globals__.get("__name__"))
    return type(function).__module__


def _uncompiled(function: Any) -> Any:
    """The function that `torch.compile` or `tf.function` compiled; any other function itself."""
    while _module_of(function).startswith("torch._dynamo"):
        function = function.__wrapped__
    if _module_of(function).startswith("tensorflow."):
        function = function.python_function
    return function


def _is_jitted(layer: Any, name: str) -> bool:
    """True if an attribute of the layer is its own method, compiled by `jax.jit`."""
    own = vars(layer).get(name)
    wrapped = getattr(own, "__wrapped__", None)
    method = getattr_static(type(layer), name, None)
    return isinstance(own, type(jax.jit(len))) and getattr(wrapped, "__func__", None) is method


def refuse_settings(layer: object, settings: Settings, instead: str, path: str) -> None:
    """Raises ValueError if an attribute of a layer has none of the values that `settings` lists.

    An attribute that the layer lacks, as in an older release of the framework, does not raise.
    """
    for name, values in settings.items():
        given = getattr(layer, name, values[0])
        value = _but_for_rounding(given)
        if any(value is one or (type(value) is type(one) and value == one) for one in values):
            continue
        functions = [one for one in values if callable(one)]
        expected = functions[0] if functions else values[0]
        raise ValueError(
            f"{path}.{name}={_shown(given)} is not the default {_shown(expected)}, and may compute "
            f"anything: take the weights alone by {instead}"
        )


def _but_for_rounding(value: object) -> object:
    """The function of a partial that only sets how products are rounded, to float32 or finer.

    Any other value is returned as it is.
    """
    if not isinstance(value, partial) or value.args:
        return value
    others = value.keywords.keys() - {"precision", "preferred_element_type"}
    dtype = value.keywords.get("preferred_element_type") or "float32"
    return value if others or jax.numpy.dtype(dtype) not in ("float32", "float64") else value.func


def _shown(value: object) -> str:
    return getattr(value, "__qualname__", repr(value))
