"""Runs tiled attention on a device's own batch rows and heads in programs that XLA partitions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import jax

from jaxmha.implementations import partitioned
from jaxmha.implementations.mods import Mod
from jaxmha.implementations.tiled.block_mask import Conditions
from jaxmha.implementations.tiled.dropout import Seed
from jaxmha.implementations.tiled.tiling import Tiling, divisor

Tree = TypeVar("Tree")
Others = TypeVar("Others")

# The arguments of `attention.core` after its config: query, key, value, bias, mask conditions, seed
# of the dropout mask, and score function.
CoreInputs: TypeAlias = tuple[
    jax.Array, jax.Array, jax.Array, jax.Array | None, Conditions, Seed | None, Mod | None
]
# Rank of an array -> its axis letters (`partitioned.Letters`): b batch rows, n query heads, a dot
# any other axis. Keys, values and their gradients have KEYS, with k for key/value heads.
LETTERS = {1: "b", 2: "b.", 3: "bn.", 4: "bn.."}
KEYS = "bk.."


def run(
    function: Callable[[Tiling, CoreInputs, Others], Tree],
    tiling: Tiling,
    partition: bool,
    inputs: CoreInputs,
    others: Others,
    results: Callable[[Tree], Any] | None = None,
) -> Tree:
    """Runs `function(tiling, inputs, others)`, on each device for its own batch rows and heads if
    XLA may partition the program.

    Dropout masks, score functions and mask functions depend on positions in the whole batch: with
    them, `function` gets the whole arrays, and XLA partitions the program itself.

    Args:
      tiling: of the whole arrays; `function` gets a tiling of the arrays of one device.
      partition: False if XLA does not partition the program (`Config.partition`).
      others: further arrays `B N T` or `B N T d`, such as the softmax that the backward pass reads.
      results: maps the results to their axis letters, in the same structure; None: `by_rank`.
    """
    query, key, value, bias, traced, seed, mod = inputs
    if not partition or seed is not None or mod is not None or traced.mod is not None:
        return function(tiling, inputs, others)

    def local(*operands: Any) -> Tree:
        query, key, value, bias, traced, others = operands
        own = _own(tiling, query, key)
        return function(own, (query, key, value, bias, traced, None, None), others)

    operands = query, key, value, bias, traced, others
    letters = by_rank(operands)
    letters = letters[0], KEYS, KEYS, *letters[3:]
    return partitioned.run(local, operands, letters, results or by_rank)


def by_rank(arrays: Any) -> Any:
    """The LETTERS of every array of a pytree, by its rank; not for keys and values."""
    return jax.tree.map(lambda x: LETTERS[x.ndim], arrays)


def _own(tiling: Tiling, query: jax.Array, key: jax.Array) -> Tiling:
    (B, N), K = query.shape[:2], key.shape[1]
    batches, heads = divisor(B, tiling.batches), divisor(K, tiling.heads)
    batches = batches if heads == K else 1
    return replace(tiling, B=B, K=K, G=N // K, batches=batches, heads=heads)
