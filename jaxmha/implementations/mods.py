"""Score and mask functions: traced with the scalars of one pair, vectorised over tiles.

A function of scalars cannot read other entries of a tile, so its values do not depend on the
tiling. Arrays that it captures (closes over) become inputs; the floating ones have gradients.
Source: Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention
Kernels" (2024).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int32

from jaxmha.arrays import Array, reject_foreign
from jaxmha.implementations.program import Closed, Program

Index: TypeAlias = jax.Array | int
Floats: TypeAlias = tuple[jax.Array, ...]
Function: TypeAlias = Callable[..., jax.Array]
# Letters of the arguments of mask and score functions: score x, batch row b, head n, query i, key j.
MASK, SCORE = "bnij", "xbnij"
_NAMES = {"x": "score", "b": "b", "n": "n", "i": "i", "j": "j"}


@jax.tree_util.register_static
@dataclass(frozen=True)
class Grid:
    """Sizes: T queries and S keys in blocks of `rows` queries x `keys` keys; static under jit."""

    T: int
    S: int
    rows: int
    keys: int


class Blocks(NamedTuple):
    """The blocks of pairs that a mask allows; `b` or `n` may be 1, for all batch rows or heads.

    Attributes:
      grid: sizes of blocks and arrays.
      some: True for every block with an allowed pair in some head; may be True for other blocks.
      every: True only for blocks whose pairs are all allowed in all heads; may be False for them.
      rows, keys: True for queries and keys with an allowed pair; exact.
    """

    grid: Grid
    some: Bool[Array, "b i j"]
    every: Bool[Array, "b i j"]
    rows: Bool[Array, "b n T"]
    keys: Bool[Array, "b n S"]


class Limit(NamedTuple):
    """The size that an axis of a call may have, because the function indexes its array `argument`
    along it: at most `size` for T and S, exactly `size` for N and B (any B if `size` is 1)."""

    argument: str
    axis: str
    size: int

    def allows(self, size: int) -> bool:
        if self.axis in "TS":
            return size <= self.size
        return size == self.size or (self.axis, self.size) == ("B", 1)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Limits:
    """The `Limit`s of all arrays of a function; static under jit."""

    each: tuple[Limit, ...] = ()


def limits_of(function: object) -> tuple[Limit, ...]:
    """The `Limit`s of a function of `jaxmha.mods`; () for any other function."""
    if isinstance(function, jax.tree_util.Partial):
        given = getattr(function.func, "limits", None)
        return () if given is None else tuple(given(*function.args))
    found = getattr(function, "limits", None)
    return found.each if isinstance(found, Limits) else ()


class Mod(NamedTuple):
    """A score or mask function with the arrays that it closes over.

    Attributes:
      program: the traced function.
      floats: captured floating arrays, which have gradients.
      others: other captured arrays.
      starts: where this part of a larger request starts along B, N, T and S; None: zeros.
      blocks: the blocks that a mask function allows; None: unknown, or a score function.
      limits: the sizes that the axes of a call may have, given the captured arrays.
    """

    program: Program
    floats: Floats
    others: tuple[jax.Array, ...]
    starts: Int32[jax.Array, "4"] | None = None
    blocks: Blocks | None = None
    limits: Limits = Limits()

    def shift(self, *starts: Index) -> "Mod":
        """The function for the part of the request that starts at `starts` on B, N, T and S."""
        more = jnp.stack([jnp.asarray(x).astype(np.int32) for x in starts])
        before = jnp.zeros_like(more) if self.starts is None else self.starts
        return self._replace(starts=before + more, blocks=None)


def trace(name: str, function: Function | None, dtype: np.dtype[np.floating] | None) -> Mod | None:
    """Traces the function given as argument `name`; None: none is given.

    `dtype`: of the scores of a score function; None: it is a mask function.

    Raises:
      TypeError: the argument is not a function, or returns a wrong dtype.
      ValueError: the function does not return one value per pair.
      Exception: the function raised it when it was traced; a note says so.
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
        # A new function each time: JAX caches the first trace of a function, with the values that
        # it captured then.
        fresh = wraps(function)(lambda *x: function(*x))
        # The program runs on the arrays of one device, so no mesh axis is explicit in its types.
        with jax.sharding.use_abstract_mesh(NO_MESH):
            closed, out = jax.make_jaxpr(fresh, return_shape=True)(*scalars)
    except Exception as error:
        shown = ", ".join(_NAMES[x] for x in arguments)
        error.add_note(
            f"{name}({shown}) was traced with scalars: it must return the value of one pair, by "
            "functions of JAX"
        )
        raise
    _check(name, out, dtype)
    mod = _hoisted(closed, arguments)._replace(limits=Limits(limits_of(function)))
    mod = mod._replace(program=_remembered(function, mod.program))
    blocks = getattr(function, "blocks", None)
    return mod._replace(blocks=blocks) if isinstance(blocks, Blocks) else mod


