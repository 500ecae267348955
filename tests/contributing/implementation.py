"""A toy implementation: the reference, up to a length."""

from jaxmha.implementations import reference
from jaxmha.implementations.base import Request, Result


def unsupported_reason(request: Request) -> str | None:
    """None, or why not."""
    length = request.key.shape[-3]
    return f"the toy attends to at most 4096 keys, got {length}" if length > 4096 else None


def attend(request: Request) -> Result:
    """Computes the request."""
    return reference.attend(request)
