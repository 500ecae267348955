"""Score and mask functions: traced once with scalars, vectorised over tiles.

A function of scalars cannot read other entries of a tile, so its values do not depend on the
tiling. Arrays that it closes over become inputs, and floating ones have gradients.
Source: Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention
Kernels" (2024).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int32

from jaxmha.arrays import Array, reject_foreign
from jaxmha.implementations.program import Closed, Program

Index: TypeAlias = jax.Array | int
Floats: TypeAlias = tuple[jax.Array, ...]
Function: TypeAlias = Callable[..., jax.Array]
# The arguments of a mask function, and of a score function.
MASK, SCORE = "bnij", "xbnij"


@jax.tree_util.register_static
@dataclass(frozen=True)
class Grid:
    """Blocks of `rows` queries and `keys` keys over T queries and S keys; static under jit."""

    T: int
    S: int
    rows: int
    keys: int


class Blocks(NamedTuple):
    """The blocks of pairs that a mask allows; an axis `b` or `n` may be 1.

    Attributes:
      grid: the sizes.
      some: blocks with an allowed pair in some head; may over-report.
      every: blocks in which every pair is allowed, in all heads; may under-report.
      rows, keys: queries and keys with an allowed pair, exactly.
    """

    grid: Grid
    some: Bool[Array, "b i j"]
    every: Bool[Array, "b i j"]
    rows: Bool[Array, "b n T"]
    keys: Bool[Array, "b n S"]


class Mod(NamedTuple):
    """A score or mask function with the arrays that it closes over.

    Attributes:
      program: the traced function.
      floats: captured floating arrays, which have gradients.
      others: other captured arrays.
      starts: first positions on B, N, T and S of a part of a larger request; None: zeros.
      blocks: of a mask function, if they are known.
    """

    program: Program
    floats: Floats
    others: tuple[jax.Array, ...]
    starts: Int32[jax.Array, "4"] | None = None
    blocks: Blocks | None = None

    def shift(self, *starts: Index) -> "Mod":
        """The function for the part of the request that starts at `starts` on B, N, T and S."""
        more = jnp.stack([jnp.asarray(x).astype(np.int32) for x in starts])
        before = jnp.zeros_like(more) if self.starts is None else self.starts
        return self._replace(starts=before + more, blocks=None)


def trace(name: str, function: Function | None, dtype: np.dtype[np.floating] | None) -> Mod | None:
    """Traces the argument `name`; `dtype`: of the scores, None for a mask function.

    Raises:
      TypeError: it is no function, or returns another dtype.
      ValueError: it does not return one value per pair.
    """
    if function is None:
        return None
    if not callable(function):
        raise TypeError(f"{name} must be a function, got {type(function).__name__}")
    reject_foreign(name, function)
    arguments = MASK if dtype is None else SCORE
    scalars = [
        jax.ShapeDtypeStruct((), np.dtype(np.int32) if x != "x" else dtype)  # type: ignore[no-untyped-call]
        for x in arguments
    ]
    try:
        closed, out = jax.make_jaxpr(function, return_shape=True)(*scalars)
    except Exception as error:
        shown = ", ".join(_NAMES[x] for x in arguments)
        error.add_note(
            f"{name}({shown}) was traced with scalars: it must return the value of one pair, by "
            "functions of JAX"
        )
        raise
    _check(name, out, dtype)
    mod = _hoisted(closed, arguments)
    blocks = getattr(function, "blocks", None)
    return mod._replace(blocks=blocks) if isinstance(blocks, Blocks) else mod


_NAMES = {"x": "score", "b": "b", "n": "n", "i": "i", "j": "j"}


def _check(name: str, out: object, dtype: np.dtype[np.floating] | None) -> None:
    shape, found = getattr(out, "shape", None), getattr(out, "dtype", None)
    if found is None:
        raise TypeError(f"{name} must return one array, got {type(out).__name__}")
    if shape != ():
        raise ValueError(
            f"{name} must return one value per pair, of the shape () of its arguments, got {shape}: "
            "it is traced with scalars and vectorised over the scores"
        )
    if dtype is None and found != np.bool_:
        raise TypeError(
            f"{name} must return a Boolean (True = attend), got {found}: `!= 0` makes it Boolean, "
            "and a function that changes scores is a score_mod"
        )
    if dtype is not None and not jnp.issubdtype(found, np.floating):
        raise TypeError(
            f"{name} must return a score, floating as its first argument, got {found}"
            f"{': a function that excludes pairs is a mask_mod' * (found == np.bool_)}"
        )


def _hoisted(closed: Closed, arguments: str) -> Mod:
    """The traced function with its captured arrays as inputs."""
    arrays = [jnp.asarray(x) for x in closed.consts]
    floating = tuple(bool(jnp.issubdtype(x.dtype, np.floating)) for x in arrays)
    return Mod(Program.of(closed, arguments, floating), *_split(arrays, floating))


def _split(
    arrays: Sequence[jax.Array], floating: tuple[bool, ...]
) -> tuple[Floats, tuple[jax.Array, ...]]:
    floats, others = (
        tuple(x for x, is_float in zip(arrays, floating, strict=True) if is_float == wanted)
        for wanted in (True, False)
    )
    return floats, others


class Extent(NamedTuple):
    """A tile: its starts and static sizes along B, N, T and S, the sizes T and S of the arrays
    (positions beyond, from padding, are clipped), and query heads per key/value head."""

    starts: tuple[Index, Index, Index, Index]
    sizes: tuple[int, int, int, int]
    T: int
    S: int
    G: int = 1


def allowed(mod: Mod, extent: Extent) -> Bool[jax.Array, "_ _ _ _"]:
    """The pairs of a tile that a mask function allows; axes that it does not read have size 1."""
    index = _indices(mod, extent)
    uses = set(mod.program.uses)
    axes = "".join(x for x in "bnij" if x in uses)
    inputs = [(index[x][0], index[x][1]) for x in MASK]
    found = _vectorised(mod, mod.floats, axes, inputs)
    return found.reshape([n if x in axes else 1 for x, n in zip("bnij", extent.sizes, strict=True)])


def scores(
    mod: Mod,
    extent: Extent,
    logits: Float[jax.Array, "*c r s"],
    floats: Floats,
    *,
    transposed: bool = False,
) -> Float[jax.Array, "*c r s"]:
    """The scores of a tile after a score function.

    Args:
      mod: the score function.
      extent: the tile; rows `r` are the queries of each query head of a group.
      logits: scores of the tile, heads of several batch rows on one axis `c` (or none).
      floats: the captured floating arrays: those of `mod`, with respect to which one may
        differentiate.
      transposed: whether the axes of logits are `s r`.
    """
    batches, heads, rows, keys = extent.sizes
    K, G = heads // extent.G, extent.G
    shape = (batches, K, keys, G, rows) if transposed else (batches, K, G, rows, keys)
    axes = "bkjgi" if transposed else "bkgij"
    index = _indices(mod, extent)
    n = index["n"][0].reshape(K, G), "kg"
    tile = (logits.reshape(shape), axes), index["b"], n, index["i"], index["j"]
    found = _vectorised(mod, floats, axes, list(tile))
    return found.reshape(logits.shape).astype(logits.dtype)


def _indices(mod: Mod, extent: Extent) -> dict[str, tuple[Int32[jax.Array, "..."], str]]:
    """Absolute indices of a tile, and the axes of each array."""
    first = (0, 0, 0, 0) if mod.starts is None else mod.starts
    last = (None, None, extent.T - 1, extent.S - 1)
    found = {}
    rows = zip("bnij", extent.starts, extent.sizes, first, last, strict=True)
    for letter, start, size, before, most in rows:
        at = jnp.asarray(start, np.int32) + jnp.arange(size, dtype=np.int32)
        at = at if most is None else jnp.minimum(at, np.int32(most))
        found[letter] = (at + jnp.asarray(before, np.int32), letter)
    return found


def _vectorised(
    mod: Mod, floats: Floats, axes: str, inputs: Sequence[tuple[jax.Array, str]]
) -> jax.Array:
    """Applies the function over `axes`, outermost first; each input has a subset of them."""
    program = mod.program
    floating, others = iter(floats), iter(mod.others)
    arrays = [next(floating if is_float else others) for is_float in program.floating]
    # An input without axes of its own, because the value does not depend on it, is any entry.
    values = [
        (x, letters) if set(letters) <= set(axes) else (x.reshape(-1)[0], "")
        for x, letters in inputs
    ]

    def call(*arguments: jax.Array) -> jax.Array:
        return program.run(arrays, arguments)

    for axis in reversed(axes):
        call = jax.vmap(call, in_axes=[0 if axis in letters else None for _, letters in values])
    return call(*(x for x, _ in values))


def of_pair(mod: Mod, b: jax.Array, n: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    """A mask function of one pair, given by scalars."""
    pair = [(jnp.asarray(x, np.int32), "") for x in (b, n, i, j)]
    return _vectorised(mod, mod.floats, "", pair)


def of_pairs(
    mod: Mod, N: int, queries: Int32[jax.Array, "B T"], keys: Int32[jax.Array, "B s"]
) -> Bool[jax.Array, "B N T s"]:
    """The pairs of queries and keys at given positions that a mask function allows."""
    return _vectorised(mod, mod.floats, "bnij", _at_positions(N, queries, keys))


def of_scores(
    mod: Mod,
    logits: Float[jax.Array, "B N T s"],
    queries: Int32[jax.Array, "B T"],
    keys: Int32[jax.Array, "B s"],
) -> Float[jax.Array, "B N T s"]:
    """The scores of queries and keys at given positions after a score function."""
    inputs = [(logits, "bnij"), *_at_positions(logits.shape[1], queries, keys)]
    return _vectorised(mod, mod.floats, "bnij", inputs).astype(logits.dtype)


def _at_positions(
    N: int, queries: jax.Array, keys: jax.Array
) -> list[tuple[Int32[jax.Array, "..."], str]]:
    b, n = (jnp.arange(size, dtype=np.int32) for size in (queries.shape[0], N))
    i, j = (jnp.maximum(x, 0).astype(np.int32) for x in (queries, keys))  # empty slots: below 0
    return [(b, "b"), (n, "n"), (i, "bi"), (j, "bj")]


def cotangent(mod: Mod | None, floats: Floats) -> Mod | None:
    """The cotangent of a function, as a custom VJP returns it: that of its floating arrays."""
    if mod is None:
        return None
    found = tuple(x.astype(y.dtype) for x, y in zip(floats, mod.floats, strict=True))
    none: Any = None
    return Mod(mod.program, found, none)