NO_MESH = jax.sharding.AbstractMesh((), ())
# Function -> the program of its last trace.
_PROGRAMS: WeakKeyDictionary[Function, Program] = WeakKeyDictionary()


def _remembered(function: Function, program: Program) -> Program:
    """The program of the last trace of `function` if `program` equals it apart from rules of custom
    derivatives, else `program`. Each trace makes new rules, with which calls would compile anew."""
    try:
        last = _PROGRAMS.setdefault(function, program)
    except TypeError:  # a function that cannot be hashed, or not weakly referenced
        return program
    if last.arguments != program.arguments or not last.alike(program):
        _PROGRAMS[function] = last = program
    return last


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
    """Converts a closed jaxpr with `arguments`, MASK or SCORE, to a `Mod`, which has its constants."""
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
    """A tile: its starts and static sizes along B, N, T and S. Its positions beyond the sizes `T` and
    `S` of the arrays, which pad it, count as the last position. `G`: query heads per key/value head.
    `aligned`: numbers that surely divide the starts along T and S, where these are traced."""

    starts: tuple[Index, Index, Index, Index]
    sizes: tuple[int, int, int, int]
    T: int
    S: int
    G: int = 1
    aligned: tuple[int, int] = (1, 1)


def allowed(mod: Mod, extent: Extent) -> Bool[jax.Array, "_ _ _ _"]:
    """The mask of a tile by a mask function; axes that the function does not read have size 1.

    A function that is constant within blocks is evaluated once per block if the tile starts with one.
    """
    blocks = {letter: block_within(mod, extent, letter) for letter in "ij"}
    index = _indices(mod, extent, blocks)
    uses = set(mod.program.uses)
    axes = "".join(x for x in "bnij" if x in uses)
    inputs = [(index[x][0], index[x][1]) for x in MASK]
    found = _vectorised(mod, mod.floats, axes, inputs)
    sizes = [index[x][0].size if x in axes else 1 for x in "bnij"]
    found = found.reshape(sizes)
    if max(blocks.values()) == 1:
        return found
    # The barrier keeps XLA from evaluating the function for every pair, fused with the repetition.
    found = jax.lax.optimization_barrier(found)  # type: ignore[no-untyped-call]
    for axis, letter in ((2, "i"), (3, "j")):
        if blocks[letter] > 1 and letter in axes:
            found = _repeated(found, axis, blocks[letter], extent.sizes[axis])
    return found


def block_within(mod: Mod, extent: Extent, letter: str) -> int:
    """The size of the blocks of queries (i) or keys (j) of a tile within which a mask function is
    constant; 1 if there are none, or if the tile may start within a block, as in a shifted `Mod`."""
    start = extent.starts["bnij".index(letter)]
    if mod.starts is not None:
        return 1
    block = mod.program.grain(letter)
    multiple = start if isinstance(start, int) else extent.aligned["ij".index(letter)]
    return block if multiple % block == 0 else 1


def _repeated(x: jax.Array, axis: int, times: int, size: int) -> jax.Array:
    """Repeats each entry along an axis `times` times and keeps the first `size` entries."""
    shape = x.shape
    wide = jnp.broadcast_to(
        jnp.expand_dims(x, axis + 1), (*shape[: axis + 1], times, *shape[axis + 1 :])
    )
    wide = wide.reshape(*shape[:axis], shape[axis] * times, *shape[axis + 1 :])
    return jax.lax.slice_in_dim(wide, 0, size, axis=axis)


