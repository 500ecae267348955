"""JAX's own promotion of dtypes and ranks, which foreign code relies on and ours may not."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def foreign() -> Iterator[None]:
    """Dtypes and ranks are promoted implicitly, as users have it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
