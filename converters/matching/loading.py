"""Fills a model by a plan, one array at a time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from einops import EinopsError, rearrange

from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.matching import lines, sides
from jaxmha.converters.matching.plan import Line, Plan
from jaxmha.converters.matching.sides import Array, Side
from jaxmha.dims import bind, parse

_SHOWN = 5
POLICIES = ("refuse", "keep")


def filled(
    model: Any,
    source: Any,
    plan: Plan | None,
    *,
    dtype: str | None = None,
    unused: str = "refuse",
    missing: str = "refuse",
) -> Iterator[tuple[str, NDArray]]:
    """Name and value of every array of a model, in the dtype that it shall have.

    Args:
      model, source: as in `match`. plan: None makes it.
      dtype: of every floating array; None takes the model's, if that holds every value.
      unused: "keep" leaves out source arrays that the plan does not use; "refuse" raises.
      missing: "keep" leaves arrays of the model as they are if the plan has no line for them.

    Raises:
      ValueError: a question is open, arrays are unused or missing, or a shape or dtype does not fit.
    """
    for name, value in (("unused", unused), ("missing", missing)):
        if value not in POLICIES:
            raise ValueError(f"{name} must be {' or '.join(POLICIES)}, got {value!r}")
    mine = sides.read(source)
    try:
        theirs = sides.read(model)
        own = lines.plan(mine, theirs) if plan is None else plan
        _refuse_questions(own)
        jobs = dict(_jobs(own, mine, theirs))
        _refuse_rest(own, mine, theirs, jobs, unused, missing)
        arrays = theirs.arrays
        del theirs  # it holds the values that are replaced
        for name, (line, names) in jobs.items():
            array = arrays[name]
            yield name, _cast(_value(line, names, mine, array), array, dtype)
    finally:
        mine.close()


def _refuse_questions(plan: Plan) -> None:
    if plan.questions:
        first = plan.questions[0]
        more = f" (and {len(plan.questions) - 1} more)" * (len(plan.questions) > 1)
        raise ValueError(
            f"the plan has an open question{more}: {first.target}: {first.reason}; candidates: "
            f"{', '.join(first.candidates) or 'none'}. Add to the plan:\n{first.line}"
        )


def _jobs(plan: Plan, source: Side, target: Side) -> Iterator[tuple[str, tuple[Line, list[str]]]]:
    """Target name -> its line, and the names of its source arrays in the order of stacking."""
    for line in plan.lines:
        targets = lines.expand(line.target, target.arrays)
        if not targets:
            raise ValueError(f"the plan fills {line.target}, and the model has no such array")
        found = [lines.expand(_real(one, source), source.arrays) for one in line.sources]
        for one, several in zip(line.sources, found, strict=True):
            if not several:
                raise ValueError(f"the plan reads {one}, and the source has no such array")
        places = _ranks(targets)
        for name, place in places.items():
            names = []
            for several in found:
                ranks = _ranks(several)
                names += [
                    n for n, r in ranks.items() if all(r.get(x, v) == v for x, v in place.items())
                ]
                if {r[x] for r in ranks.values() for x in place if x in r} != {
                    r[x]
                    for r in places.values()
                    for x in place
                    if any(x in o for o in ranks.values())
                }:
                    raise ValueError(
                        f"{line.target} stands for {len(places)} arrays, and {line.sources[0]} for "
                        f"{len(ranks)}: the source has another number of layers"
                    )
            take = line.take
            for letter, rank in place.items():
                take = take.replace(f"{{{letter}}}", str(rank))
            yield name, (replace(line, take=take), names)


def _real(name: str, source: Side) -> str:
    """The name under which a tied array is kept."""
    return source.aliases.get(name, name)


def _ranks(found: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """The rank of every number among those of its letter."""
    letters = {x for numbers in found.values() for x in numbers}
    order = {x: sorted({numbers[x] for numbers in found.values()}) for x in letters}
    return {
        name: {x: order[x].index(n) for x, n in numbers.items()} for name, numbers in found.items()
    }


def _refuse_rest(
    plan: Plan, source: Side, target: Side, jobs: Mapping[str, Any], unused: str, missing: str
) -> None:
    """Raises ValueError if arrays of either side are in no line."""
    used = {name for _, names in jobs.values() for name in names}
    left = [n for n, a in source.arrays.items() if n not in used and not lines.is_buffer(a)]
    lacking = [n for n, a in target.arrays.items() if n not in jobs and not lines.is_buffer(a)]
    if left and unused == "refuse":
        raise ValueError(
            f"the model has no place for {_listed(left)}; unused='keep' leaves them out"
        )
    if lacking and missing == "refuse":
        raise ValueError(
            f"the plan has nothing for {_listed(lacking)}; missing='keep' leaves them as they are"
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
    return ", ".join(names[:_SHOWN]) + more


def _value(line: Line, names: Sequence[str], source: Side, target: Array) -> NDArray:
    """One array of the target, from the arrays that the line names."""
    if line.fill:
        return np.zeros(target.shape, np.float32)
    shown = f"{target.name} <- {', '.join(names)}"
    arrays = [source.load(name) for name in names]
    if not line.arrow:
        made = arrays[0]
    else:
        try:
            made = _rearranged(line, arrays, target.shape)
        except (ValueError, EinopsError) as error:
            raise ValueError(f"{shown}: {str(error).splitlines()[0]}") from error
    if made.shape != target.shape:
        raise ValueError(
            f"{shown}: expected shape {target.shape}, got {made.shape} by {line.arrow or 'a copy'}"
        )
    return made


def _rearranged(line: Line, arrays: Sequence[NDArray], shape: tuple[int, ...]) -> NDArray:
    here, arrow, there = (x.strip() for x in line.arrow.partition("->"))
    if not arrow:
        raise ValueError(f"expected axes on both sides of ->, got {line.arrow!r}")
    index, parts = (int(x) for x in (line.take or "0/0").split("/"))
    whole = (parts, *shape) if parts else shape
    sizes = {parse(there)[0][0]: parts} if parts else {}
    lead = len(parse(here)) - arrays[0].ndim if len(arrays) > 1 else 0
    for axes, known in ((parse(here)[lead:], arrays[0].shape), (parse(there), whole)):
        if len(axes) == len(known):
            alone = {g[0]: n for g, n in zip(axes, known, strict=True) if len(g) == 1}
            sizes |= {x: n for x, n in alone.items() if not x.isdigit()}
    bind("the target", whole, there, sizes)
    array = arrays[0]
    if len(arrays) > 1:
        left = len(arrays) // int(np.prod([sizes.get(g[0], 1) for g in parse(here)[:lead]]))
        stacked = [sizes.get(group[0], left) for group in parse(here)[:lead]]
        array = np.stack(arrays).reshape(*stacked, *arrays[0].shape)
    bind("the source", array.shape, here, sizes)
    letters = {x for axes in (here, there) for group in parse(axes) for x in group}
    made: NDArray = rearrange(array, line.arrow, **{x: n for x, n in sizes.items() if x in letters})
    return made[index] if parts else made


def _cast(array: NDArray, target: Array, dtype: str | None) -> NDArray:
    """The array in the dtype asked for, or in the target's if that holds every value."""
    import ml_dtypes

    wanted = dtype or target.dtype
    if "float" not in str(array.dtype) or "float" not in wanted:
        wanted = str(array.dtype) if dtype else wanted
    kind = np.dtype(getattr(ml_dtypes, wanted, None) or wanted)
    if array.dtype == kind:
        return array
    made = array.astype(kind)
    if dtype is None and not np.array_equal(
        made.astype(array.dtype), array, equal_nan="float" in wanted
    ):
        raise ValueError(
            f"{target.name}: {array.dtype} values do not all fit {wanted}, the dtype of the model: "
            f"pass dtype={wanted!r} to round them"
        )
    return made


