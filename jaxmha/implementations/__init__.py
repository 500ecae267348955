"""Ways to compute attention: one file each, every one obeying the same contract.

The choice is static: it follows from platform, dtype, shapes and the structure of the mask. On the
machine that JAX runs on, a kernel is tried out before it is chosen for the first time. What is
emitted is right on every platform: where a program turns out to be lowered for another one, it
holds the first implementation that is plain XLA.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import jax

from jaxmha import sharding
from jaxmha.implementations import platforms, probe, reference, shard_map, small_query
from jaxmha.implementations.base import Request, Result
from jaxmha.implementations.context_parallel import all_gather, ring
from jaxmha.implementations.fused import adapter, cudnn, splash, tokamax
from jaxmha.implementations.tiled import attention

__all__ = [
    "IMPLEMENTATIONS",
    "KERNELS",
    "Question",
    "Request",
    "Result",
    "UnsupportedError",
    "attend",
    "candidates",
    "forward_mode",
    "select",
]

IMPLEMENTATIONS: dict[str, ModuleType] = {
    "reference": reference,
    "blocked": attention,
    "few_queries": small_query,
    "cudnn": cudnn,
    "tokamax": tokamax,
    "splash": splash,
    "ring": ring,
    "allgather": all_gather,
}
# Names of jax.nn, whose calls stay as they are; "cudnn" is one of ours.
OF_JAX: dict[str, str] = {"xla": "reference"}
# Those that know of positions on other devices; first where there are such.
CONTEXT: tuple[str, ...] = ("ring", "allgather")
# Those that are no plain XLA, and the platform that JAX has to lower them for.
KERNELS: dict[str, str] = {"cudnn": "cuda", "tokamax": "cuda", "splash": "tpu"}
# In order of preference, by platform; "" is every other. splash is fast by all accounts, but was
# never measured here: it runs where it is named.
ORDER: dict[str, tuple[str, ...]] = {
    "cuda": ("cudnn", "tokamax", "blocked", "reference"),
    "cpu": ("few_queries", "blocked", "reference"),
    "": ("blocked", "reference"),
}
# Biases and dense masks: tokamax streams them, cuDNN wants them whole (timings shipped with
# tokamax 0.0.17: 1.4 to 3.9 times as fast forward).
DENSE: dict[str, tuple[str, ...]] = {"cuda": ("tokamax", "cudnn", "blocked", "reference")}


class UnsupportedError(ValueError):
    """No candidate supports a request; `reasons` by name."""

    def __init__(self, reasons: dict[str, str]) -> None:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        super().__init__(f"no implementation supports this request: {listed}")
        self.reasons = reasons


class Question(tuple[str, ...]):
    """Names of implementations (none: those of the platform) that are asked about and not run.

    `answer` holds every candidate and why it cannot compute the request; None: it can. Two are
    never the same, so that no cache answers.
    """

    answer: list[tuple[str, str | None]]

    def __new__(cls, implementation: str | Sequence[str] | None = None) -> "Question":  # noqa: PYI034
        names = (implementation,) if isinstance(implementation, str) else implementation or ()
        asked = super().__new__(cls, names)
        asked.answer = []
        return asked

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def candidates(
    implementation: str | Sequence[str] | None = None,
    request: Request | None = None,
) -> tuple[str, ...]:
    """Names in order of preference, as asked for or as the platform has them.

    Raises:
      ValueError: an unknown name.
    """
    if not implementation:
        platform = platforms.current().name
        order = ORDER.get(platform, ORDER[""])
        dense = request is not None and adapter.is_dense(request)
        order = DENSE.get(platform, order) if dense else order
        axes = sharding.current()
        return (*CONTEXT, *order) if axes is not None and axes.context else order
    names = tuple(implementation) if isinstance(implementation, tuple | list) else (implementation,)
    names = tuple(OF_JAX.get(name, name) for name in names)
    for name in names:
        if name not in IMPLEMENTATIONS:
            raise ValueError(f"implementation must be among {list(IMPLEMENTATIONS)}, got {name!r}")
    return names


def unsupported(request: Request, name: str, *, traced: bool = True) -> str | None:
    """Why an implementation cannot compute a request here and now; None: it can.

    `traced`: also why this machine could not trace it for the platform that is named.
    """
    implementation = IMPLEMENTATIONS[name]
    axes = sharding.current()
    if axes is not None and axes.zigzag and name not in CONTEXT:
        return "positions are in zig-zag order"
    reason: str | None = implementation.supports(request)
    if reason or name not in KERNELS:
        return reason
    if platforms.current().live:
        dense = adapter.is_dense(request)
        return probe.failure(name, implementation.attend, request.query.dtype.name, dense)
    return implementation.traceable() if traced else None


def select(request: Request, implementation: str | Sequence[str] | None = None) -> str:
    """The first implementation that supports the request.

    Raises:
      ValueError: an unknown name, or none that supports the request, with every reason.
    """
    reasons: dict[str, str] = {}
    for name in candidates(implementation, request):
        reason = unsupported(request, name)
        if reason is None:
            return name
        reasons[name] = reason
    raise UnsupportedError(reasons)


def attend(request: Request, implementation: str | Sequence[str] | None = None) -> Result:
    """Runs the request by the implementation selected."""
    if isinstance(implementation, Question):
        names = candidates(implementation, request)
        implementation.answer[:] = [(n, unsupported(request, n, traced=False)) for n in names]
        implementation = "reference"
    name = select(request, implementation)
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


def _run(request: Request, name: str, portable: str | None) -> Result:
    """One of two implementations: a kernel, or where it does not lower, the portable one."""
    if name not in KERNELS or portable is None:
        result: Result = IMPLEMENTATIONS[name].attend(request)
        return result

    # Where a program runs is known when it is lowered, later than here.
    def by(name: str, *arrays: Any) -> Result:
        query, key, value, bias, mask, dropout_key = arrays
        these = request._replace(
            query=query, key=key, value=value, bias=bias, mask=mask, dropout_key=dropout_key
        )
        found: Result = IMPLEMENTATIONS[name].attend(these)
        return found if request.return_lse else found._replace(lse=None)

    def elsewhere(*arrays: Any) -> Result:  # most likely on a CPU
        with platforms.lowering_for("cpu"):
            return by(portable, *arrays)

    result = jax.lax.platform_dependent(
        *(*request[:5], request.dropout_key),
        default=elsewhere,
        **{KERNELS[name]: lambda *arrays: by(name, *arrays)},
    )
    return result


@contextmanager
def forward_mode() -> Iterator[None]:
    """Says what to do where a gradient of our own meets forward-mode differentiation."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            "forward-mode differentiation (jax.jvp, jax.jacfwd, jax.linearize) of attention needs "
            f'implementation="reference": {error}'
        ) from error
