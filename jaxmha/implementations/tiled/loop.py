"""Loops over tiles: the online-softmax forward pass, and the backward pass."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Num

from jaxmha.implementations import online_softmax
from jaxmha.implementations.mods import Floats, Mod
from jaxmha.implementations.online_softmax import Softmax, State, empty_state
from jaxmha.implementations.tiled import block_mask, layout, tile
from jaxmha.implementations.tiled.block_mask import NO_CONDITIONS, Conditions, TilePosition
from jaxmha.implementations.tiled.dropout import Seed, keep_mask
from jaxmha.implementations.tiled.layout import Index
from jaxmha.implementations.tiled.schedule import Schedule, make_schedule, visit_all
from jaxmha.implementations.tiled.tile import Config, Cotangents, Modifier
from jaxmha.implementations.tiled.tiling import Tiling

Operands: TypeAlias = tuple[jax.Array, ...]  # of matmuls: query, key and value, or some of them
ReadTile: TypeAlias = Callable[[Index], Operands]  # keys and values of KV tile j, some transposed
Decode: TypeAlias = Callable[[jax.Array], jax.Array]  # casts a KV tile from its stored dtype
Result = TypeVar("Result")
Tree = TypeVar("Tree")


class Shared(NamedTuple):
    """Inputs that all tiles of a call share; conditions, static ones too, and bias are padded to
    whole tiles. `schedule` None: all tiles are visited, and only `conditions.rows` masks pairs."""

    tiling: Tiling
    config: Config
    conditions: Conditions
    bias: Float[jax.Array, "b n t s"] | None
    seed: Seed | None
    schedule: Schedule | None
    score_mod: Mod | None

    def position(self, step: Index, i: Index, j: Index) -> TilePosition:
        """Position of the scores of query tile `i` with KV tile `j`, for the heads of `step`."""
        t = self.tiling
        b, n = step // t.groups * t.batches, step % t.groups * t.heads * t.G
        heads, t0, s0 = t.heads * t.G, i * t.rows, j * t.keys
        return TilePosition(b, t.batches, n, heads, t0, t.rows, s0, t.keys, t.T, t.S, t.G)

    def modifier(self, position: TilePosition) -> Modifier | None:
        """The score function, bound to the tile at `position`; None: there is none."""
        return None if self.score_mod is None else Modifier(self.score_mod, position.extent)

    def mask_and_keep(
        self, position: TilePosition, unmasked: bool, dtype: np.dtype[np.floating]
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """Mask tile or, with a bias, bias tile in `dtype`; and dropout keep-mask; None: not needed.

        Axes: `[tile_heads] G*rows keys`, of which the first two may be 1 in the mask or bias tile.
        `unmasked`: mask conditions allow all pairs of valid rows.
        """
        tiling, config, conditions = self.tiling, self.config, self.conditions
        if unmasked:
            conditions = NO_CONDITIONS._replace(rows=conditions.rows)
        mask = block_mask.mask_or_bias(conditions, self.bias, position, tiling.G, dtype)
        keep = keep_mask(
            tiling, config.dropout_rate, config.dropout_broadcast, config.whole, self.seed, position
        )
        return layout.drop_single_head(tiling, mask), layout.drop_single_head(tiling, keep)


def _shared(
    tiling: Tiling,
    config: Config,
    bias: Float[jax.Array, "b n t s"] | None,
    traced: Conditions,
    seed: Seed | None,
    score_mod: Mod | None,
    *,
    gradient: bool = False,
) -> Shared:
    above = traced.above if config.above is None else config.above
    conditions = traced._replace(window=config.window, above=above)
    conditions, bias = block_mask.pad(conditions, bias, tiling)
    schedule = make_schedule(conditions, tiling)
    if gradient:  # after the schedule, which stays static: no tile has padded rows alone
        conditions = block_mask.without_padded_rows(conditions, tiling)
    return Shared(tiling, config, conditions, bias, seed, schedule, score_mod)


def forward(
    tiling: Tiling,
    config: Config,
    query: Num[jax.Array, "*tiles rows H"],
    key: Num[jax.Array, "*tiles2 keys H"],
    value: Num[jax.Array, "*tiles2 keys h"],
    bias: Float[jax.Array, "b n t s"] | None,
    traced: Conditions,
    seed: Seed | None,
    finalize: Callable[[State], Result],
    score_mod: Mod | None = None,
) -> Result:
    """Loops over KV tiles for every query tile, and stacks `finalize` of each final state `*c r d`.

    `query`, `key`, `value`: tiles from `layout.to_query_tiles` and `layout.to_kv_tiles`.
    """
    shared = _shared(tiling, config, bias, traced, seed, score_mod)
    h = value.shape[-1]
    # With segment ids or a mask function, tiles are large, and heads take several steps. Each would
    # copy its operands once more to transpose them, so they are transposed before the loop.
    early = config.transposed and not (traced.mod is None and traced.segments is None)
    if early:
        query, value = transpose_all((query, value))

    def step(index: Index, operands: Operands) -> Result:
        rows, keys, values = operands
        if config.transposed and not early:
            rows, values = transpose_all((rows, values))
        elif not config.transposed:
            keys = jnp.swapaxes(keys, -1, -2)

        def read(j: Index) -> Operands:
            return layout.kv_tile(tiling, keys, j), layout.kv_tile(tiling, values, j)

        def query_tile(i: Index, rows: jax.Array) -> Result:
            start = None if tiling.kv_tiles == 1 else initial_state(config, rows, h)
            state = _visit_kv_tiles(shared, index, i, rows, read, start)
            return finalize(transpose_all(state) if config.transposed else state)

        return layout.map_tiles(query_tile, tiling.query_tiles, rows, unroll=tiling.unroll)

    unroll = tiling.unroll and tiling.kv_tiles == 1
    return layout.map_tiles(step, tiling.steps, (query, key, value), unroll=unroll)


def forward_into(
    tiling: Tiling,
    config: Config,
    before: State,
    query: Num[jax.Array, "*tiles H rows"],
    key: Num[jax.Array, "*tiles2 keys H"],
    value: Num[jax.Array, "*tiles2 keys h"],
    traced: Conditions,
    seed: Seed | None,
    decode: Decode,
    score_mod: Mod | None = None,
) -> State:
    """Folds further keys into the softmax states `before`, in place; `config.transposed` is True.

    States have the axes `*tiles d rows`. `key`, `value`: tiles from `layout.to_kv_tiles` in a
    stored dtype, from which `decode` casts a tile when it is visited.
    """
    shared = _shared(tiling, config, None, traced, seed, score_mod)

    def step(index: Index, before: State, _: None, operands: Operands) -> tuple[State, None]:
        rows, *keys_and_values = operands

        def read(j: Index) -> Operands:
            keys, values = (decode(layout.kv_tile(tiling, x, j)) for x in keys_and_values)
            return keys, jnp.swapaxes(values, -1, -2)

        def query_tile(i: Index, state: State, _: None, rows: jax.Array) -> tuple[State, None]:
            return _visit_kv_tiles(shared, index, i, rows, read, state), None

        return layout.update_tiles(query_tile, tiling.query_tiles, before, None, rows)

    return layout.update_tiles(step, tiling.steps, before, None, (query, key, value))[0]


def _visit_kv_tiles(
    shared: Shared, step: Index, i: Index, rows: jax.Array, read: ReadTile, start: State | None
) -> State:
    """Folds the scheduled KV tiles, which `read` slices, into `start`, the state of query tile `i`
    of `step` (None: before the first key; only with one KV tile)."""
    fold = tile.forward_transposed if shared.config.transposed else tile.forward

    def visit(j: Index, unmasked: bool, carry: State | None) -> State | None:
        position = shared.position(step, i, j)
        mask_or_bias, keep = shared.mask_and_keep(position, unmasked, rows.dtype)
        keys, values = read(j)
        modifier = shared.modifier(position)
        return fold(shared.config, rows, keys, values, mask_or_bias, keep, carry, modifier)

    state = visit_all(shared.schedule, shared.tiling, step, i, visit, start)
    assert state is not None
    return state


def initial_state(config: Config, rows: jax.Array, h: int) -> State:
    """The state before the first key, for rows `*c r H`, or `*c H r` and a transposed state if
    `config.transposed`; `h`: features of a value."""
    *lead, r, _ = jnp.swapaxes(rows, -1, -2).shape if config.transposed else rows.shape
    shapes = ((*lead, d, r) if config.transposed else (*lead, r, d) for d in (h, 1))
    out, per_row = (jnp.zeros_like(rows, shape=shape) for shape in shapes)
    return empty_state(out, per_row)


def transpose_all(arrays: Tree) -> Tree:
    """Swaps the last two axes of every array of a pytree."""
    swapped: Tree = jax.tree.map(lambda x: jnp.swapaxes(x, -1, -2), arrays)
    return swapped


def normalize(config: Config, state: State, seed: Seed | None) -> Softmax:
    """Divides the output by the row sum and, if there is a seed, by dropout's keep probability."""
    return online_softmax.normalize(state, None if seed is None else 1 - config.dropout_rate)