def into_nnx(model: Any, values: Iterator[tuple[str, NDArray]]) -> Any:
    """Updates an nnx module in place, each array on the devices of the one before it."""
    from flax import nnx

    there = {"/".join(map(str, p)): (p, v) for p, v in nnx.to_flat_state(nnx.state(model))}
    for name, value in values:
        path, variable = there.pop(name)
        placed = _placed(value, variable.get_value())
        nnx.update(model, nnx.from_flat_state([(path, variable.replace(placed))]))
    return model


def into_tree(tree: Any, values: Iterator[tuple[str, NDArray]]) -> Any:
    """A tree of the same structure with the new arrays."""
    import jax

    leaves, structure = jax.tree_util.tree_flatten(tree)
    numbers = [n for n, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")]
    names = ["/".join(keys) for keys, _ in sides.tree_leaves(tree)]
    place = dict(zip(names, numbers, strict=True))
    for name, value in values:
        leaves[place[name]] = _placed(value, leaves[place[name]])
    return jax.tree_util.tree_unflatten(structure, leaves)


def _placed(value: NDArray, before: Any) -> Any:
    """A JAX array with the sharding of the leaf that it replaces, if that has one."""
    import jax
    import jax.numpy as jnp

    sharding = getattr(before, "sharding", None)
    made = jax.device_put(value, sharding) if sharding is not None else jnp.asarray(value)
    if made.dtype != value.dtype:
        raise ValueError(
            f"JAX would keep {value.dtype} as {made.dtype}: call jax.config.update('jax_enable_x64', True)"
        )
    return made


def into_keras(model: Any, values: Iterator[tuple[str, NDArray]]) -> Any:
    """Assigns the variables of a Keras model."""
    there = {f"{path}/{v.name}".removeprefix("/"): v for path, _, v in sides.keras_variables(model)}
    for name, value in values:
        there[name].assign(value)
    return model


def into_torch(model: Any, values: Iterator[tuple[str, NDArray]]) -> Any:
    """Copies into the parameters and buffers of a torch module; other dtypes replace them."""
    import torch

    from jaxmha.converters.layout.arrays import to_torch

    state = model.state_dict()
    with torch.no_grad():
        for name, value in values:
            tensor = to_torch(value)
            if tensor.dtype != state[name].dtype:
                raise ValueError(
                    f"{name} is {state[name].dtype} in the module: convert the module with .to(...) first"
                )
            state[name].copy_(tensor)
    return model
