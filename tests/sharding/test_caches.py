"""Methods of caches on meshes of explicit axes: as on one device, and arrays stay where they lie."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmha import KVCache, PagedKVCache
from jaxmha.latent import LatentCache
from tests.drawn import to_jax
from tests.sharding.devices import mesh, put

RNG = np.random.default_rng(3)
B, T, K, H, h, P, PAGE = 4, 3, 2, 5, 7, 11, 2
# Names of the mesh axis "data" by array: rows of a batch, or the heads of a pool.
BY_ROWS = {"table": ("data",), "lengths": ("data",)}
BY_HEADS = dict.fromkeys(("key", "value", "key_scale", "value_scale"), (None, "data"))


def drawn(*shape: int) -> Any:
    return to_jax(RNG.standard_normal(shape), "float32")


LENGTHS = jnp.asarray([3, 0, 4, 1], "int32")
TABLE = jnp.asarray([[0, 9, -1, -1], [-1] * 4, [3, 4, -1, -1], [7, -1, -1, -1]], "int32")
PAGED = PagedKVCache(drawn(P, K, PAGE, H), drawn(P, K, PAGE, h), TABLE, LENGTHS)
INT8 = PAGED._replace(
    key=PAGED.key.astype("int8"),
    value=PAGED.value.astype("int8"),
    key_scale=jnp.abs(drawn(P, K, PAGE)),
    value_scale=jnp.abs(drawn(P, K, PAGE)),
)
DENSE = KVCache(drawn(B, K, 6, H), drawn(B, K, 6, h), LENGTHS)
LATENT = LatentCache(drawn(B, 6, H), LENGTHS)
NEW, COUNTS = (drawn(B, T, K, H), drawn(B, T, K, h)), np.asarray([2, 0, 1, 3], np.int32)
# As known numbers and as arrays, with and without a window.
CALLS: dict[str, Callable[[Any], Any]] = {
    "append": lambda cache: cache.append(*NEW, COUNTS),
    "append in a window": lambda cache: cache.append(*NEW, to_jax(COUNTS), left=1),
    "emptied": lambda cache: cache.emptied(),
    "fork": lambda cache: cache.fork(0, 1),
    "fork of arrays": lambda cache: cache.fork(jnp.asarray(2), jnp.asarray(0)),
    "free": lambda cache: cache.free(np.asarray([True, False, False, True])),
    "rollback": lambda cache: cache.rollback(np.asarray([1, 1, 3, 0])),
    "take": lambda cache: cache.take(np.asarray([1, 1, 2, 0])),
}


def same(call: Callable[[Any], Any], cache: Any, names: dict[str, Any]) -> None:
    """Compares a call on two devices, eager and under jit, with one device."""
    explicit, expected = mesh(explicit=True, data=2), jax.jit(call)(cache)
    with jax.set_mesh(explicit):
        parts = {k: x for k, x in cache._asdict().items() if x is not None}
        placed = {k: put(explicit, x, *names.get(k, ())) for k, x in parts.items()}
        given = cache._replace(**placed)
        for run in (call, jax.jit(call)):
            found = run(given)
            jax.tree.map(np.testing.assert_array_equal, found, expected)
            after = found[0] if type(found) is tuple else found
            for name, x in placed.items():
                moved = getattr(after, name)
                assert moved.sharding.is_equivalent_to(x.sharding, x.ndim), name


@pytest.mark.slow_variants("*", "!float32-rows-fork of arrays")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("names", [BY_ROWS, BY_HEADS], ids=["rows", "heads"])
@pytest.mark.parametrize("cache", [PAGED, INT8], ids=["float32", "int8"])
def test_pages(cache: PagedKVCache, names: dict[str, Any], call: str) -> None:
    same(CALLS[call], cache, names)


@pytest.mark.slow_variants("append*")
@pytest.mark.parametrize("call", ["append", "append in a window", "emptied"])
def test_slots_and_latents(call: str) -> None:
    rows: dict[str, Any] = dict.fromkeys(("key", "value", "latents", "lengths"), ("data",))
    same(CALLS[call], DENSE, rows)
    if call == "emptied":
        same(CALLS[call], LATENT, rows)
    else:
        same(lambda cache: cache.append(NEW[0][:, :, 0], COUNTS), LATENT, rows)


def test_free_pages() -> None:
    explicit = mesh(explicit=True, data=2)
    with jax.set_mesh(explicit):
        given = PAGED._replace(table=put(explicit, TABLE, "data"))
        assert int(given.free_pages()) == P - 5
        assert int(jax.jit(PagedKVCache.free_pages)(given)) == P - 5


def test_known_numbers_are_checked_before() -> None:
    explicit = mesh(explicit=True, data=2)
    with jax.set_mesh(explicit):
        given = PAGED._replace(table=put(explicit, TABLE, "data"))
        with pytest.raises(ValueError, match=r"target must be in \[0, 4\)"):
            given.fork(0, 4)
        with pytest.raises(ValueError, match=r"counts\[1\] is 4: expected 0 to 3"):
            given.append(*NEW, np.asarray([1, 4, 0, 0]))