def backward_inputs(
    tiling: Tiling,
    query: Float[jax.Array, "B N T H"],
    softmax: Softmax | None,
    d_out: Float[jax.Array, "B N T h"],
    d_lse: Float[jax.Array, "B N T"] | None,
) -> tuple[Float[jax.Array, "*tiles H rows"], Cotangents]:
    """Transposed query tiles, and per-row inputs of the backward pass in query tiles.

    `softmax`: results of the forward pass; None: each tile has all keys of its rows, and computes
    row max, row sum and delta from its logits. `d_out`, `d_lse`: cotangents of output, lse.
    """
    # d_logit = weight * (d_out @ value - delta + d_lse) with delta = sum(d_out * out); weight is
    # exp(logit - row max) / row sum, and 0 in fully masked rows.
    query = jnp.swapaxes(layout.to_query_tiles(tiling, query), -1, -2)
    minus_delta = jnp.zeros_like(d_out[..., :1]) if d_lse is None else d_lse[..., None]
    d_out, minus_delta = (layout.to_query_tiles(tiling, x) for x in (d_out, minus_delta))
    if softmax is None:
        return query, Cotangents(d_out, None, minus_delta)
    row_max = jnp.where(softmax.row_sum == 0, jnp.inf, softmax.row_max)
    row_max = layout.to_query_tiles(tiling, row_max, jnp.inf)
    out, row_sum = (layout.to_query_tiles(tiling, x) for x in (softmax.out, softmax.row_sum))
    divisor = online_softmax.divisor_of(row_sum)
    # einsum instead of sum: for a sum, XLA:CPU materialises the products, several times.
    minus_delta -= jnp.einsum("...h,...h->...", d_out, out, precision="highest")[..., None]
    return query, Cotangents(d_out / divisor, row_max, minus_delta / divisor)


