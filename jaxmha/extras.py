"""Optional packages, and the extra of jaxmha that installs each."""

from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {"torch": "torch", "keras": "keras", "flax": "flax", "orbax": "orbax"}


@contextmanager
def needed(package: str) -> Iterator[None]:
    """Wraps an import: tells the user what to install if the package is missing.

    Raises ModuleNotFoundError; the error of an installed package that lacks a module is unchanged.

    >>> with needed("torch"):
    ...     import torch
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"{package} is not installed, and this call runs its code: "
            f"pip install 'jaxmha[{EXTRAS[package]}]'",
            name=error.name,
        ) from error
