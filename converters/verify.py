"""Are two sides the same attention? Weights bit by bit, and outputs against float64.

A forward comparison cannot see everything (a key bias cancels in the softmax), and equal weights
do not prove that a layer applies its mask: both are always compared.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from jaxmha.converters import mistakes, oracle, sides
from jaxmha.converters.arrays import NDArray
from jaxmha.converters.checkpoint import CheckpointError
from jaxmha.converters.checkpoint.errors import printable
from jaxmha.converters.sides import BlockSide
from jaxmha.params import check, leaves

# Sizes of the inputs of the forward comparison: different primes; ragged lengths of S.
B, T, S = 5, 19, 23
LENGTHS = (23, 17, 11, 5, 1)
# Below this many rounding floors two errors count as alike, whatever their ratio.
SMALL = 4.0
RATIO = 2.0
# An output within this many floors of what a mistake gives is that mistake: others are far off.
_EXPLAINED = 1000.0
# Errors that add up to this many floors are not of rounding: something else is computed.
OTHER = 1e5


@dataclass(frozen=True)
class Difference:
    """Where a leaf differs: absent on one side, or its first differing element."""

    leaf: str
    what: str
    index: tuple[int, ...] | None = None
    a: float | None = None
    b: float | None = None
    count: int = 0
    size: int = 0

    def __str__(self) -> str:
        if self.index is None:
            return f"{self.leaf}: {self.what}"
        place = ", ".join(map(str, self.index))
        return (
            f"{self.leaf}[{place}]: {self.a!r} and {self.b!r}, the first of {self.count} of "
            f"{self.size} elements that differ"
        )


@dataclass(frozen=True)
class BlockReport:
    """The comparison of one pair of blocks.

    Attributes:
      a, b: names of the block on either side ("" for a single layer), with `layouts`.
      num_heads: N.
      differences: of weights; empty: identical, 0 ULP.
      behaviour: fields of `Semantics` that differ.
      errors: mask -> RMS error of either side's forward against the float64 oracle on that
        side's weights, in units of the rounding floor of the output.
      departs: the first stage at which the two sides part, or None.
      explanation: the single mistake that makes one side of the other, where there is one.
      same: weights and behaviour are identical, and no side's error stands out.
    """

    a: str
    b: str
    layouts: tuple[str, str]
    num_heads: int
    dtypes: tuple[str, str]
    differences: tuple[Difference, ...]
    behaviour: tuple[str, ...]
    errors: dict[str, tuple[float, float]]
    departs: str | None
    explanation: str | None
    same: bool

    def __str__(self) -> str:
        name = (
            self.a
            if self.a == self.b
            else f"{self.a or self.layouts[0]} / {self.b or self.layouts[1]}"
        )
        lines = [f"{printable(name) or 'layer'}: {'same' if self.same else 'DIFFERENT'}"]
        lines.append(
            "  weights: identical (0 ULP)" if not self.differences else "  weights differ:"
        )
        lines += [f"    {difference}" for difference in self.differences]
        lines += [f"  behaviour: {text}" for text in self.behaviour]
        lines += [
            f"  forward, {mask}: error {a:.3g} and {b:.3g} rounding floors of the output"
            for mask, (a, b) in self.errors.items()
        ]
        if self.departs is not None:
            lines.append(f"  first departs at: {self.departs}")
        if self.explanation is not None:
            lines.append(f"  explained by: {self.explanation}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """The comparison of two sides; true exactly when they are the same."""

    blocks: tuple[BlockReport, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def same(self) -> bool:
        """Every block has a counterpart that is the same."""
        return not self.only_a and not self.only_b and all(block.same for block in self.blocks)

    def __bool__(self) -> bool:
        return self.same

    def __str__(self) -> str:
        lines = [str(block) for block in self.blocks]
        lines += [f"{printable(name)}: only in the first" for name in self.only_a]
        lines += [f"{printable(name)}: only in the second" for name in self.only_b]
        return "\n".join([*lines, *self.notes])

    def to_json(self) -> dict[str, Any]:
        """Plain data for machines."""
        return {"same": self.same, **asdict(self)}


def compare(a: Any, b: Any, *, num_heads: int | None = None, seed: int = 0) -> Report:
    """Compares every attention block of two sides.

    A side is a path, a flat dict of arrays, `MHAParams` (alone or with `Semantics`), a live
    torch, keras or flax layer or model, or a linen pair `(module, variables)`. Blocks are paired
    by name, or in order where names differ and their number agrees.

    Args:
      a, b: the sides.
      num_heads: for sides that do not store it; what one side knows serves the other.
      seed: of the random inputs of the forward comparison.

    Raises:
      TypeError, ValueError: a side cannot be read.

    >>> import torch
    >>> layer = torch.nn.MultiheadAttention(6, 2)
    >>> compare(layer, layer.state_dict()).same
    True
    """
    sides_a, sides_b = _read_both(a, b, num_heads)
    pairs, only_a, only_b, notes = _pair(sides_a, sides_b)
    reports = tuple(compare_blocks(x, y, seed) for x, y in pairs)
    return Report(reports, only_a, only_b, notes)


def assert_same(a: Any, b: Any, *, num_heads: int | None = None, seed: int = 0) -> None:
    """For tests: raises AssertionError with the findings unless `compare` finds both the same."""
    report = compare(a, b, num_heads=num_heads, seed=seed)
    if not report:
        raise AssertionError(f"the two sides are not the same attention\n{report}")


def compare_blocks(a: BlockSide, b: BlockSide, seed: int = 0) -> BlockReport:
    """Compares two blocks: weights, behaviour, forward, and the first stage that departs."""
    differences = tuple(weight_differences(a, b))
    behaviour = tuple(
        f"{name} is {x!r} and {y!r}"
        for name in ("scale", "logits_soft_cap", "add_zero_attn", "qk_norm", "qk_norm_epsilon")
        for x, y in [(getattr(a.semantics, name), getattr(b.semantics, name))]
        if x != y
    )
    errors: dict[str, tuple[float, float]] = {}
    if comparable := _sizes(a) == _sizes(b):
        errors = {
            name: (_error(a, seed, mask), _error(b, seed, mask)) for name, mask in masks().items()
        }
    alike = all(_alike(*pair) for pair in errors.values())
    departs, explanation = None, mistakes.explain(a.params, b.params)
    if not comparable:
        departs = "shapes"
    elif differences or behaviour:
        departs = first_departure(a, b, seed)
    elif not alike:
        departs = "output: the weights agree, so a live layer computes something else"
        explanation = explain_forward(a, seed) or explain_forward(b, seed)
    return BlockReport(
        a.name,
        b.name,
        (a.layout, b.layout),
        check(a.params)["N"],
        (_dtype(a).name, _dtype(b).name),
        differences,
        behaviour,
        errors,
        departs,
        explanation,
        same=comparable and not differences and not behaviour and alike,
    )


def weight_differences(a: BlockSide, b: BlockSide) -> list[Difference]:
    """Every leaf that is not bit-identical."""
    found = []
    ours, theirs = leaves(a.params), leaves(b.params)
    for leaf in {**ours, **theirs}:
        if leaf not in ours or leaf not in theirs:
            where = "second" if leaf not in ours else "first"
            found.append(Difference(leaf, f"only in the {where}"))
            continue
        x, y = np.asarray(ours[leaf]), np.asarray(theirs[leaf])
        if x.shape != y.shape or x.dtype != y.dtype:
            what = f"{x.dtype} {x.shape} and {y.dtype} {y.shape}"
            if x.shape == y.shape and np.array_equal(x.astype(y.dtype), y):
                what += "; the second is the first, rounded"
            elif x.shape == y.shape and np.array_equal(y.astype(x.dtype), x):
                what += "; the first is the second, rounded"
            found.append(Difference(leaf, what))
            continue
        bits = f"u{x.dtype.itemsize}"
        where_differs = np.argwhere(
            np.ascontiguousarray(x).view(bits) != np.ascontiguousarray(y).view(bits)
        )
        if len(where_differs):
            index = tuple(int(i) for i in where_differs[0])
            values = float(x[index]), float(y[index])
            found.append(Difference(leaf, "differs", index, *values, len(where_differs), x.size))
    return found


def first_departure(a: BlockSide, b: BlockSide, seed: int) -> str | None:
    """The first stage at which the float64 oracle on either side's weights gives other values.

    None: the difference leaves every stage as it is, up to float64 rounding.
    """
    inputs = _inputs(a, seed)
    stages = [
        oracle.run(side.params, side.semantics, *inputs, mask=masks()["padding"]) for side in (a, b)
    ]
    first = None
    for name, x, y in zip(oracle.Stages._fields, *stages, strict=True):
        if x.shape != y.shape:
            return f"{name}: shapes {x.shape} and {y.shape}"
        finite = np.isfinite(x)
        scale = np.abs(x[finite]).max(initial=0.0)
        departure = np.abs(x[finite] - y[finite]).max(initial=0.0)
        if departure > 1e-12 * max(scale, 1e-300):
            shown = f"{name} ({departure / max(scale, 1e-300):.2g} of its largest value)"
            if first is None:
                first = shown
        elif name == "output" and first is not None:
            return f"{first}; the output does not show it"
    return first


def explain_forward(side: BlockSide, seed: int) -> str | None:
    """What a live layer does other than its weights say, where one of the usual mistakes is it."""
    inputs, mask = _inputs(side, seed), masks()["padding"]
    assert mask is not None
    out = np.asarray(side.forward(*inputs, mask), np.float64)
    unscaled = replace(side.semantics, scale=1.0)
    for name, semantics, other in (
        ("inverted mask: True means attend on one side and blocked on the other", None, ~mask),
        ("mask ignored", None, None),
        ("missing scale: logits are not divided by the square root of H", unscaled, mask),
    ):
        run = oracle.run(side.params, semantics or side.semantics, *inputs, mask=other)
        floor = oracle.rounding_floor(run.output, _dtype(side))
        if np.sqrt(np.mean(np.square(out - run.output))) <= _EXPLAINED * floor:
            return name
    return None


def masks() -> dict[str, NDArray | None]:
    """The masks of the forward comparison, `(B, 1, T or 1, S)`."""
    padding = np.arange(S) < np.array(LENGTHS)[:, None]
    return {
        "no mask": None,
        "padding": padding[:, None, None],
        "causal": np.broadcast_to(np.tri(T, S, dtype=bool), (B, 1, T, S)),
    }


def _alike(a: float, b: float) -> bool:
    """Both errors are those of rounding, and neither stands out; NaN never is."""
    return math.isfinite(a + b) and a + b < OTHER and max(a, b) <= RATIO * max(min(a, b), SMALL)


def _error(side: BlockSide, seed: int, mask: NDArray | None) -> float:
    inputs = _inputs(side, seed)
    exact = oracle.run(side.params, side.semantics, *inputs, mask=mask).output
    out = np.asarray(side.forward(*inputs, mask), np.float64)
    floor = oracle.rounding_floor(exact, _dtype(side))
    return float(np.sqrt(np.mean(np.square(out - exact)))) / floor


def _inputs(side: BlockSide, seed: int) -> tuple[NDArray, NDArray, NDArray]:
    rng, sizes = np.random.default_rng(seed), check(side.params)
    query, key, value = (
        rng.normal(size=(B, length, sizes[width])).astype(_dtype(side))
        for length, width in ((T, "Dq"), (S, "Dk"), (S, "Dv"))
    )
    return query, key, value


def _dtype(side: BlockSide) -> np.dtype[Any]:
    return np.asarray(side.params.query.kernel).dtype


def _sizes(side: BlockSide) -> dict[str, int]:
    return check(side.params)


def _read_both(a: Any, b: Any, num_heads: int | None) -> tuple[list[BlockSide], list[BlockSide]]:
    """Reads both sides; the head count that only one of them stores serves the other."""
    try:
        side_a = sides.read(a, num_heads)
    except CheckpointError:
        raise
    except ValueError:
        if num_heads is not None:
            raise
        side_b = sides.read(b)
        return sides.read(a, _common_heads(side_b)), side_b
    try:
        return side_a, sides.read(b, num_heads)
    except CheckpointError:
        raise
    except ValueError:
        if num_heads is not None:
            raise
        return side_a, sides.read(b, _common_heads(side_a))


def _common_heads(found: Sequence[BlockSide]) -> int | None:
    heads = {check(side.params)["N"] for side in found}
    return heads.pop() if len(heads) == 1 else None


def _pair(
    a: Sequence[BlockSide], b: Sequence[BlockSide]
) -> tuple[list[tuple[BlockSide, BlockSide]], tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """By name, whatever the separator; else in order, where the numbers agree."""
    by_name = [{side.name.replace("/", "."): side for side in x} for x in (a, b)]
    common = [name for name in by_name[0] if name in by_name[1]]
    unique = all(len(names) == len(x) for names, x in zip(by_name, (a, b), strict=True))
    if not unique and len(a) != len(b):
        raise ValueError("two blocks of one side have the same name: rename one")
    if (not common or not unique) and len(a) == len(b):
        note = (
            "blocks are paired in order, since their names do not pair them: check that it is right"
        )
        named = any(x.name and y.name for x, y in zip_longest(a, b))
        return list(zip(a, b, strict=True)), (), (), (note,) if named else ()
    only_a, only_b = (
        tuple(side.name for name, side in x.items() if name not in common) for x in by_name
    )
    return [(by_name[0][name], by_name[1][name]) for name in common], only_a, only_b, ()
