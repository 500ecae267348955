"""Registry of the attention implementations, and the choice among them.

The choice is made when a call is traced: by its shapes, dtypes and arguments, the platform,
environment variables, saved benchmarks, and probes that run the implementations in `KERNELS` on
this machine. Programs are portable if a candidate outside `KERNELS` supports the call too: lowered
for a platform without the kernel, they contain that candidate.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from jaxmha import sharding
from jaxmha.implementations import (
    platforms,
    preferences,
    probe,
    probe_cases,
    reference,
    reverse_mode,
    shard_map,
    small_query,
)
from jaxmha.implementations.base import Leaks, Request, Result, mixed_dtypes
from jaxmha.implementations.context_parallel import all_gather, ring
from jaxmha.implementations.fused import adapter, cudnn, splash, tokamax
from jaxmha.implementations.native import attention as native
from jaxmha.implementations.native import library
from jaxmha.implementations.reverse_mode import forward_mode
from jaxmha.implementations.tiled import attention as blocked
from jaxmha.mask import Mask

__all__ = [
    "IMPLEMENTATIONS",
    "KERNELS",
    "Request",
    "Result",
    "SupportQuery",
    "UnsupportedError",
    "attend",
    "candidates",
    "forward_mode",
    "select",
]

IMPLEMENTATIONS: dict[str, ModuleType] = {
    "reference": reference,
    "blocked": blocked,
    "few_queries": small_query,
    "native": native,
    "cudnn": cudnn,
    "tokamax": tokamax,
    "splash": splash,
    "ring": ring,
    "allgather": all_gather,
}
# Value of `implementation` in jax.nn.dot_product_attention -> name in IMPLEMENTATIONS, so that calls
# of it work unchanged. Its other value, "cudnn", is the same here.
OF_JAX: dict[str, str] = {"xla": "reference"}
# Context-parallel implementations: the first candidates where `sharding.use` shards positions,
# unless the caller names others.
CONTEXT: tuple[str, ...] = ("ring", "allgather")
# Implementation that a probe tests before its first use -> JAX's lowering platform of its kernel.
# "native" is absent: it checks its library, and lowers to plain XLA on platforms other than CPUs.
KERNELS: dict[str, str] = {"cudnn": "cuda", "tokamax": "cuda", "splash": "tpu"}
# Kernel -> the `Leaks` that its probe tries first, because a probe found them on an H100 with the
# release that the kernel's module names. Probes of other kernels try `Leaks()` first: the leaks of
# cuDNN differ between its releases.
LIKELY_LEAKS: dict[str, Leaks] = {"tokamax": Leaks(1, 2)}
# Implementations with a `jax.custom_vjp`, which `jax.jvp` cannot differentiate.
REVERSE_MODE: tuple[str, ...] = ("blocked", "native", *KERNELS, *CONTEXT)
# True: the native kernels are the first choice on CPU; False: they run only by name.
NATIVE_FIRST = True
# Lowering platform -> its implementations, best first; "" is every other platform.
ORDER: dict[str, tuple[str, ...]] = {
    "cuda": ("cudnn", "tokamax", "blocked", "reference"),
    "cpu": (*("native",) * NATIVE_FIRST, "few_queries", "blocked", "reference"),
    "tpu": ("splash", "blocked", "reference"),
    "": ("blocked", "reference"),
}
# Minimum number of queries for an implementation to be a candidate unless the caller names it:
# splash works on tiles of up to 512 queries, and pads fewer to a multiple of 128.
LEAST_QUERIES: dict[str, int] = {"splash": 512}
# The order for requests with a bias or a dense mask: cuDNN needs them materialised over T x S, so
# tokamax comes first (by the timings that tokamax 0.0.17 ships, its forward pass is 1.4 to 3.9
# times as fast).
DENSE: dict[str, tuple[str, ...]] = {"cuda": ("tokamax", "cudnn", "blocked", "reference")}


class UnsupportedError(ValueError):
    """No implementation supports a request; `reasons`: name of each one tried -> why it does not."""

    def __init__(self, reasons: dict[str, str]) -> None:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        super().__init__(f"no implementation supports this request: {listed}")
        self.reasons = reasons


class SupportQuery(tuple[str, ...]):
    """Implementation names for which `attend` reports support; empty: those of the platform.

    `attend` sets `reasons` to pairs of a name and the reason why that implementation cannot compute
    the request (None: it can), and then runs `reference`. `attend` also sets `call`, the key of the
    call in saved benchmarks, and `preference`, the implementations that such a benchmark prefers
    (none if the query has names). Each projection adds to `matmuls` the reason why XLA computes its
    matmul (None: a native kernel does).
    """

    reasons: list[tuple[str, str | None]]
    call: str
    preference: preferences.Preference
    matmuls: list[str | None]

    def __new__(cls, implementation: str | Sequence[str] | None = None) -> "SupportQuery":  # noqa: PYI034
        one = isinstance(implementation, str) or not isinstance(implementation, Iterable)
        names: Any = (implementation,) if one else implementation
        names = () if implementation is None else names
        query = super().__new__(cls, names)
        query.reasons, query.call, query.matmuls = [], "", []
        query.preference = preferences.Preference()
        return query

    # So that jit refuses a query as a static argument: a trace that it keeps sets nothing a second
    # time, and one for each query would be kept as long as the process lives.
    __hash__ = None  # type: ignore[assignment]


def candidates(
    implementation: str | Sequence[str] | None = None,
    request: Request | None = None,
) -> tuple[str, ...]:
    """Implementation names, best first: `implementation` if given, else those of the platform.

    `request`: the call to order the platform's names for, by saved benchmarks, a bias or dense mask,
    and its number of queries; None: no particular call.

    Raises:
      ValueError: an unknown name, or an environment variable has an unknown value.
    """
    probe.check_environment()
    library.switch()
    if implementation is None or (isinstance(implementation, tuple | list) and not implementation):
        platform = platforms.current().name
        order = ORDER.get(platform, ORDER[""])
        dense = request is not None and adapter.is_dense(request)
        order = DENSE.get(platform, order) if dense else order
        if request is not None:
            faster = [x for x in preferences.preferred(request).order if x in IMPLEMENTATIONS]
            order = (*faster, *(x for x in order if x not in faster))
        # A symbolic number of queries cannot be compared.
        if request is not None and isinstance(T := request.query.shape[1], int):
            order = tuple(x for x in order if LEAST_QUERIES.get(x, 0) <= T)
        axes = sharding.current()
        return (*CONTEXT, *order) if axes is not None and axes.context else order
    return known(implementation)


def known(implementation: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the given names as a tuple, with names of `jax.nn` translated by `OF_JAX`.

    Raises:
      ValueError: an unknown name.
    """
    names = tuple(implementation) if isinstance(implementation, tuple | list) else (implementation,)
    names = tuple(OF_JAX.get(name, name) if isinstance(name, str) else name for name in names)
    for name in names:
        if not isinstance(name, str) or name not in IMPLEMENTATIONS:
            near = get_close_matches(str(name).lower(), IMPLEMENTATIONS, 1, cutoff=0.8)
            raise ValueError(
                f"implementation must be among {list(IMPLEMENTATIONS)}, got {name!r}"
                f"{f': did you mean {near[0]!r}?' if near else ''}"
            )
    return names


