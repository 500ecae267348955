"""Draws the arguments of two models with `inputs` of the user, and runs a model on them."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxmha.converters.matching import running
from jaxmha.converters.matching.running import Arguments

Draw = Callable[[np.random.Generator], Any]
_TAKES = (
    "inputs is a function of a numpy.random.Generator that returns the arguments of both models"
)
_APART = ("source", "target")
_RETURNS = (
    'return a tuple of positional arguments, such as (x,), a dict by name, such as {"x": x}, or '
    '{"source": ..., "target": ...} with one of these for each'
)


def check(inputs: object, models: Mapping[str, Any]) -> None:
    """Raises TypeError unless `inputs` takes one generator, and `running` can run each model."""
    if not callable(inputs):
        raise TypeError(
            f"{_TAKES}, got {type(inputs).__name__}: pass lambda rng: ..., even if it draws nothing"
        )
    try:
        inspect.signature(inputs).bind(None)
    except TypeError as error:
        raise TypeError(f"{_TAKES}, and this one takes other arguments: {error}") from error
    except ValueError:  # a builtin without a signature: only a call can tell
        pass
    for which, model in models.items():
        running.check(model, which)


def draw(inputs: Draw, seed: int) -> tuple[Arguments, Arguments]:
    """Calls `inputs`; returns the arguments of the source and those of the target.

    Raises:
      TypeError: the returned value, or that for one model, is neither a tuple or list nor a dict.
      ValueError: `inputs` raised an error, or returned more than "source" and "target", or only one.
    """
    try:
        drawn = inputs(np.random.default_rng(seed))
    except Exception as error:
        raise ValueError(f"inputs raised {type(error).__name__}: {error}") from error
    if not isinstance(drawn, Mapping) or not any(map(_is_arguments, map(drawn.get, _APART))):
        return _checked(drawn, ""), _checked(drawn, "")
    if drawn.keys() != set(_APART):
        raise ValueError(
            f"inputs returned a dict of {', '.join(map(repr, drawn))}: arguments for each model need "
            "'source' and 'target', and nothing else"
        )
    return _checked(drawn["source"], "source"), _checked(drawn["target"], "target")


def _is_arguments(value: object) -> bool:
    return isinstance(value, tuple | list | Mapping)


def _checked(drawn: object, which: str) -> Arguments:
    if isinstance(drawn, Mapping):
        return drawn
    if isinstance(drawn, tuple | list):
        return tuple(drawn)
    where = f" as {which!r}" if which else ""
    raise TypeError(f"inputs returned {_shown(drawn)}{where}: {_RETURNS}")


def run(model: Any, which: str, arguments: Arguments) -> running.Run:
    """Runs a model. Raises ValueError, which shows arguments and signature, if the model raises."""
    name = type(_module(model)).__name__
    try:
        return running.run(model, arguments)
    except running.CopyError as error:
        cause = error.__cause__
        raise ValueError(
            f"the {which} {name} cannot be copied, and only a copy is run in float64: "
            f"{type(cause).__name__}: {cause}. Take away what cannot be copied, such as open files and "
            "locks, or leave out inputs, so that only arrays are compared"
        ) from cause
    except Exception as error:
        takes = _signature(model)
        raise ValueError(
            f"the {which} {name} does not run on the arguments that inputs "
            f"returned, {_listed(arguments)}{takes and f', and takes {takes}'}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _module(model: Any) -> Any:
    """Returns the module of a pair of linen module and variables; any other model unchanged."""
    return model[0] if isinstance(model, tuple) else model


def _signature(model: Any) -> str:
    """The parameters of the model's forward method; "" if they are unknown."""
    methods = (getattr(_module(model), name, None) for name in ("forward", "call", "__call__"))
    try:
        return str(inspect.signature(next(filter(callable, methods))))
    except (StopIteration, TypeError, ValueError):
        return ""


def _listed(arguments: Arguments) -> str:
    if isinstance(arguments, Mapping):
        return f"({', '.join(f'{name}={_shown(x)}' for name, x in arguments.items())})"
    return f"({', '.join(map(_shown, arguments))})"


def _shown(value: Any) -> str:
    """Returns the dtype and shape of an array, or the type of any other value, for messages."""
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