# Gradients of query ("*tiles H rows"), key ("*tiles2 keys H") and value ("*tiles2 keys h"), or,
# until a loop overwrites them, the tiles themselves.
QKVGradients: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]


class Additional(NamedTuple):
    """Gradients other than those of query, key and value, summed over tiles: of the bias, padded to
    whole tiles (None: no bias), and of the floating arrays that the score function captures."""

    bias: Float[jax.Array, "_ _ _ _"] | None
    floats: Floats


def backward(
    tiling: Tiling,
    config: Config,
    query: Float[jax.Array, "*tiles H rows"],
    cotangents: Cotangents,
    key: Num[jax.Array, "*tiles2 keys H"],
    value: Num[jax.Array, "*tiles2 keys h"],
    bias: Float[jax.Array, "b n t s"] | None,
    traced: Conditions,
    seed: Seed | None,
    score_mod: Mod | None = None,
) -> tuple[Additional, QKVGradients]:
    """Returns gradients of the bias and of the arrays that `score_mod` captures, and gradients of
    query, key and value as tiles. `query`, `cotangents`: from `backward_inputs`."""
    shared = _shared(tiling, config, bias, traced, seed, score_mod, gradient=True)
    bias = shared.bias
    more = Additional(
        None if bias is None else jnp.zeros_like(bias, query.dtype), _zeros(score_mod, query.dtype)
    )

    def step(
        index: Index, x: QKVGradients, more: Additional, cotangents: Cotangents
    ) -> tuple[QKVGradients, Additional]:
        rows, keys, values = x
        operands = keys, values, jnp.swapaxes(keys, -1, -2)

        def read(j: Index) -> Operands:
            return tuple(layout.kv_tile(tiling, x, j) for x in operands)

        def query_tile(
            i: Index, rows: jax.Array, carry: _KVGradients, cotangents: Cotangents
        ) -> tuple[jax.Array, _KVGradients]:
            start = jnp.zeros_like(rows), *carry
            dq, dk, dv, more = _visit_backward(shared, index, i, rows, cotangents, read, start)
            return dq, (dk, dv, more)

        zeros = jnp.zeros_like(keys), jnp.zeros_like(values), more
        dq, (dk, dv, more) = layout.update_tiles(
            query_tile, tiling.query_tiles, rows, zeros, cotangents
        )
        return (dq, dk, dv), more

    # The loop overwrites tiles of query, key and value with their gradients, to use less memory.
    gradients, more = layout.update_tiles(step, tiling.steps, (query, key, value), more, cotangents)
    return more, gradients


def _zeros(mod: Mod | None, dtype: np.dtype[np.floating]) -> Floats:
    """Zeros to which gradients of the floating arrays that `mod` captures are added."""
    return () if mod is None else tuple(jnp.zeros_like(x, dtype) for x in mod.floats)


