"""`use` replaces functions of Keras while a switch is on."""

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

from jaxmha.extras import needed
from jaxmha.keras import attention

# Versions whose own tests pass under `use()`; others may compute attention in other functions.
VERSIONS = ("3.15.0", "3.15.1")

_lock = threading.RLock()
_switches: set["Switch"] = set()
_replaced: list["_Replaced"] = []


class _Replaced(NamedTuple):
    """A function of Keras, the module or class that holds it, and the function that replaces it."""

    place: Any
    name: str
    own: Callable[..., Any]
    instead: Callable[..., Any]


class Switch:
    """The result of `use`: on until `off`, or until the end of a `with` block."""

    def __init__(self) -> None:
        self.on()

    def on(self) -> None:
        """Switches on; a second call has no effect."""
        with _lock:
            if not _replaced:
                _replaced.extend(_replace(*seam) for seam in _seams())
            _switches.add(self)

    def off(self) -> None:
        """Switches off; Keras computes its own attention once every switch is off."""
        with _lock:
            _switches.discard(self)
            if _switches:
                return
            for place, name, own, instead in _replaced:
                # Other code may have replaced our function, which then only calls Keras' own.
                if getattr(place, name) is instead:
                    setattr(place, name, own)
            _replaced.clear()

    def __enter__(self) -> Self:
        self.on()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.off()


def use() -> Switch:
    """From now on Keras' own attention layers compute with jaxmha, on the JAX backend.

    These are `keras.layers.MultiHeadAttention`, `GroupQueryAttention` and
    `keras.ops.dot_product_attention`, in models that exist and in new ones, with the same weights
    and the same meaning of every argument. Keras still computes calls that jaxmha cannot compute
    alike: dropout in training, several attended axes, `flash_attention=True`, biases, soft caps,
    masks that are not Boolean, and `_compute_attention` of derived classes that returns scores.

    As a context manager it ends with the block; otherwise call `off()` of the result. Blocks nest,
    and an exception ends a block too. The switch holds for all threads of the process.
    Functions that were compiled before keep Keras' attention, and functions compiled in a block
    keep jaxmha: call `model.make_predict_function(force=True)`, `make_train_function` or
    `make_test_function` to compile a model again.

    Raises:
      ModuleNotFoundError: Keras is not installed.
      RuntimeError: the version of Keras is not one of `VERSIONS`, or its backend is not JAX.

    >>> import keras, numpy as np
    >>> layer, x = keras.layers.MultiHeadAttention(2, 3), np.ones((2, 5, 6), np.float32)
    >>> own = layer(x, x, use_causal_mask=True)
    >>> with use():
    ...     out = layer(x, x, use_causal_mask=True)
    >>> bool(abs(out - own).max() < 1e-6)
    True
    """
    with needed("keras"):
        import keras
    if keras.__version__ not in VERSIONS:
        raise RuntimeError(
            f"jaxmha.keras.use() knows Keras {', '.join(VERSIONS)}, and this is Keras "
            f"{keras.__version__}, which may compute attention elsewhere: install one of these, or "
            "convert the layers with jaxmha.converters.keras.from_module"
        )
    if keras.backend.backend() != "jax":
        raise RuntimeError(
            f"jaxmha.keras.use() needs Keras on JAX, and its backend is {keras.backend.backend()}: "
            "set KERAS_BACKEND=jax before Keras is imported"
        )
    return Switch()


def _seams() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Every function to replace: its module or class, its name, and jaxmha's function for it."""
    import keras
    from keras.src.backend.jax import nn

    return [
        (nn, "dot_product_attention", attention.fused),
        (keras.layers.MultiHeadAttention, "_compute_attention", attention.of_multi_head),
        (keras.layers.GroupQueryAttention, "_compute_attention", attention.of_grouped),
    ]


def _replace(place: object, name: str, ours: Callable[..., Any]) -> _Replaced:
    own = getattr(place, name)

    @functools.wraps(own)
    def instead(*arguments: object, **keywords: object) -> object:
        found = ours(*arguments, **keywords) if _switches else None
        return own(*arguments, **keywords) if found is None else found

    setattr(place, name, instead)
    return _Replaced(place, name, own, instead)
