"""Compares a filled model with its source: arrays bit by bit, and outputs where both models run."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray as Array

from jaxmha.checkpoint import errors
from jaxmha.converters.layout.arrays import NDArray, is_float, narrower
from jaxmha.converters.matching import (
    distances,
    lines,
    loading,
    model_inputs,
    nans,
    outputs,
    running,
    stored,
)
from jaxmha.converters.matching.layers import is_buffer
from jaxmha.converters.matching.plan import Line, MatchPlan, Packing
from jaxmha.converters.matching.proof import Departure, Proof
from jaxmha.converters.matching.trees import Tree

# Tolerances of the difference of outputs, relative to the largest output. WIDE is for models whose
# layers return float64: they may still compute a part, such as a softmax, in float32.
WIDE = 1e-6
NARROW = 1e-5  # if an output of the model or of a layer is float32 or narrower
_ADDED = {"bias", "beta", "b", "offset"}  # last parts of the names of biases
_LOADED = "\nIf the model was filled by a plan, pass the same: prove(source, model, plan)."


def prove(
    source: Any,
    model: Any,
    plan: MatchPlan | None,
    inputs: model_inputs.Draw | None,
    packing: Packing,
    seed: int,
    unused: str,
    missing: str,
) -> Proof:
    """Implements `jaxmha.converters.matching.prove`, with the same arguments but no defaults."""
    loading.check_policy("unused", unused)
    loading.check_policy("missing", missing)
    if inputs is not None:
        model_inputs.check(inputs, {"source": source, "model": model})
    mine, theirs = stored.read(source, model, "model")
    try:
        hint = _LOADED * (plan is None)
        plan = lines.plan(mine, theirs, packing) if plan is None else plan
        loading.refuse_questions(plan, theirs, missing, hint)
        jobs, notes = loading.checked_jobs(plan, mine, theirs)
        notes = (*lines.notes_of(mine, theirs), *notes)
        proof = replace(_arrays(mine, theirs, jobs), notes=notes)
        gates = [] if inputs is None else _closed(mine, jobs)
    finally:
        mine.close()
    if unused == "keep":
        proof = replace(proof, unused=())
    if missing == "keep":
        proof = replace(proof, missing=())
    if inputs is None:
        return proof
    for_source, for_target = model_inputs.draw(inputs, seed)
    ours = model_inputs.run(source, "source", for_source)
    other = model_inputs.run(model, "model", for_target)
    runs = {"source": ours, "model": other}
    dtype, narrow = _narrowest(runs)
    tolerance = WIDE if narrow is None else NARROW
    found = outputs.compare(ours.outputs, other.outputs, for_source, for_target, tolerance)
    remarks = [
        f"the {which} ran in float32, because it raises in float64: {errors.shown(str(run.refused))}"
        for which, run in runs.items()
        if run.refused is not None
    ]
    remarks += found.notes
    remarks += nans.notes(ours, other, found.places, (for_source, for_target))
    remarks += _hiding(mine, jobs, ours, gates)
    proof = replace(proof, tolerance=tolerance, dtype=dtype.name, narrow=narrow)
    proof = replace(proof, notes=(*proof.notes, *remarks))
    return _outputs(proof, ours, other, _paired(mine, theirs, jobs, ours, other), found)


def _arrays(source: Tree, target: Tree, jobs: Mapping[str, tuple[Line, list[str]]]) -> Proof:
    """Compares every target array with its value computed from the source by the plan."""
    equal, different, rounded = 0, list[str](), list[str]()
    seen: dict[str, Array[np.bool_]] = {}
    for name, (line, names) in jobs.items():
        wanted = loading.value(line, names, source, target.arrays[name])
        found = target.load(name)
        if _same(found, wanted):
            equal += 1
        elif found.dtype != wanted.dtype and _same(found, wanted.astype(found.dtype)):
            rounded.append(name)
        else:
            different.append(name)
        _mark(seen, line, names, source, target, name)
    used = {n for _, names in jobs.values() for n in names}
    unused = [n for n, a in source.arrays.items() if n not in used and not is_buffer(a)]
    unused += [f"{n}: a part of it" for n, marks in seen.items() if not marks.all()]
    lacking = (n for n, a in target.arrays.items() if n not in jobs and not is_buffer(a))
    return Proof(equal, tuple(different), tuple(rounded), tuple(unused), tuple(lacking))


def _same(found: NDArray, wanted: NDArray) -> bool:
    """True if shapes and bits are equal, or, for different dtypes, shapes and values."""
    if found.shape != wanted.shape:
        return False
    if found.dtype == wanted.dtype:
        return found.tobytes() == np.ascontiguousarray(wanted).tobytes()
    wide = np.result_type(found.dtype, wanted.dtype)
    return bool(np.array_equal(found.astype(wide), wanted.astype(wide), equal_nan=True))


def _mark(
    seen: dict[str, Array[np.bool_]],
    line: Line,
    names: Sequence[str],
    source: Tree,
    target: Tree,
    name: str,
) -> None:
    """Marks, in `seen`, the elements of packed source arrays that the target array `name` takes."""
    if not line.take:
        return
    sizes = {n: int(np.prod(source.arrays[n].shape)) for n in names}
    starts = dict(zip(names, np.cumsum([0, *sizes.values()]), strict=False))
    numbers = replace(
        source,
        load=lambda n: np.arange(starts[n], starts[n] + sizes[n]).reshape(source.arrays[n].shape),
    )
    taken = loading.value(line, names, numbers, target.arrays[name]).reshape(-1)
    for one in names:
        marks = seen.setdefault(one, np.zeros(sizes[one], bool))
        within = taken[(taken >= starts[one]) & (taken < starts[one] + sizes[one])]
        marks[within - starts[one]] = True


Path = tuple[str, ...]


def _paired(
    source: Tree,
    target: Tree,
    jobs: Mapping[str, tuple[Line, list[str]]],
    mine: running.Run,
    theirs: running.Run,
) -> dict[Path, Path]:
    """Maps layers of the source to layers of the target that the plan fills from their arrays.

    Among nested layers with the same arrays only the innermost are paired, because an outer layer
    may add an activation that the other model computes elsewhere.
    """
    fills: dict[str, set[str]] = defaultdict(set)
    for name, (_, names) in jobs.items():
        for one in names:
            fills[one].add(name)

    def below(tree: Tree, run: running.Run) -> dict[Path, set[str]]:
        found: dict[Path, set[str]] = defaultdict(set)
        for name, array in tree.arrays.items():
            for n in range(len(array.path)):
                if array.path[:n] in run.layers:
                    found[array.path[:n]].add(name)
        return found

    ours: dict[frozenset[str], list[Path]] = defaultdict(list)
    for path, inside in below(source, mine).items():
        ours[frozenset().union(*(fills[n] for n in inside))].append(path)
    others: dict[frozenset[str], list[Path]] = defaultdict(list)
    for path, inside in below(target, theirs).items():
        others[frozenset(inside & jobs.keys())].append(path)
    return {
        max(paths, key=len): max(others[filled], key=len)
        for filled, paths in ours.items()
        if filled in others
    }


def _closed(source: Tree, jobs: Mapping[str, tuple[Line, list[str]]]) -> list[str]:
    """Returns the names of single numbers that are 0 and no bias: gates of branches, as in ReZero."""
    used = (source.arrays[name] for name in _used(source, jobs))
    single = [a for a in used if a.shape in ((), (1,))]
    gates = [a.name for a in single if not is_buffer(a) and a.path[-1] not in _ADDED]
    return [name for name in gates if not source.load(name).any()]


def _hiding(
    source: Tree,
    jobs: Mapping[str, tuple[Line, list[str]]],
    run: running.Run,
    gates: Sequence[str],
) -> Iterator[str]:
    """Yields a note on gates, and layers of the source that return only zeros: they hide other layers."""
    owners = dict.fromkeys(source.arrays[name].path[:-1] for name in _used(source, jobs))
    found = {path: run.layers.get(path) for path in owners if path}
    layers = [".".join(path) for path, x in found.items() if x is not None and not x.any()]
    if zeros := [*layers, *gates]:
        more = f" and {len(zeros) - 1} more" * (len(zeros) > 1)
        yield (
            f"{zeros[0]}{more} of the source and the model give only zeros, as where a branch was never "
            f"trained: a difference in the layers before would be hidden: {outputs.REMEDY}"
        )


def _used(source: Tree, jobs: Mapping[str, tuple[Line, list[str]]]) -> list[str]:
    """Returns the names of the arrays of the source that fill the model."""
    names = dict.fromkeys(n for _, names in jobs.values() for n in names)
    return [name for name in names if name in source.arrays]


def _outputs(
    proof: Proof,
    mine: running.Run,
    theirs: running.Run,
    pairs: Mapping[Path, Path],
    found: outputs.Compared,
) -> Proof:
    whole = max(pair.difference for pair in found.pairs)
    departure, compared = None, 0
    for path, output in mine.layers.items():
        other = theirs.layers.get(pairs.get(path, ("?",)))
        # NaN in both would hide the layer in which they begin to differ.
        orders = [] if other is None else distances.distances(output, other, equal_nan=True)
        if not orders:
            continue
        compared += 1
        distance = min(order.difference for order in orders)
        # For the model itself (empty path), `output` is only its first array, which may be a mask.
        # So it is a departure only if the difference of all outputs, `whole`, is too large as well.
        decides = path or whole > proof.tolerance
        if departure is None and distance > proof.tolerance and decides:
            departure = Departure(".".join(path), "/".join(pairs[path]), distance)
    return replace(
        proof,
        difference=whole,
        outputs=found.pairs,
        left=found.left,
        departure=departure,
        compared=compared,
    )


def _narrowest(runs: Mapping[str, running.Run]) -> tuple[np.dtype[Any], str | None]:
    """Returns the narrowest floating dtype in the runs, and the first layer that returned it.

    The layer is None for float64.
    """
    found, first = np.dtype(np.float64), None
    for which, run in runs.items():
        layers = [(f"{'.'.join(path)} of the {which}", x) for path, x in run.layers.items()]
        for name, array in (*layers, *((f"the {which}", x) for x in run.outputs.values())):
            dtype = array.real.dtype  # for a complex array: the dtype of its real part
            if is_float(dtype) and narrower(found, dtype) != found:
                found, first = dtype, name.removeprefix(" of ")
    return found, first
