"""Ways to compute attention: one file each, every one obeying the same contract."""

from collections.abc import Sequence
from types import ModuleType

from jaxmha.implementations import blocked, reference
from jaxmha.implementations.request import Request, Result

__all__ = ["IMPLEMENTATIONS", "Request", "Result", "attend", "select"]

IMPLEMENTATIONS: dict[str, ModuleType] = {"reference": reference, "blocked": blocked}


def select(request: Request, implementation: str | Sequence[str] | None = None) -> str:
    """The first implementation that supports the request.

    Raises:
      ValueError: an unknown name, or none that supports the request, with every reason.
    """
    names = [implementation] if isinstance(implementation, str) else list(implementation or [])
    for name in names:
        if name not in IMPLEMENTATIONS:
            raise ValueError(f"implementation must be among {list(IMPLEMENTATIONS)}, got {name!r}")
    reasons = {}
    for name in names or IMPLEMENTATIONS:
        reasons[name] = IMPLEMENTATIONS[name].supports(request)
        if reasons[name] is None:
            return name
    raise ValueError(f"no implementation supports this request: {reasons}")


def attend(request: Request, implementation: str | Sequence[str] | None = None) -> Result:
    """Runs the request by the implementation selected."""
    result: Result = IMPLEMENTATIONS[select(request, implementation)].attend(request)
    return result
