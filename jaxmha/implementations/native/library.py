"""Loads the library of `jaxmha-cpu`, checks it, and registers its handlers with XLA.

Its digest and its versions are checked before the registration: with handlers that were compiled
for newer headers than those of jaxlib, XLA would fail to start the CPU backend.
"""

import ctypes
import hashlib
import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import jax

# The environment variable for the native kernels. 0: off; 1, as if unset: the widest instructions that
# the CPU has; amx, avx512, avx2: none wider than these; none: as on a CPU that is too old.
SWITCH = "JAXMHA_NATIVE"
VALUES = ("0", "1", "amx", "avx512", "avx2", "none")
# Version of the operands, results and attributes of the handlers: the library must have been built
# with the same number, which native/build_library.py has.
INTERFACE = 8
HANDLERS: dict[str, str] = {
    "attend": "jaxmha_cpu_attend",
    "attend_backward": "jaxmha_cpu_attend_backward",
    "bias_gradient": "jaxmha_cpu_bias_gradient",
    "matmul": "jaxmha_cpu_matmul",
    "attend_cache": "jaxmha_cpu_attend_cache",
    "write_cache": "jaxmha_cpu_write_cache",
}
# No registry has jaxmha-cpu: it is built from a checkout.
INSTALL = "pip install ./native in a checkout of jaxmha"
UPGRADE = "pip install . ./native in one checkout of jaxmha"


class Loaded(NamedTuple):
    """The outcome of loading: the `reason` why the library cannot be used (None: it can), and the
    instruction set `isa` of its kernels (empty if there is a reason)."""

    reason: str | None
    isa: str = ""


def unavailable() -> str | None:
    """Loads and registers the library, if it is usable and not registered yet; returns the reason why
    this process cannot use it, or None.

    Raises:
      ValueError: JAXMHA_NATIVE is neither empty nor in VALUES.
    """
    return _loaded().reason


def isa() -> str:
    """The instruction set of the kernels, such as amx; empty if `unavailable` has a reason."""
    return _loaded().isa


def switch() -> str:
    """The value of JAXMHA_NATIVE; empty if it is unset.

    Raises:
      ValueError: the value is neither empty nor in VALUES.
    """
    chosen = os.environ.get(SWITCH, "")
    if chosen not in ("", *VALUES):
        raise ValueError(f"{SWITCH} must be among {VALUES} or unset, got {chosen!r}")
    return chosen


def _loaded() -> Loaded:
    if switch() == "0":
        return Loaded(f"{SWITCH}=0 switches it off")
    try:
        found = find_spec("jaxmha_cpu")
    except ValueError:  # a module jaxmha_cpu is already imported, and has no spec
        found = None
    folders = [] if found is None else list(found.submodule_search_locations or ())
    if not folders:
        return Loaded(f"jaxmha-cpu is not installed: {INSTALL}")
    return _registered(Path(folders[0]))


@cache
def _registered(folder: Path) -> Loaded:
    file = folder / "libjaxmha_cpu.so"
    reason = _damaged(file)
    if reason:
        return Loaded(reason)
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        return Loaded(f"jaxmha-cpu cannot be loaded: {str(error).splitlines()[0]}")
    reason = _mismatch(library)
    if reason:
        return Loaded(reason)
    try:
        for name in HANDLERS.values():
            capsule = jax.ffi.pycapsule(getattr(library, name))  # type: ignore[no-untyped-call]
            jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    except jax.errors.JaxRuntimeError:
        # Another library has registered handlers of these names, and XLA keeps those.
        return Loaded(f"XLA has the kernels of another jaxmha-cpu than {folder}: restart Python")
    return Loaded(None, library.jaxmha_cpu_isa().decode())


def _damaged(file: Path) -> str | None:
    """The reason why the library `file` is missing or differs from the digest of its build, or None:
    loading a truncated library may crash the process."""
    try:
        expected = file.with_suffix(".sha256").read_text(errors="replace").strip()
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        return f"jaxmha-cpu lacks its library: {error.strerror} ({error.filename})"
    if digest != expected:
        return f"jaxmha-cpu is damaged, its library has another digest: {INSTALL}"
    return None


def _mismatch(library: ctypes.CDLL) -> str | None:
    names = ("interface", "ffi_major", "ffi_minor", "isa")
    try:
        calls = {name: getattr(library, f"jaxmha_cpu_{name}") for name in names}
        for name in HANDLERS.values():
            getattr(library, name)
    except AttributeError as error:
        return f"jaxmha-cpu is of another version ({error}): {UPGRADE}"
    calls["isa"].restype = ctypes.c_char_p
    interface = calls["interface"]()
    if interface != INTERFACE:
        return f"jaxmha-cpu has interface {interface}, and jaxmha needs {INTERFACE}: {UPGRADE}"
    given, held = (calls["ffi_major"](), calls["ffi_minor"]()), ffi_version()
    if held is None:
        return "jaxlib does not say which FFI version it has"
    if given[0] != held[0] or given[1] > held[1]:
        return (
            f"jaxmha-cpu is compiled for FFI version {given[0]}.{given[1]} of XLA, and jaxlib has "
            f"{held[0]}.{held[1]}: pip install --no-build-isolation ./native compiles it for that"
        )
    return None if calls["isa"]() else "this CPU has neither AVX2 with FMA and F16C nor NEON"


def ffi_version() -> tuple[int, int] | None:
    """The FFI version (major, minor) in the C header of jaxlib; None: jaxlib has no such header, or
    the header does not define it."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text()
    except OSError:
        return None
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    if found[0] is None or found[1] is None:
        return None
    return int(found[0][1]), int(found[1][1])
