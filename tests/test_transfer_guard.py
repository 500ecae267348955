"""Methods of caches whose arguments are on the device transfer nothing to it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmha import KVCache, PagedKVCache
from jaxmha.latent import LatentCache

B, T, K, H = 3, 2, 2, 4
ROWS, COUNTS, FLAGS = (
    jnp.asarray([2, 0, 2]),
    jnp.asarray([1, 0, 2]),
    jnp.asarray([True, False, True]),
)
NEW, TOKENS = jnp.ones((B, T, K, H)), jnp.ones((B, T, H))
FIRST, LAST, LENGTHS = jnp.asarray(0), jnp.asarray(2), jnp.asarray([3, 1, 2], np.int32)
TABLE = jnp.asarray([[0, 1], [2, -1], [3, -1]], np.int32)
PAGED = PagedKVCache(jnp.ones((7, K, 2, H)), jnp.ones((7, K, 2, H)), TABLE, LENGTHS)
DENSE = KVCache(jnp.ones((B, K, 6, H)), jnp.ones((B, K, 6, H)), LENGTHS)
LATENT = LatentCache(jnp.ones((B, 6, H)), LENGTHS)
CALLS: dict[str, Callable[[], Any]] = {
    "append": lambda: DENSE.append(NEW, NEW, COUNTS),
    "append latents": lambda: LATENT.append(TOKENS, COUNTS),
    "append in pages": lambda: PAGED.append(NEW, NEW, COUNTS, left=1),
    "emptied": lambda: (DENSE.emptied(), LATENT.emptied(), PAGED.emptied()),
    "fork": lambda: (PAGED.fork(FIRST, LAST), PAGED.fork(0, 1)),
    "free": lambda: PAGED.free(FLAGS),
    "free_pages": lambda: PAGED.free_pages(),
    "rollback": lambda: PAGED.rollback(COUNTS),
    "take": lambda: (DENSE.take(ROWS), LATENT.take(ROWS), PAGED.take(ROWS)),
}


@pytest.mark.parametrize("call", CALLS)
def test_constants_are_no_transfers(call: str) -> None:
    with jax.transfer_guard_host_to_device("disallow"):
        CALLS[call]()