def scores(
    mod: Mod,
    extent: Extent,
    logits: Float[jax.Array, "*c r s"],
    floats: Floats,
    *,
    transposed: bool = False,
) -> Float[jax.Array, "*c r s"]:
    """Applies a score function to the scores of a tile.

    Args:
      mod: the score function.
      extent: the tile; rows `r` are the queries of every query head of a group.
      logits: scores of the tile; `c`: batch rows and key/value heads, on two axes, one or none.
      floats: the captured floating arrays of `mod`, as an argument to differentiate.
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


def bias_of_distances(
    mod: Mod, sizes: tuple[int, int, int, int], dtype: np.dtype[np.floating]
) -> Float[jax.Array, "b n 1 d"]:
    """The bias that a score function adds at distances `j - i` from 1 - T to S - 1.

    `mod`: a score function with `mod.program.adds_bias`; an axis `b` or `n` that it does not read
    has size 1. `sizes`: B, N, T and S.
    """
    B, N, T, S = sizes
    starts = (0, 0, 0, 0) if mod.starts is None else mod.starts
    distance = jnp.arange(1 - T, S, dtype=np.int32)
    given = jnp.arange(B), jnp.arange(N), jnp.maximum(-distance, 0), jnp.maximum(distance, 0)
    index = [x.astype(np.int32) + start for x, start in zip(given, starts, strict=True)]
    axes = "".join(x for x in "bn" if x in mod.program.uses)
    inputs = [(jnp.zeros((), dtype), ""), *zip(index, "bndd", strict=True)]
    found = _vectorised(mod, mod.floats, f"{axes}d", inputs)
    shape = [x.size if letter in axes else 1 for x, letter in zip(index, "bn", strict=False)]
    return found.reshape(*shape, 1, T + S - 1).astype(dtype)


def _indices(
    mod: Mod, extent: Extent, blocks: Mapping[str, int] = MappingProxyType({})
) -> dict[str, tuple[Int32[jax.Array, "..."], str]]:
    """Letter `b`, `n`, `i` or `j` -> (indices of a tile along this axis of the whole request, the
    letter). If `blocks` has the letter, with a block size, they are the first of each block."""
    first = (0, 0, 0, 0) if mod.starts is None else mod.starts
    last = (None, None, extent.T - 1, extent.S - 1)
    found = {}
    rows = zip("bnij", extent.starts, extent.sizes, first, last, strict=True)
    for letter, start, size, before, most in rows:
        block = blocks.get(letter, 1)
        steps = jnp.arange(-(-size // block), dtype=np.int32)
        at = jnp.asarray(start, np.int32) + (steps if block == 1 else steps * np.int32(block))
        at = at if most is None else jnp.minimum(at, jnp.asarray(most, np.int32))
        found[letter] = (at + jnp.asarray(before, np.int32), letter)
    return found


def _vectorised(
    mod: Mod, floats: Floats, axes: str, inputs: Sequence[tuple[jax.Array, str]]
) -> jax.Array:
    """Maps the function, given `floats`, over `axes`, outermost first; `inputs`: arguments, axes."""
    program = mod.program
    floating, others = iter(floats), iter(mod.others)
    arrays = [next(floating if is_float else others) for is_float in program.floating]
    # The function does not read an input that has an axis outside `axes`, so it gets any entry.
    values = [
        (x, letters) if set(letters) <= set(axes) else (_any_entry(x), "") for x, letters in inputs
    ]

    def call(*arguments: jax.Array) -> jax.Array:
        return program.run(arrays, arguments)

    for axis in reversed(axes):
        call = jax.vmap(call, in_axes=[0 if axis in letters else None for _, letters in values])
    return call(*(x for x, _ in values))


def _any_entry(x: jax.Array) -> jax.Array:
    return x.reshape(-1)[0] if x.size else jnp.zeros((), x.dtype)


def of_pair(mod: Mod, *scalars: jax.Array) -> jax.Array:
    """The value of a function for one pair; `scalars` are its arguments."""
    pair = [
        (x if letter == "x" else jnp.asarray(x, np.int32), "")
        for letter, x in zip(mod.program.arguments, scalars, strict=True)
    ]
    return _vectorised(mod, mod.floats, "", pair)


def of_pairs(
    mod: Mod, N: int, queries: Int32[jax.Array, "B T"], keys: Int32[jax.Array, "B s"]
) -> Bool[jax.Array, "B N T s"]:
    """The mask of a mask function for N query heads, at these positions (below 0 counts as 0)."""
    return _vectorised(mod, mod.floats, "bnij", _at_positions(N, queries, keys))


def of_scores(
    mod: Mod,
    logits: Float[jax.Array, "B N T s"],
    queries: Int32[jax.Array, "B T"],
    keys: Int32[jax.Array, "B s"],
) -> Float[jax.Array, "B N T s"]:
    """Applies a score function to scores of pairs at these positions (below 0 counts as 0)."""
    inputs = [(logits, "bnij"), *_at_positions(logits.shape[1], queries, keys)]
    return _vectorised(mod, mod.floats, "bnij", inputs).astype(logits.dtype)


def _at_positions(
    N: int, queries: jax.Array, keys: jax.Array
) -> list[tuple[Int32[jax.Array, "..."], str]]:
    b, n = (jnp.arange(size, dtype=np.int32) for size in (queries.shape[0], N))
    i, j = (jnp.maximum(x, 0).astype(np.int32) for x in (queries, keys))  # negative: empty slots
    return [(b, "b"), (n, "n"), (i, "bi"), (j, "bj")]


def cotangent(mod: Mod | None, floats: Floats) -> Mod | None:
    """The cotangent of a `Mod` for a custom VJP: `floats` are the gradients of its floating arrays.

    Returns None if `mod` is None.
    """
    if mod is None:
        return None
    found = tuple(x.astype(y.dtype) for x, y in zip(floats, mod.floats, strict=True))
    none: Any = None
    return Mod(mod.program, found, none, limits=mod.limits)
