"""Optional packages: which of jaxmha's extras brings one that is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {"torch": "torch", "keras": "keras", "flax": "flax", "orbax": "orbax"}


@contextmanager
def needed(package: str) -> Iterator[None]:
    """Around an import: says what to install where the package is not there.

    Raises ModuleNotFoundError; a module that an installed package lacks is named as it is.

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
