"""A toy implementation: the reference, without biases."""

from jaxmha.implementations import reference
from jaxmha.implementations.base import Request, Result


def unsupported_reason(request: Request) -> str | None:
    """None, or why not."""
    return None if request.bias is None else "the toy has no biases"


def attend(request: Request) -> Result:
    """Computes the request."""
    return reference.attend(request)
