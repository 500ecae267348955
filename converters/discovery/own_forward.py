"""Refuses layers whose parameters do not determine their output.

A class of the user's own, an attribute of one object, a sublayer of another class and a setting can
each change what a layer computes, and none of them shows in its arrays.
"""

from collections.abc import Collection, Mapping, Sequence
from inspect import getattr_static, getclosurevars
from typing import Any

Settings = Mapping[str, Sequence[object]]


def refuse_own_forward(
    layer: object, kinds: Sequence[type], names: Collection[str], instead: str, path: str = ""
) -> None:
    """Raises ValueError unless a layer computes as the first class of `kinds` that it is of.

    Args:
      layer: of a framework.
      kinds: classes of the framework, or of jaxmha.
      names: the methods that compute. A subclass, an attribute of the layer, or an assignment to
        the class may replace them.
      instead: the call that imports the parameters nevertheless, for the message.
      path: of a sublayer, for the message.
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
            raise ValueError(
                f"{where}{owner} has a {name} of its own, so its parameters do not determine its "
                f"output: take them by {instead}"
            )


def _replaced_by(layer: object, kind: type, name: str) -> str:
    """Names the class or object whose method `name` replaces that of `kind`; "" if none does."""
    standard = getattr_static(kind, name, None)
    if _unlifted(getattr_static(type(layer), name, None)) is not standard:
        return next(base for base in type(layer).__mro__ if name in vars(base)).__name__
    packages = {"jaxmha", *map(_package, kind.__mro__)}
    if standard is not None and _package(standard) not in packages:
        return kind.__name__  # an assignment to the class
    own = None if name.startswith("__") else _uncompiled(vars(layer).get(name))
    if own is None or own is standard:
        return ""
    bound = getattr(own, "__func__", None) is standard and getattr(own, "__self__", None) is layer
    return "" if bound else f"this {type(layer).__name__} object"


def _unlifted(method: Any) -> Any:
    """The method that `linen.remat` or `linen.jit` lifted, which computes the same; any other itself.

    linen makes a subclass, whose methods close over the lifted ones.
    """
    while getattr(method, "__globals__", {}).get("__name__") == "flax.linen.transforms":
        from flax.core import lift

        held = getclosurevars(method).nonlocals
        if held.get("transform") not in (lift.checkpoint, lift.jit):
            return method
        method = held["fn"]
    return method


def _package(defined: Any) -> str:
    return str(defined.__module__).partition(".")[0]


def _uncompiled(function: Any) -> Any:
    """The function that `torch.compile` or `tf.function` compiled; any other function itself."""
    function = getattr(function, "_torchdynamo_orig_callable", function)
    if str(getattr(function, "__globals__", {}).get("__name__")).startswith("torch._dynamo"):
        function = function.__wrapped__  # torch wraps functions of its own once more
    return getattr(function, "python_function", function)


def refuse_settings(layer: object, settings: Settings, instead: str, path: str) -> None:
    """Raises ValueError if an attribute of a layer has none of the values that `settings` lists.

    An attribute that the layer lacks, as in an older release of the framework, is not changed.
    """
    for name, values in settings.items():
        value = getattr(layer, name, values[0])
        if any(value is one or (type(value) is type(one) and value == one) for one in values):
            continue
        functions = [one for one in values if callable(one)]
        expected = functions[0] if functions else values[0]
        raise ValueError(
            f"{path}.{name}={_shown(value)} is not the default {_shown(expected)}, and may compute "
            f"anything: take the weights alone by {instead}"
        )


def _shown(value: object) -> str:
    return getattr(value, "__qualname__", repr(value))
