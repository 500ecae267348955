"""Packs and unpacks arrays with fewer key and value heads than query heads.

One axis letter stands for all N + 2 K heads. `M`: N query heads, then K key heads, then K value
heads. `U`: K groups, each of N / K query heads, one key head and one value head.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from einops import rearrange

from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.layout.base import Entry
from jaxmha.dims import parse
from jaxmha.params import CANONICAL

LETTERS = ("M", "U")
PACKED = ("qkv", "kv", "qk", "qg")  # names of axes along which leaves are packed


def letter(entry: Entry) -> str:
    """The axis letter for all heads (`M` or `U`) in an entry; "" if it has neither."""
    return _letter(entry.axes)


@lru_cache(maxsize=1024)
def _letter(axes: str) -> str:
    return next((a for group in parse(axes) for a in group if a in LETTERS), "")


def completed(sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes, with K computed from N and the number of all heads if an array packs all heads.

    Raises ValueError unless the number of all heads is N + 2 K and N is a multiple of K.

    >>> completed({"N": 6, "M": 10})["K"]
    2
    """
    found = dict(sizes)
    for name in LETTERS:
        if name in found and "N" in found:
            K, odd = divmod(found[name] - found["N"], 2)
            if odd or K < 1 or found["N"] % K:
                raise ValueError(
                    f"{found[name]} heads of query, key and value together do not fit "
                    f"N={found['N']} query heads: expected N + 2 K, with N a multiple of K"
                )
            found["K"] = K
    return found


def letters(sizes: Mapping[str, int]) -> dict[str, int]:
    """The number of all heads, under each axis letter for it (`M` and `U`)."""
    return dict.fromkeys(LETTERS, sizes["N"] + 2 * sizes["K"])


def unpack(entry: Entry, array: NDArray, sizes: Mapping[str, int]) -> dict[str, NDArray]:
    """Splits one packed array into query, key and value, as views where NumPy can make them."""
    name, N, K = letter(entry), sizes["N"], sizes["K"]
    inputs = "" if len(parse(entry.axes)) == 1 else "Dq "
    heads = rearrange(array, f"... {entry.axes} -> ... {inputs}{name} H", **{name: N + 2 * K})
    if name == "M":
        parts = np.split(heads, [N, N + K], axis=-2)
    else:
        groups = rearrange(heads, "... (K g) H -> ... K g H", K=K)
        query, key, value = np.split(groups, [N // K, N // K + 1], axis=-2)
        parts = [rearrange(query, "... K g H -> ... (K g) H"), key[..., 0, :], value[..., 0, :]]
    return dict(zip(entry.leaves, parts, strict=True))


def pack(entry: Entry, leaf: Callable[[str], NDArray]) -> NDArray:
    """Packs query, key and value, which `leaf` returns by name, into one array."""
    name = letter(entry)
    query, key, value = (leaf(one) for one in entry.leaves)
    K = key.shape[-2]
    if name == "M":
        heads = np.concatenate([query, key, value], axis=-2)
    else:
        grouped = [rearrange(query, "... (K g) H -> ... K g H", K=K), key[..., None, :]]
        groups = np.concatenate([*grouped, value[..., None, :]], axis=-2)
        heads = rearrange(groups, "... K g H -> ... (K g) H")
    inputs = "" if len(parse(entry.axes)) == 1 else "Dq "
    found: NDArray = rearrange(heads, f"... {inputs}{name} H -> ... {entry.axes}")
    return found


def grouped(found: Mapping[str, NDArray], K: int) -> dict[str, NDArray]:
    """Reorders query heads, of which head n attends key head n % K, to the order of `MHAParams`.

    >>> grouped({"query.bias": np.array([[0], [1], [10], [11]])}, K=2)["query.bias"].tolist()
    [[0], [10], [1], [11]]
    """
    return {name: _reordered(name, leaf, K, "(g K)", "(K g)") for name, leaf in found.items()}


def in_cycle(name: str, leaf: NDArray, K: int) -> NDArray:
    """The inverse of `grouped` for one leaf: query head n attends key head n % K."""
    return _reordered(name, leaf, K, "(K g)", "(g K)")


def _reordered(name: str, leaf: NDArray, K: int, source: str, target: str) -> NDArray:
    axes = CANONICAL[name]
    if "N" not in (letters := axes.split()):
        return leaf
    if (N := leaf.shape[letters.index("N") - len(letters)]) % K:
        raise ValueError(f"{N} query heads cannot share {K} key heads evenly: give the head count")
    arrow = f"... {axes.replace('N', source)} -> ... {axes.replace('N', target)}"
    found: NDArray = rearrange(leaf, arrow, K=K)
    return found


def shared(axes: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes that einops cannot infer: of letters that share an array axis, as in `(N H)`."""
    return {a: sizes[a] for group in parse(axes) if len(group) > 1 for a in group}


def pack_axis(entry: Entry) -> str:
    """The letter (in `PACKED`) of the axis along which leaves are packed; `1` for a single leaf."""
    return next((a for group in parse(entry.axes) for a in group if a in PACKED), "1")


def pack_traced(entry: Entry, leaf: Callable[[str], NDArray], axes: str, source: str) -> NDArray:
    """`transform.pack` for traced arrays, which cannot be written in place."""
    import jax.numpy as jnp

    together: Any = jnp.stack([jnp.asarray(leaf(name)) for name in entry.leaves])
    packed: NDArray = rearrange(together, f"{pack_axis(entry)} ... {source} -> ... {axes}")
    return packed
