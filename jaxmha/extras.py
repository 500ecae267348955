"""Optional packages, and what pip installs to have each: an extra of jaxmha, or the package."""

from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {
    "torch": "torch",
    "keras": "keras",
    "flax": "flax",
    "orbax": "orbax",
    "equinox": "equinox",
}
_OTHERS = {"haiku": "dm-haiku", "transformers": "transformers"}


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
        wanted = _OTHERS.get(package) or f"'jaxmha[{EXTRAS[package]}]'"
        raise ModuleNotFoundError(
            f"{package} is not installed, and this call runs its code: pip install {wanted}",
            name=error.name,
        ) from error