def backward_into(
    tiling: Tiling,
    config: Config,
    before: QKVGradients,
    query: Float[jax.Array, "*tiles H rows"],
    cotangents: Cotangents,
    key: Num[jax.Array, "*tiles2 keys H"],
    value: Num[jax.Array, "*tiles2 keys h"],
    traced: Conditions,
    seed: Seed | None,
    decode: Decode,
    score_mod: Mod | None = None,
    floats: Floats = (),
) -> tuple[QKVGradients, Floats]:
    """Adds, in place, the gradients over further keys: those of query, key and value to `before`,
    and those of the floating arrays that `score_mod` captures to `floats`.

    `query`, `cotangents`: from `backward_inputs`. `key`, `value`: tiles in a stored dtype, from
    which `decode` casts a tile when it is visited.
    """
    shared = _shared(tiling, config, None, traced, seed, score_mod, gradient=True)
    inputs = (query, cotangents), (key, value)

    def step(
        index: Index,
        before: QKVGradients,
        more: Additional,
        inputs: tuple[tuple[jax.Array, Cotangents], tuple[jax.Array, jax.Array]],
    ) -> tuple[QKVGradients, Additional]:
        (dq, dk, dv), (per_row, keys_and_values) = before, inputs

        def read(j: Index) -> Operands:
            keys, values = (decode(layout.kv_tile(tiling, x, j)) for x in keys_and_values)
            return keys, values, jnp.swapaxes(keys, -1, -2)

        def query_tile(
            i: Index, dq: jax.Array, carry: _KVGradients, per_row: tuple[jax.Array, Cotangents]
        ) -> tuple[jax.Array, _KVGradients]:
            found = _visit_backward(shared, index, i, *per_row, read, (dq, *carry))
            dq, dk, dv, more = found
            return dq, (dk, dv, more)

        dq, (dk, dv, more) = layout.update_tiles(
            query_tile, tiling.query_tiles, dq, (dk, dv, more), per_row
        )
        return (dq, dk, dv), more

    start = Additional(None, floats)
    gradients, more = layout.update_tiles(step, tiling.steps, before, start, inputs)
    return gradients, more.floats


_KVGradients: TypeAlias = tuple[jax.Array, jax.Array, Additional]
_Gradients: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, Additional]


def _visit_backward(
    shared: Shared,
    step: Index,
    i: Index,
    rows: jax.Array,
    cotangents: Cotangents,
    read: ReadTile,
    start: _Gradients,
) -> _Gradients:
    """Adds the gradients of the scheduled KV tiles, which `read` slices, with query tile `i` of
    `step` to `start`: dq of this query tile, dk and dv of all KV tiles, and others."""
    tiling = shared.tiling

    def visit(j: Index, unmasked: bool, carry: _Gradients) -> _Gradients:
        dq, dk, dv, (d_bias, floats) = carry
        position = shared.position(step, i, j)
        mask_or_bias, keep = shared.mask_and_keep(position, unmasked, rows.dtype)
        keys, values, keys_transposed = read(j)
        operands = keys, values, keys_transposed, mask_or_bias, keep
        more = tile.backward(shared.config, rows, cotangents, *operands, shared.modifier(position))
        if d_bias is not None:
            d_bias = _add_bias_gradient(d_bias, more.bias, position)
        floats = tuple(x + y.astype(x.dtype) for x, y in zip(floats, more.floats, strict=True))
        dk = layout.add_to_kv_tile(tiling, dk, j, more.keys)
        dv = layout.add_to_kv_tile(tiling, dv, j, more.values)
        return dq + more.rows, dk, dv, Additional(d_bias, floats)

    return visit_all(shared.schedule, tiling, step, i, visit, start)


def _add_bias_gradient(
    whole: Float[jax.Array, "b n t s"],
    d_bias: Float[jax.Array, "*c rows keys"],
    position: TilePosition,
) -> Float[jax.Array, "b n t s"]:
    """Adds the bias gradient of a tile to `whole`, that of the padded bias, summed over its axes of
    size 1."""
    part = d_bias.reshape(position.sizes)
    axes = tuple(axis for axis, size in enumerate(whole.shape) if size == 1)
    part = part.sum(axes, keepdims=True)
    first = [
        jnp.asarray(0 if size == 1 else start, jnp.int32)
        for size, start in zip(whole.shape, position.starts, strict=True)
    ]
    before = jax.lax.dynamic_slice(whole, first, part.shape)
    return jax.lax.dynamic_update_slice(whole, before + part, first)
