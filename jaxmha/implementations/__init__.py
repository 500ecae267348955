"""Ways to compute attention: one file each, every one obeying the same contract."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import jax

from jaxmha.implementations import blocked, few_queries, reference
from jaxmha.implementations.request import Request, Result

__all__ = [
    "IMPLEMENTATIONS",
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
    "blocked": blocked,
    "few_queries": few_queries,
}
# In order of preference, by platform; "" is every other.
ORDER: dict[str, tuple[str, ...]] = {
    "cpu": ("few_queries", "blocked", "reference"),
    "": ("blocked", "reference"),
}


class UnsupportedError(ValueError):
    """No candidate supports a request; `reasons` by name."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__(f"no implementation supports this request: {reasons}")
        self.reasons = reasons


def candidates(
    implementation: str | Sequence[str] | None = None, platform: str | None = None
) -> tuple[str, ...]:
    """Names in order of preference, as asked for or as the platform has them.

    Raises:
      ValueError: an unknown name.
    """
    if not implementation:
        return ORDER.get(platform or jax.default_backend(), ORDER[""])
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    for name in names:
        if name not in IMPLEMENTATIONS:
            raise ValueError(f"implementation must be among {list(IMPLEMENTATIONS)}, got {name!r}")
    return names


def select(request: Request, implementation: str | Sequence[str] | None = None) -> str:
    """The first implementation that supports the request.

    Raises:
      ValueError: an unknown name, or none that supports the request, with every reason.
    """
    reasons: dict[str, str] = {}
    for name in candidates(implementation):
        reason = IMPLEMENTATIONS[name].supports(request)
        if reason is None:
            return name
        reasons[name] = reason
    raise UnsupportedError(reasons)


def attend(request: Request, implementation: str | Sequence[str] | None = None) -> Result:
    """Runs the request by the implementation selected."""
    result: Result = IMPLEMENTATIONS[select(request, implementation)].attend(request)
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
            "forward-mode differentiation (jax.jvp, jax.jacfwd, jax.hessian) of attention needs "
            f'implementation="reference": {error}'
        ) from error