def unsupported(
    request: Request, name: str, *, traced: bool = True, probed: bool = True
) -> str | None:
    """The reason why an implementation cannot compute a request; None: it can.

    `traced`: True to choose for a program, which every process traces. Kernels that this machine
    cannot trace for the platform of `lowering_for` are then rejected too, and processes exchange
    the outcomes of their probes. `probed`: False to assume that kernels work.
    """
    implementation = IMPLEMENTATIONS[name]
    axes = sharding.current()
    if axes is not None and axes.zigzag and name not in CONTEXT:
        return "positions are in zig-zag order"
    if name != "reference" and (mixed := mixed_dtypes(request)):
        return mixed
    reason: str | None = implementation.unsupported_reason(request)
    if reason or name not in KERNELS:
        return reason
    if platforms.current().present and probed:
        return probe.failure(
            name,
            implementation.attend,
            implementation.unsupported_reason,
            probe_cases.kind_of(request),
            likely=LIKELY_LEAKS.get(name, Leaks()),
            agree=traced,
        )
    return probe.disabled() or (implementation.traceable() if traced else None)


def _reasons(request: Request, names: Sequence[str]) -> list[tuple[str, str | None]]:
    """Pairs of each name and why that implementation cannot compute the request (None: it can).

    Kernels after the first implementation that can compute it are assumed to work, not probed: no
    call runs them, and a probe takes seconds.
    """
    found: list[tuple[str, str | None]] = []
    for name in names:
        probed = all(reason is not None for _, reason in found)
        found.append((name, unsupported(request, name, traced=False, probed=probed)))
    return found


