"""Functions of batch rows and heads that XLA's partitioner splits over devices along these axes.

A loop over tiles of heads is opaque to the partitioner, which would gather the operands on every
device. Here each device runs the function on its own rows and heads instead. `shard_map` cannot
express this: the sharding of operands is known only when the program is compiled.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from string import ascii_uppercase
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmha import sharding
from jaxmha.implementations import key_heads, platforms

Tree = TypeVar("Tree")
# A letter per axis: b (batch rows), n (query heads), k (key/value heads), a dot (another axis), or
# an upper-case letter (a mapped axis, which `vmap` has added).
Letters: TypeAlias = str
Function: TypeAlias = Callable[..., list[jax.Array]]


class Placement(NamedTuple):
    """The sharding of batch rows, heads and mapped axes.

    Attributes:
      mesh: the mesh of the program.
      sizes: letter of `Letters` -> size over all devices: B, N, K or that of a mapped axis.
      names: letter -> the mesh axes that shard it; empty: replicated.
    """

    mesh: Mesh
    sizes: dict[str, int]
    names: dict[str, tuple[str, ...]]

    def devices(self, letter: str) -> int:
        return _devices(self.mesh, self.names[letter])


def may_partition() -> bool:
    """True if XLA's partitioner may split a program that is traced here: for several devices or
    another machine, and neither inside `sharding.use`, unless all axes that it names are manual
    already, nor inside a `shard_map` over all mesh axes.

    On a mesh of explicit axes alone, types say what is sharded, so that nothing is left to the
    partitioner. JAX also refuses an eager gradient with `custom_partitioning` there.
    """
    if sharding.current() is not None or (jax.device_count() == 1 and platforms.current().present):
        return False
    axes = sharding.AXES.value
    if axes is not None and {*axes.mesh.axis_types} == {AxisType.Explicit}:
        return False
    return {*jax.sharding.get_abstract_mesh().axis_types} != {AxisType.Manual}


def run(
    function: Callable[..., Tree],
    operands: tuple[Any, ...],
    letters: tuple[Any, ...],
    results: Callable[[Tree], Any],
) -> Tree:
    """`function(*operands)`; where XLA's partitioner splits rows or heads, each device runs its own.

    Args:
      function: takes operands of any B, N and K, where K divides N. It uses no collectives, and
        closes over no traced arrays.
      operands: pytrees of arrays.
      letters: `Letters` of each operand, such as "b.n.", in the same structure.
      results: maps the shapes of the results to the `Letters` of each, in the same structure. A
        result with size 1 on an axis `b`, `n` or `k` is summed over the devices that split it.
    """
    if not may_partition():
        return function(*operands)
    from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

    flat, tree = jax.tree.flatten(operands)
    of_operands: Any = tree
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*operands)
    structure: Any = jax.tree.structure(shapes)
    # `custom_partitioning` takes no constants, so they become operands.
    constants = [jnp.asarray(x) for x in closed.consts]

    def whole(*operands: object) -> list[jax.Array]:
        given, constants = operands[: len(flat)], operands[len(flat) :]
        found: list[jax.Array] = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, constants))(*given)
        return found

    def local(*operands: object) -> list[jax.Array]:
        return jax.tree.leaves(function(*jax.tree.unflatten(tree, operands[: len(flat)])))

    found = _primitive().bind(
        *flat,
        *constants,
        whole=whole,
        types=tuple(closed.out_avals),
        local=local,
        letters=(*of_operands.flatten_up_to(letters), *("." * x.ndim for x in constants)),
        results=tuple(structure.flatten_up_to(results(shapes))),
    )
    done: Tree = jax.tree.unflatten(structure, found)
    return done


@cache
def _primitive() -> Any:
    from jax._src import dispatch
    from jax.extend.core import Primitive  # also imports Pallas, which few programs need

    primitive: Any = Primitive("jaxmha_by_device")
    primitive.multiple_results = True

    def plain(*operands: object, whole: Function, **_: object) -> list[jax.Array]:
        return whole(*operands)

    def lower(context: Any, *operands: Any, **static: Any) -> Any:
        alone = context.module_context.lowering_parameters.for_export
        chosen: Any = plain if alone else _partitioned
        lowered: Any = mlir.lower_fun(chosen, multiple_results=True)
        return lowered(context, *operands, **static)

    def batched(
        operands: Sequence[object], axes: Sequence[int | None], **static: Any
    ) -> tuple[list[jax.Array], list[int]]:
        """Binds the primitive with functions mapped by `vmap`. The mapped axis gets a letter of its
        own in operands that have it, and is the first axis of every result."""
        whole, local = (jax.vmap(static[name], tuple(axes)) for name in ("whole", "local"))
        mapped = next(x for x in ascii_uppercase if not any(x in y for y in static["results"]))
        letters = [
            given if axis is None else given[:axis] + mapped + given[axis:]
            for given, axis in zip(static["letters"], axes, strict=True)
        ]
        found = primitive.bind(
            *operands,
            whole=whole,
            types=tuple(jax.make_jaxpr(whole)(*operands).out_avals),
            local=local,
            letters=tuple(letters),
            results=tuple(mapped + given for given in static["results"]),
        )
        return found, [0] * len(found)

    def differentiated(
        primals: Sequence[jax.Array | np.ndarray],
        tangents: Sequence[object],
        *,
        whole: Function,
        **_: object,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        moving = tuple(map(_instantiated, primals, tangents))
        return jax.jvp(whole, tuple(primals), moving)

    primitive.def_impl(plain)
    primitive.def_abstract_eval(lambda *_, types, **__: types)
    mlir.register_lowering(primitive, lower)
    batching.primitive_batchers[primitive] = batched
    ad.primitive_jvps[primitive] = differentiated
    dispatch.prim_requires_devices_during_lowering.add(primitive)
    return primitive


def _instantiated(x: jax.Array | np.ndarray, tangent: object) -> object:
    if type(tangent) is not ad.Zero:
        return tangent
    floating = jnp.issubdtype(x.dtype, np.floating)
    return np.zeros(x.shape, x.dtype if floating else jax.dtypes.float0)


def _partitioned(
    *operands: object,
    whole: Function,
    local: Function,
    letters: Sequence[Letters],
    results: Sequence[Letters],
    **_: object,
) -> list[jax.Array]:
    from jax.experimental.custom_partitioning import custom_partitioning

    def shardings(
        placement: Placement, arrays: Sequence[Any], letters: Sequence[Letters]
    ) -> list[NamedSharding]:
        return [
            NamedSharding(placement.mesh, _spec(x.shape, axes, placement.names))
            for x, axes in zip(arrays, letters, strict=True)
        ]

    def partition(
        mesh: Mesh, given: Sequence[Any], shapes: Sequence[Any]
    ) -> tuple[Mesh, Function, list[NamedSharding], tuple[NamedSharding, ...]]:
        placement = _placement(mesh, given, letters)

        def on_device(*operands: jax.Array) -> list[jax.Array]:
            own = [
                _own(placement, x.shape, axes)(x) for x, axes in zip(operands, letters, strict=True)
            ]
            found = local(*own)
            return [
                _summed(placement, x, whole.shape, axes)
                for x, whole, axes in zip(found, shapes, results, strict=True)
            ]

        outside = shardings(placement, shapes, results)
        return mesh, on_device, outside, tuple(shardings(placement, given, letters))

    def infer(mesh: Mesh, given: Sequence[Any], shapes: Sequence[Any]) -> list[NamedSharding]:
        return shardings(_placement(mesh, given, letters), shapes, results)

    def opaque(*operands: object) -> list[jax.Array]:
        return whole(*operands)

    make: Any = custom_partitioning
    call = make(opaque)
    rule = partial(_rule, letters, results)
    call.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        decode_shardings=False,  # with True, JAX raises if the partitioner has split a mesh axis
        sharding_rule=rule,
    )
    found: list[jax.Array] = call(*operands)
    return found


def _placement(mesh: Mesh, given: Sequence[Any], letters: Sequence[Letters]) -> Placement:
    """Chooses the mesh axes that shard mapped axes, batch rows (b), query heads (n) and key/value
    heads (k).

    Each letter gets the mesh axes of the first operand that is sharded along it, without those that
    another letter has, or none if their devices do not divide its size. Query heads get the mesh
    axes of key/value heads if no operand shards n, and key/value heads get those of query heads.
    """
    sizes = _sizes(given, letters)
    found: dict[str, tuple[str, ...]] = dict.fromkeys(sizes, ())
    for x, axes in zip(given, letters, strict=True):
        for letter, names in zip(axes, _spec_of(x.sharding, mesh), strict=False):
            if letter in found and not found[letter]:
                found[letter] = sharding.names_of(names)

    def divides(names: tuple[str, ...], letter: str) -> bool:
        return sizes[letter] % _devices(mesh, names) == 0

    taken: list[str] = []

    def free(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name not in taken)

    used: dict[str, tuple[str, ...]] = {}
    for letter in sorted(sizes.keys() - {"n", "k"}):
        names = free(found[letter])
        used[letter] = names if divides(names, letter) else ()
        taken += used[letter]
    heads = free(found["n"] or found["k"])
    heads = heads if divides(heads, "n") else ()
    used |= {"n": heads, "k": heads if divides(heads, "k") else ()}
    return Placement(mesh, sizes, used)


def _devices(mesh: Mesh, names: tuple[str, ...]) -> int:
    return math.prod(int(mesh.shape[name]) for name in names)


def _own(
    placement: Placement, shape: Sequence[int], axes: Letters
) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that selects the key/value heads that this device's query heads read, from
    an operand with all key/value heads, as where only query heads are sharded. It returns other
    operands unchanged. `shape`: of the operand, `axes`: its letters."""
    _, sizes, names = placement
    axis = axes.find("k")
    if axis < 0 or shape[axis] == 1 or names["k"] == names["n"]:
        return lambda x: x
    some = sizes["n"] // placement.devices("n")
    first = jax.lax.axis_index(names["n"]) * some
    return lambda x: key_heads.of_query_heads(x, axis, first, some, sizes["n"])


