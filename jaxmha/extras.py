"""Optional packages: the extra of jaxmha, or the name on PyPI, that installs each of them."""

from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {
    "torch": "torch",
    "keras": "keras",
    "flax": "flax",
    "orbax": "orbax",
    "equinox": "equinox",
}
# Import name -> name on PyPI, of packages that no extra installs; others have one name for both.
_OTHERS = {"haiku": "dm-haiku"}


@contextmanager
def needed(package: str) -> Iterator[None]:
    """Wraps an import: if the package is missing, ModuleNotFoundError names the pip command.

    The error of an installed package that lacks a module of its own is unchanged.

    >>> with needed("torch"):
    ...     import torch
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        extra = EXTRAS.get(package)
        wanted = f"'jaxmha[{extra}]'" if extra else _OTHERS.get(package, package)
        raise ModuleNotFoundError(
            f"{package} is not installed, and this call runs its code: pip install {wanted}",
            name=error.name,
        ) from error
