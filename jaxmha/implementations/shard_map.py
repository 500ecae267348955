"""Attention, and the projections before it, of each device's own batch rows or heads by `shard_map`.

The forward pass of arrays with this sharding needs no communication, and a kernel sees the arrays
of one device, so that no partitioner replicates them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, PRNGKeyArray

from jaxmha import sharding
from jaxmha.implementations import key_heads
from jaxmha.implementations.base import Part, Request, Result
from jaxmha.implementations.mods import Mod
from jaxmha.params import Projection
from jaxmha.sharding import Axes

Tree = TypeVar("Tree")
Others = TypeVar("Others")
Projections: TypeAlias = tuple[Projection, Projection, Projection]
Inputs: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]


class Split(NamedTuple):
    """How B, N and K of a request are sharded over a mesh: entries of a PartitionSpec.

    Attributes:
      axes: the mesh and its axes in use.
      b, n, k: mesh axes of batch rows, query heads and key/value heads; empty: replicated.
      B, N: global sizes.
    """

    axes: Axes
    b: tuple[str, ...]
    n: tuple[str, ...]
    k: tuple[str, ...]
    B: int
    N: int

    def spec(self, shape: tuple[int, ...], letters: str) -> PartitionSpec:
        """The spec of an array of this global shape, with one letter per axis: b, n, k and c
        (positions) are sharded if their size is above 1, other letters replicated."""
        names = {"b": self.b, "n": self.n, "k": self.k}
        if self.axes.context is not None:
            names["c"] = (self.axes.context,)
        return sharding.spec(
            *(
                names.get(letter) if size > 1 else None
                for letter, size in zip(letters, shape, strict=True)
            )
        )

    def own_heads(self, x: jax.Array, axis: int) -> jax.Array:
        """Selects the key/value heads, on `axis` of x, that this device's query heads read; x itself
        if it is already sharded like them."""
        if self.k == self.n:
            return x
        some = self.N // self.axes.size(self.n)
        first = jax.lax.axis_index(self.n) * some
        return key_heads.of_query_heads(x, axis, first, some, self.N)

    def starts(self) -> tuple[jax.Array | int, jax.Array | int]:
        """Indices of the first batch row and query head of this device, inside `shard_map`."""
        b, n = (
            jax.lax.axis_index(names) * (size // self.axes.size(names)) if names else 0
            for names, size in ((self.b, self.B), (self.n, self.N))
        )
        return b, n

    def mod_specs(self, mod: Mod | None) -> Any:
        """PartitionSpecs of a score or mask function: every device has all arrays of it."""
        if mod is None:
            return None
        return jax.tree.map(lambda _: sharding.spec(), mod)

    def own_part(self, mod: Mod | None) -> Mod | None:
        """The score or mask function, shifted to the batch rows and heads of this device."""
        return None if mod is None else mod.shift(*self.starts(), 0, 0)

    def run(
        self, function: Callable[..., Tree], in_specs: tuple[Any, ...], out_specs: Tree
    ) -> Callable[..., Tree]:
        """Wraps `function` by `jax.shard_map` over the mesh axes of batch rows, heads and positions."""
        used = {*self.b, *self.n}
        used |= {self.axes.context} if self.axes.context else set()
        mapped: Callable[..., Tree] = jax.shard_map(
            function,
            mesh=self.axes.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=used,
            check_vma=False,
        )
        return mapped


def split(B: int, N: int, K: int) -> Split | None:
    """The sharding of B, N and K by `sharding.use`: of each size that its devices divide, and of K
    only if N is sharded. None: no mesh is in use."""
    axes = sharding.current()
    if axes is None:
        return None
    b, n, k = (
        names if names and size and size % axes.size(names) == 0 else ()
        for names, size in ((axes.batch, B), (axes.heads, N), (axes.heads, K))
    )
    return Split(axes, b, n, k if n else (), B, N)


def project(
    run: Callable[[Sequence[Projection], Sequence[jax.Array], Others], list[jax.Array]],
    projections: Projections,
    inputs: Inputs,
    others: Others,
) -> list[jax.Array]:
    """Computes `run(projections, inputs, others)`, the query, key and value heads `B T N H` of the
    inputs `B T D`, on each device for its own heads.

    The mesh axes of heads split neither `inputs` nor the pytree `others`. The gradient of an input
    is summed over its sharded projections first and then over devices, so that one all-reduce serves
    them all.
    """
    N, K = (x.kernel.shape[1] for x in projections[:2])
    found = split(0, N, K)
    if found is None or not found.n:
        return run(projections, inputs, others)
    used = found.n, found.k, found.k
    weights = tuple(
        jax.tree.map(lambda x, names=names: sharding.spec(*[None] * (x.ndim - 2), names), one)
        for one, names in zip(projections, used, strict=True)
    )
    first = [[x is y for y in inputs].index(True) for x in inputs]

    def local(projections: Projections, inputs: Inputs, others: Others) -> list[jax.Array]:
        varying = [jax.lax.pcast(x, found.n, to="varying") for x in inputs]
        own = [(varying if names else inputs)[i] for i, names in zip(first, used, strict=True)]
        return run(projections, own, others)

    heads: list[jax.Array] = jax.shard_map(
        local,
        mesh=found.axes.mesh,
        in_specs=(weights, sharding.spec(), sharding.spec()),
        out_specs=[
            sharding.spec(*[None] * (x.ndim - 1), names)
            for x, names in zip(inputs, used, strict=True)
        ],
        axis_names=set(found.n),
    )(projections, inputs, others)
    return heads


def attend(request: Request, run: Callable[[Request], Result]) -> Result:
    """Applies `run` to each device's own batch rows and heads of the request; to the whole request
    if no mesh axis shards them or sizes are symbolic."""
    (B, T, N, _), K = request.query.shape, request.key.shape[2]
    if not all(isinstance(size, int) for size in (B, N, K)):
        return run(request)
    found = split(B, N, K)
    if found is None or not (found.b or found.n):
        return run(request)
    local_split = found._replace(axes=Axes(found.axes.mesh, found.b, found.n))
    conditions, tree = jax.tree.flatten(request.mask)
    conditions = [jnp.asarray(x) for x in conditions]
    heads = (request.query, request.key, request.value)
    functions = [
        None if mod is None else mod._replace(blocks=None)
        for mod in (request.score_mod, request.mask_mod)
    ]
    in_specs, out_specs = _specs(local_split, request, conditions, functions)

    def local(
        query: Float[jax.Array, "B T N H"],
        key: Float[jax.Array, "B S K H"],
        value: Float[jax.Array, "B S K h"],
        bias: Float[jax.Array, "b n t s"] | None,
        mask: list[jax.Array],
        dropout_key: PRNGKeyArray | None,
        functions: list[Mod | None],
    ) -> Result:
        score_mod, mask_mod = (local_split.own_part(mod) for mod in functions)
        part = None
        if dropout_key is not None:
            part = Part(*local_split.starts(), N, T)
        found = run(
            request._replace(
                query=query,
                key=local_split.own_heads(key, 2),
                value=local_split.own_heads(value, 2),
                bias=bias,
                mask=jax.tree.unflatten(tree, mask),
                dropout_key=dropout_key,
                part=part,
                score_mod=score_mod,
                mask_mod=mask_mod,
            )
        )
        return found if request.return_lse else found._replace(lse=None)

    arrays = (*heads, request.bias, conditions, request.dropout_key, functions)
    result: Result = local_split.run(local, in_specs, out_specs)(*arrays)
    return result


def _specs(
    local_split: Split, request: Request, conditions: list[jax.Array], functions: list[Mod | None]
) -> tuple[Any, Any]:
    """The `in_specs` and `out_specs` of attention by `shard_map`. `conditions`: the arrays of the
    mask; `functions`: the score and mask functions."""
    # Axes by rank: 1: lengths and offsets; 2: padding and segment ids; 4: the dense mask.
    letters = {1: "b", 2: "b?", 4: "bnts"}
    heads = zip((request.query, request.key, request.value), "nkk", strict=True)
    in_specs = (
        *(local_split.spec(x.shape, f"b?{n}?") for x, n in heads),
        None if request.bias is None else local_split.spec(request.bias.shape, "bnts"),
        [local_split.spec(x.shape, letters[x.ndim]) for x in conditions],
        sharding.spec(),
        [local_split.mod_specs(mod) for mod in functions],
    )
    rows = sharding.spec(local_split.b, local_split.n)
    out_specs = Result(
        sharding.spec(local_split.b, None, local_split.n),  # type: ignore[arg-type]
        rows if request.return_weights else None,  # type: ignore[arg-type]
        rows if request.return_lse else None,  # type: ignore[arg-type]
    )
    return in_specs, out_specs