def select(request: Request, implementation: str | Sequence[str] | None = None) -> str:
    """The name of the first of `candidates` that supports the request.

    Raises:
      ValueError: a name is unknown, or no implementation supports the request (`UnsupportedError`).
    """
    reasons: dict[str, str] = {}
    for name in candidates(implementation, request):
        reason = unsupported(request, name)
        if reason is None:
            return name
        reasons[name] = reason
    raise UnsupportedError(reasons)


def attend(request: Request, implementation: str | Sequence[str] | None = None) -> Result:
    """Runs the request with the implementation that `select` chooses.

    If `implementation` is a `SupportQuery`, fills it in and runs `reference` instead.
    """
    if isinstance(implementation, SupportQuery):
        names = candidates(implementation, request)
        implementation.call = preferences.key(request)
        implementation.preference = (
            preferences.Preference() if implementation else preferences.preferred(request)
        )
        implementation.reasons[:] = _reasons(request, names)
        # `reference` serves even in zig-zag order, which it does not support: the call is only
        # traced, for the shapes of its results.
        name = implementation = "reference"
    else:
        name = select(request, implementation)
    if name in REVERSE_MODE:
        request = reverse_mode.only(request)
    if name in CONTEXT:
        found: Result = IMPLEMENTATIONS[name].attend(request)
        return found
    portable = next(
        (
            n
            for n in candidates(implementation, request)
            if n not in KERNELS and n not in CONTEXT and unsupported(request, n) is None
        ),
        None,
    )
    return shard_map.attend(request, lambda part: _run(part, name, portable))


def _alone(request: Request, name: str) -> Result:
    """Runs the implementation `name`, on every platform. If it is in `KERNELS`, it gets the `Leaks`
    that its probe found, by which it zeroes unattended keys and values."""
    implementation = IMPLEMENTATIONS[name]
    if name not in KERNELS:
        found: Result = implementation.attend(request)
        return found
    found = implementation.attend(request, leaks=probe.leaks(name, probe_cases.kind_of(request)))
    return found


def _run(request: Request, name: str, portable: str | None) -> Result:
    """Runs the implementation `name`. If it is in `KERNELS`, programs lowered for a platform other
    than its own contain the implementation `portable` (None: they contain `name` all the same)."""
    if name not in KERNELS or portable is None:
        return _alone(request, name)

    # The platform is known only at lowering, after this trace, so both the kernel and `portable` are
    # traced: `run` computes either.
    def run(
        name: str,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None,
        mask: Mask,
        dropout_key: PRNGKeyArray | None,
    ) -> Result:
        these = request._replace(
            query=query, key=key, value=value, bias=bias, mask=mask, dropout_key=dropout_key
        )
        found = _alone(these, name)
        return found if request.return_lse else found._replace(lse=None)

    # A gradient saves the residuals of both the kernel and `portable`; under `checkpoint`, those of
    # `portable` are only its arguments.
    @jax.checkpoint
    def elsewhere(*arrays: Any) -> Result:  # the platform is unknown: chooses as on a CPU
        with platforms.lowering_for("cpu"):
            return run(portable, *arrays)

    result: Result = jax.lax.platform_dependent(
        *(*request[:5], request.dropout_key),
        default=elsewhere,
        **{KERNELS[name]: lambda *arrays: run(name, *arrays)},
    )
    return result
