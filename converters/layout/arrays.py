"""Converts arrays of any framework to NumPy; imports a framework only if an array is from it."""

from collections.abc import Container
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from jaxmha.converters.layout.torch_arrays import from_torch
from jaxmha.extras import needed

NDArray = np.ndarray[Any, np.dtype[Any]]
if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike, DTypeLike

    class Tensor(Protocol):
        """An array of any framework."""

        @property
        def shape(self) -> Any: ...
        @property
        def dtype(self) -> Any: ...

    AnyArray: TypeAlias = Tensor | ArrayLike
else:
    AnyArray = object  # at run time `to_numpy` checks the type

# Frameworks whose models `jaxmha.converters.matching` reads and fills.
FRAMEWORKS = ("torch", "keras", "flax", "equinox")


def to_numpy(array: AnyArray, name: str = "") -> NDArray:
    """A fresh C-contiguous NumPy copy with the dtype unchanged (bfloat16 through ml_dtypes).

    Accepts NumPy and JAX arrays, torch tensors, Keras and TensorFlow variables, and anything else
    that NumPy can convert. `name` is shown for a tensor of torch that cannot be read.

    >>> to_numpy([1.0, 2.0])
    array([1., 2.])
    """
    found: Any = array
    if is_traced(found):
        raise TypeError(
            f"expected values, got {found.dtype}{list(found.shape)} traced by jit, grad or vmap: only "
            "import_params and export_params of jaxmha.converters.flax, .equinox and .haiku take "
            "traced arrays; call others outside of the traced function"
        )
    packages = packages_of(found)
    # First, because a Keras variable may derive from a class of torch or TensorFlow: it must be
    # replaced by its value before the branches below.
    if "keras" in packages or "flax" in packages:
        get = getattr(found, "get_value", None)  # of nnx, whose `value` is deprecated
        inner = getattr(found, "value", found) if get is None else get()
        inner = inner() if callable(inner) else inner
        if inner is not found:
            return to_numpy(inner, name)
    if "torch" in packages:
        return from_torch(found, name)
    if "tensorflow" in packages:
        found = found.numpy()
    refuse_abstract(found, name)
    return np.array(found, order="C", copy=True)


def refuse_abstract(array: object, name: str = "") -> None:
    """Raises ValueError, with the name, for a `jax.ShapeDtypeStruct`, which has no values."""
    if "jax" not in packages_of(array) or type(array).__name__ != "ShapeDtypeStruct":
        return
    found: Any = array
    raise ValueError(
        f"{name or 'an array'}: a ShapeDtypeStruct of {found.dtype}{list(found.shape)} is abstract "
        "and has no values (eval_shape makes such): load the weights into the layer first"
    )


def is_traced(array: object) -> bool:
    """True for an array that a transformation of JAX traces, which has no values.

    >>> is_traced(np.zeros(3))
    False
    """
    if "jax" not in packages_of(array):
        return False
    import jax

    return isinstance(array, jax.core.Tracer)


def kept(array: AnyArray) -> NDArray:
    """A NumPy copy, as `to_numpy`; a traced array stays as it is."""
    found: Any = array
    return found if is_traced(found) else to_numpy(found)


def to_torch(array: NDArray) -> "torch.Tensor":
    """A torch tensor with a copy of the array; the dtype is unchanged."""
    with needed("torch"):
        import torch

    copy = np.array(array, order="C", copy=True)
    try:
        return torch.from_numpy(copy)
    except TypeError:  # torch.from_numpy rejects bfloat16 and float8 of ml_dtypes
        dtype = getattr(torch, copy.dtype.name)
        return torch.from_numpy(copy.view(f"i{copy.dtype.itemsize}")).view(dtype)


def cast(array: NDArray, dtype: str | None) -> NDArray:
    """Casts a floating array to another dtype; returns other arrays, or for None all, unchanged.

    >>> cast(np.ones(2), "float32").dtype, cast(np.arange(2), "float32").dtype.kind
    (dtype('float32'), 'i')
    """
    import jax.numpy as jnp

    if dtype is None or not is_float(array.dtype):
        return array
    with np.errstate(over="ignore"):
        return array.astype(jnp.dtype(dtype))


def is_float(dtype: Any) -> bool:
    """True for a floating dtype, also for those that NumPy does not know, such as bfloat16."""
    import jax.numpy as jnp

    return bool(jnp.issubdtype(dtype, jnp.floating))


def narrower(one: "DTypeLike", other: "DTypeLike") -> np.dtype[Any]:
    """Returns the floating dtype that stores fewer significand bits; the first if both are equal.

    >>> narrower(np.float32, np.float16), narrower(np.float32, np.float64)
    (dtype('float16'), dtype('float32'))
    """
    from jaxmha.arrays import to_dtype

    return min(to_dtype(one), to_dtype(other), key=_significand)


def _significand(dtype: np.dtype[Any]) -> int:
    """Returns the number of significand bits that a floating dtype stores."""
    import ml_dtypes

    return int(ml_dtypes.finfo(dtype).nmant)  # type: ignore[no-untyped-call]


def packages_of(value: object) -> tuple[str, ...]:
    """The packages that define the class of a value and its bases, without importing any.

    >>> packages_of(np.float32(1))
    ('numpy', 'builtins')
    """
    return tuple(dict.fromkeys(base.__module__.split(".")[0] for base in type(value).__mro__))


def framework_of(model: object, known: Container[str] = FRAMEWORKS) -> str:
    """The framework of a model or layer, of those `known`; else "".

    The most derived class decides: a Keras layer on the torch backend is a `torch.nn.Module` too.

    >>> framework_of(np.zeros(3))
    ''
    """
    return next((package for package in packages_of(model) if package in known), "")