def _spec_of(placed: Any, mesh: Mesh) -> tuple[Any, ...]:
    """The mesh axes of each axis of an array with the sharding `placed`; () if mesh axes cannot
    express it, as where the partitioner has split one."""
    from jax._src.sharding_impls import parse_flatten_op_sharding

    try:
        return tuple(parse_flatten_op_sharding(placed._to_xla_hlo_sharding(1), mesh)[0])
    except (KeyError, ValueError, NotImplementedError):
        return ()


def _sizes(arrays: Sequence[Any], letters: Sequence[Letters]) -> dict[str, int]:
    """Letter -> B, N, K or the size of a mapped axis: the largest of all arrays, since some may have
    size 1 there."""
    found = {"b": 1, "n": 1, "k": 1}
    for x, axes in zip(arrays, letters, strict=True):
        for size, letter in zip(x.shape, axes, strict=True):
            if letter != ".":
                found[letter] = max(size, found.get(letter, 1))
    return found


def _spec(shape: Sequence[int], axes: Letters, names: dict[str, Any]) -> PartitionSpec:
    return sharding.spec(
        *(names.get(axis) if size > 1 else None for size, axis in zip(shape, axes, strict=True))
    )


def _summed(placement: Placement, x: jax.Array, whole: Sequence[int], axes: Letters) -> jax.Array:
    """Sums a result `x` of one device over the devices that share it: along axes on which it has
    size 1, and for key/value heads that query heads of several devices read. `whole`: the shape of
    the result over all devices, `axes`: its letters."""
    names = placement.names | {"k": placement.names["n"]}
    over = {
        letter: names.get(letter, ()) for size, letter in zip(whole, axes, strict=True) if size == 1
    }
    axis = axes.find("k")
    if axis >= 0 and whole[axis] > 1 and not placement.names["k"]:
        every = jnp.zeros((*x.shape[:axis], whole[axis], *x.shape[axis + 1 :]), x.dtype)
        (x,) = jax.linear_transpose(_own(placement, whole, axes), every)(x)
        over["k"] = names["n"]
    joined = tuple(name for several in over.values() for name in several)
    psum: Any = jax.lax.psum
    return psum(x, joined) if joined else x


def _rule(
    letters: Sequence[Letters],
    results: Sequence[Letters],
    mesh: Mesh,
    given: Sequence[Any],
    shapes: Sequence[Any],
) -> tuple[str, dict[str, int]]:
    """Returns Shardy's sharding rule and the sizes of its factors.

    Equal factors are sharded alike. If query heads of several devices may read one key/value head,
    n and k share no factor.
    """
    sizes = _sizes([*given, *shapes], [*letters, *results])
    group = sizes["n"] // sizes["k"]
    shared = sizes["k"] % math.prod(mesh.shape.values()) != 0
    number = iter(range(10**6))

    def axis(letter: str, size: int) -> str:
        if letter == "." or size == 1:
            return f"o{next(number)}"
        if letter == "n":
            return "k" if group == 1 else "g" if shared else "(k g)"
        return letter

    def side(arrays: Sequence[Any], letters: Sequence[Letters]) -> str:
        return ", ".join(
            " ".join(axis(letter, size) for letter, size in zip(axes, x.shape, strict=True))
            for x, axes in zip(arrays, letters, strict=True)
        )

    rule = f"{side(given, letters)} -> {side(shapes, results)}"
    return rule, {"g": group} if "(k g)" in rule else {}
