"""The platform that a call is lowered for: JAX's default device or that of `lowering_for`."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax


class Platform(NamedTuple):
    """A kind of device.

    Attributes:
      name: JAX's lowering platform, such as `cpu`, `cuda`, `rocm` or `tpu`.
      device: a GPU's model, by JAX's name for it or that in `KNOWN`; elsewhere the platform.
      capability: CUDA compute capability; None on other platforms.
      present: whether JAX can run programs on it in this process, so that kernels can be probed.
    """

    name: str
    device: str
    capability: tuple[int, int] | None = None
    present: bool = False


def _cuda(device: str, major: int, minor: int) -> Platform:
    return Platform("cuda", device, (major, minor))


# Names that `lowering_for` accepts -> platforms. Source of the capabilities: NVIDIA's list of CUDA
# GPUs. `gpu` and `cuda` are assumed to be Hopper.
KNOWN: dict[str, Platform] = {
    "cpu": Platform("cpu", "cpu"),
    "tpu": Platform("tpu", "tpu"),
    "rocm": Platform("rocm", "rocm"),
    "gpu": _cuda("gpu", 9, 0),
    "cuda": _cuda("cuda", 9, 0),
    "t4": _cuda("t4", 7, 5),
    "a100": _cuda("a100", 8, 0),
    "l4": _cuda("l4", 8, 9),
    "l40s": _cuda("l40s", 8, 9),
    "h100": _cuda("h100", 9, 0),
    "h200": _cuda("h200", 9, 0),
    "gh200": _cuda("gh200", 9, 0),
    "b200": _cuda("b200", 10, 0),
}

# The platform of `lowering_for`. User contexts are part of JAX's cache keys, so that each platform
# has its own program.
_CHOSEN: Any = jax.make_user_context(None)  # type: ignore[no-untyped-call]


def named(name: str) -> Platform:
    """Looks up a platform or device by its name in upper or lower case.

    Raises:
      ValueError: the name is unknown.

    >>> named("H200").capability
    (9, 0)
    """
    known = KNOWN.get(name.lower()) if isinstance(name, str) else None
    if known is None:
        raise ValueError(f"platform must be among {list(KNOWN)}, got {name!r}")
    return known


def lowering_for(name: str) -> AbstractContextManager[None]:
    """In this context, attention chooses implementations as on the named platform or device.

    Use it with `jax.export` and `lower(lowering_platforms=...)`. Without it, programs lowered for a
    platform other than that of JAX's default device contain no kernel of that platform, unless a
    call names one.

    >>> with lowering_for("h200"):
    ...     current().capability
    (9, 0)
    """
    context: AbstractContextManager[None] = _CHOSEN(named(name))
    return context


def current() -> Platform:
    """The platform of `lowering_for`, else of JAX's default device or, if the user set none, of the
    default backend: of several kinds of GPU, that with the least capability."""
    chosen: Platform | None = _CHOSEN.value
    return chosen or _default()


def devices() -> list[Any]:
    """JAX's default device if the user set one, else one device of this process for each kind (such
    as each model of GPU) in the default backend."""
    return _kinds(jax.local_devices)


def _kinds(list_devices: Callable[[], list[Any]]) -> list[Any]:
    """JAX's default device if the user set one, else the first of `list_devices()` of each kind."""
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(default, str):
        default = jax.devices(default)[0]
    if default is not None:
        return [default]
    kinds: dict[str, Any] = {}
    for device in list_devices():
        kinds.setdefault(device.device_kind, device)
    return list(kinds.values())


def _default() -> Platform:
    """The platform of JAX's default device if the user set one, else of the default backend: of
    several kinds of GPU, that with the least capability. GPUs of all processes count, because all
    processes must choose the same implementation."""
    return min(map(_of, _kinds(jax.devices)), key=lambda platform: platform.capability or (0, 0))


def _of(device: Any) -> Platform:
    if device.platform != "gpu":
        return Platform(device.platform, device.platform, present=True)
    try:
        major, minor = map(int, device.compute_capability.split("."))
    except (AttributeError, ValueError):  # a ROCm device such as gfx942
        return Platform("rocm", device.device_kind, present=True)
    return Platform("cuda", device.device_kind, (major, minor), present=True)
