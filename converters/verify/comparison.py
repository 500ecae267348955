"""Compares two sources of attention: weights bit by bit, and outputs against float64.

Outputs alone do not show every difference (a key bias cancels in the softmax), and equal weights
do not prove that a layer applies its mask. `compare` therefore always compares both.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxmha import MHAParams
from jaxmha.checkpoint import CheckpointError
from jaxmha.converters.discovery import layer_semantics
from jaxmha.converters.layout import fold
from jaxmha.converters.layout.arrays import to_numpy
from jaxmha.converters.verify import (
    comparands,
    diagnosis,
    forward_check,
    keras_pairs,
    model_facts,
    oracle,
    other_tensors,
)
from jaxmha.converters.verify.comparands import AnySource, ComparedBlock
from jaxmha.converters.verify.comparison_report import BlockReport, Report
from jaxmha.converters.verify.weights import differences_of
from jaxmha.params import check, leaves
from jaxmha.semantics import logit_scale

# Two errors count as similar up to this ratio; exported for readers of reports.
RATIO = forward_check.RATIO
FOLDED = "the scale is folded into the query"  # the start of an explanation
_NO_ATTENTION = (
    "no attention block was found in {}: tensors were compared by name, and no output was computed "
    "(`jaxmha match` pairs tensors of other names)"
)
_FOLDED_NOTE = (
    f"in every block that differs, {FOLDED}, as `jaxmha convert --fold-scale` does: bits and scale "
    "differ, and the outputs are those of the other source"
)


def compare(
    a: AnySource,
    b: AnySource,
    *,
    num_heads: int | None = None,
    seed: int = 0,
    dtype: str | None = None,
) -> Report:
    """Compares every tensor of two sources: attention blocks, and all tensors outside them.

    A source is a path, a dict of arrays, `MHAParams` (alone or with `Semantics`), a torch,
    keras, flax or equinox layer or model, or a linen pair `(module, variables)`. Layers of jaxmha are
    run like those of flax and equinox, except with `rotate`, as a note says. Blocks are paired by
    name, or by order if names differ and the numbers of blocks agree; other layers by name.
    Tensors of only one source are in `not_compared`, and make the report falsy. If a source has no
    attention block, a note says so. Of two files, the
    positions, masks and norms that their configurations give are compared as well.

    Args:
      a, b: the sources.
      num_heads: head count of sources that do not store it; by default, the count of one source is
        also used for the other.
      seed: seed of the random inputs for the forward comparison.
      dtype: rounds the floating tensors of `a`, such as "bfloat16", before the comparison, as a
        conversion to that dtype does; `a` is no layer object then.

    Raises:
      TypeError, ValueError: a source cannot be read, has no array, or cannot be rounded.

    >>> import torch
    >>> layer = torch.nn.MultiheadAttention(6, 2)
    >>> compare(layer, layer.state_dict()).same
    True
    """
    first_source, second_source = read_both(a, b, num_heads)
    if dtype is not None:
        first_source = comparands.rounded(first_source, dtype)
    pairs, only_a, only_b, notes = pair(first_source.blocks, second_source.blocks)
    reports = tuple(compare_blocks(x, y, seed) for x, y in pairs)
    rest = other_tensors.compare(first_source.source, second_source.source)
    facts = model_facts.compare(first_source.source, second_source.source, pairs)
    notes += (*rest.notes, *dict.fromkeys((*first_source.notes, *second_source.notes)))
    notes += (*facts.notes, *_without_attention(first_source, second_source))
    apart = [block.explanation or "" for block in reports if not block.same]
    if apart and all(why.startswith(FOLDED) for why in apart):
        notes += (_FOLDED_NOTE,)
    unproven = keras_pairs.unproven(first_source.source, second_source.source)
    return Report(
        reports,
        only_a,
        only_b,
        notes,
        rest.differing,
        rest.left,
        unproven,
        facts.differing,
        dtype,
        rest.relations,
        rest.unlike,
    )


def _without_attention(*sources: comparands.Comparand) -> Iterator[str]:
    """Yields a note that names the sources without attention blocks, if there are such."""
    without = [not (one.blocks or one.source.latents) for one in sources]
    names = itertools.compress(("the first", "the second"), without)
    if any(without):
        yield _NO_ATTENTION.format("either source" if all(without) else next(names))


def assert_same(a: AnySource, b: AnySource, *, num_heads: int | None = None, seed: int = 0) -> None:
    """For tests: raises AssertionError with the report unless both sources are the same."""
    report = compare(a, b, num_heads=num_heads, seed=seed)
    if not report:
        raise AssertionError(f"the two sources are not the same\n{report}")


class Departure(NamedTuple):
    """The first stage that differs, in words; `in_output`: False if the outputs are the same."""

    text: str
    in_output: bool = True


def compare_blocks(a: ComparedBlock, b: ComparedBlock, seed: int = 0) -> BlockReport:
    """Compares two blocks: weights, behaviour, forward, and the first stage that differs."""
    differences = tuple(differences_of(a.params, b.params))
    held = ", ".join(dict.fromkeys([*not_finite(a.params), *not_finite(b.params)]))
    behaviour = tuple(_behaviour(a, b))
    dtypes = forward_check.dtype_of(a), forward_check.dtype_of(b)
    x, y = (forward_check.Measured(dtype, {}) for dtype in dtypes)
    counted = [difference for difference in differences if not difference.harmless]
    alike = True
    if (comparable := _sizes(a) == _sizes(b)) and (counted or not held):
        with np.errstate(invalid="ignore"):  # inf - inf is NaN, which is not alike
            x, y = forward_check.measure_both(a, b, seed)
        alike = bool(counted) or forward_check.alike((a, b), (x, y), seed)
    elif comparable:
        # Outputs of NaN show nothing: equal bits decide, unless a layer object has its own code.
        alike = not (a.is_live or b.is_live)
    departs, explanation = None, diagnosis.explain(a.params, b.params)
    if not comparable:
        departs = "shapes"
    elif held:
        same = alike and not counted and not behaviour
        departs = None if same else f"no output can be compared: {held} holds NaN or infinity"
    elif counted or behaviour:
        departure = first_departure(a, b, seed)
        departs = None if departure is None else departure.text
        explanation = explanation or _other_scale(a, b, departure)
    elif not alike:
        departs = "output: the weights agree, so a live layer computes something else"
        readings = (forward_check.explain_forward(block, seed, x.factor) for block in (a, b))
        explanation = next(filter(None, readings), None)
    return BlockReport(
        a.name,
        b.name,
        (a.layout, b.layout),
        check(a.params)["N"],
        (dtypes[0].name, dtypes[1].name),
        (x.dtype.name, y.dtype.name),
        differences,
        behaviour,
        {mask: (error, y.errors[mask]) for mask, error in x.errors.items()},
        departs,
        explanation,
        same=comparable and not counted and not behaviour and alike,
        not_finite=held,
    )


def not_finite(params: MHAParams) -> list[str]:
    """Names of the leaves that contain NaN or infinity."""
    arrays = leaves(params).items()
    return [name for name, leaf in arrays if not np.isfinite(to_numpy(leaf)).all()]


def _behaviour(a: ComparedBlock, b: ComparedBlock) -> Iterator[str]:
    """Describes the fields of the semantics that differ."""
    for name in layer_semantics.differing(a.semantics, b.semantics, (_scale(a), _scale(b))):
        x, y = (getattr(block.semantics, name) for block in (a, b))
        yield f"{name} is {x!r} and {y!r}"


def _scale(block: ComparedBlock) -> float:
    return float(logit_scale(block.semantics, check(block.params)["H"]))


def _other_scale(a: ComparedBlock, b: ComparedBlock, departure: Departure | None) -> str | None:
    """Explains a differing scale: one block lacks 1 / sqrt(H), or has it folded into its query."""
    low, high = sorted((_scale(a), _scale(b)))
    if math.isclose(low, high, rel_tol=1e-12):
        return None
    if departure is not None and not departure.in_output:
        return f"{FOLDED}: outputs are the same"
    if found := folding(a, b):
        return found
    usual = math.isclose(low, check(a.params)["H"] ** -0.5, rel_tol=1e-12)
    return forward_check.MISSING_SCALE if usual and low < high == 1 else None


def folding(a: ComparedBlock, b: ComparedBlock) -> str | None:
    """Says that one block has the scale of the other folded into its query, if nothing else differs."""
    if _sizes(a) != _sizes(b) or math.isclose(_scale(a), _scale(b), rel_tol=1e-12):
        return None
    by = _folded(a, b)
    if by is None:
        return None
    return f"{FOLDED}, times {by:.6g}: outputs are the same but for the rounding of it"


def _folded(a: ComparedBlock, b: ComparedBlock) -> float | None:
    """The factor by which the queries of one block are those of the other, if nothing else differs."""
    alike = replace(a.semantics, scale=None) == replace(b.semantics, scale=None)
    if not alike or not _scale(a) or not _scale(b):
        return None
    by = fold.ratio(a.semantics, b.semantics, check(a.params)["H"])
    for x, y in diagnosis.of_one_dtype(a.params, b.params):
        if fold.is_folded(x, y, by):
            return by
        if fold.is_folded(y, x, 1 / by):
            return 1 / by
    return None


def first_departure(a: ComparedBlock, b: ComparedBlock, seed: int) -> Departure | None:
    """The first stage at which the float64 computations of the two blocks differ.

    Returns None if no stage differs by more than float64 rounding.
    """
    inputs, mask = forward_check.inputs(a, seed), forward_check.masks()["padding"]
    stages = [oracle.run(block.params, block.semantics, *inputs, mask=mask) for block in (a, b)]
    first = None
    for name, x, y in zip(oracle.Stages._fields, *stages, strict=True):
        if x.shape != y.shape:
            return Departure(f"{name}: shapes {x.shape} and {y.shape}")
        finite = np.isfinite(x)
        scale = np.abs(x[finite]).max(initial=0.0)
        departure = np.abs(x[finite] - y[finite]).max(initial=0.0)
        if departure > 1e-12 * max(scale, 1e-300):
            shown = f"{name} ({departure / max(scale, 1e-300):.2g} of its largest value)"
            if first is None:
                first = Departure(shown)
        elif name == "output" and first is not None:
            return Departure(f"{first.text}; the output does not show it", in_output=False)
    return first


def _sizes(block: ComparedBlock) -> dict[str, int]:
    return check(block.params)


def read_both(
    a: AnySource, b: AnySource, num_heads: int | None
) -> tuple[comparands.Comparand, comparands.Comparand]:
    """Reads both sources; if only one stores the head count, it is used for the other as well."""
    return keras_pairs.by_group(*_read_both(a, b, num_heads))


def _read_both(
    a: AnySource, b: AnySource, num_heads: int | None
) -> tuple[comparands.Comparand, comparands.Comparand]:
    try:
        first_source = comparands.read(a, num_heads)
    except CheckpointError:
        raise
    except ValueError:
        if num_heads is not None:
            raise
        second_source = comparands.read(b)
        return comparands.read(a, _common_heads(second_source.blocks)), second_source
    try:
        return first_source, comparands.read(b, num_heads)
    except CheckpointError:
        raise
    except ValueError:
        if num_heads is not None:
            raise
        return first_source, comparands.read(b, _common_heads(first_source.blocks))


def _common_heads(found: Sequence[ComparedBlock]) -> int | None:
    heads = {check(block.params)["N"] for block in found}
    return heads.pop() if len(heads) == 1 else None


def pair(
    a: Sequence[ComparedBlock], b: Sequence[ComparedBlock]
) -> tuple[
    list[tuple[ComparedBlock, ComparedBlock]], tuple[str, ...], tuple[str, ...], tuple[str, ...]
]:
    """Pairs blocks by name or path ("/" equals "."), or by order if no pair is found this way.

    Returns the pairs, the names of blocks only in a, the names of blocks only in b, and notes.
    Raises ValueError if names repeat and the sources have different numbers of blocks.
    """
    sets = [_by(x, "name") for x in (a, b)], [_by(x, "path") for x in (a, b)]
    by_name = next((x for x in sets if _pairs(x, (a, b))), sets[0])
    common = [name for name in by_name[0] if name in by_name[1]]
    unique = all(len(names) == len(x) for names, x in zip(by_name, (a, b), strict=True))
    if not unique and len(a) != len(b):
        raise ValueError("two blocks of one source have the same name: rename one")
    if (not common or not unique) and len(a) == len(b):
        note = "blocks are paired in order, because their names do not match: check the pairs"
        named = any(x.name and y.name for x, y in itertools.zip_longest(a, b))
        return list(zip(a, b, strict=True)), (), (), (note,) if named else ()
    only_a, only_b = (
        tuple(block.name for name, block in x.items() if name not in common) for x in by_name
    )
    return [(by_name[0][name], by_name[1][name]) for name in common], only_a, only_b, ()


def _by(blocks: Sequence[ComparedBlock], what: str) -> dict[str, ComparedBlock]:
    return {getattr(block, what).replace("/", "."): block for block in blocks}


def _pairs(
    found: Sequence[Mapping[str, ComparedBlock]], both: Sequence[Sequence[ComparedBlock]]
) -> bool:
    """True if names are unique within each source, and at least one name is in both."""
    unique = all(len(names) == len(blocks) for names, blocks in zip(found, both, strict=True))
    return unique and bool(found[0].keys() & found[1].keys())
