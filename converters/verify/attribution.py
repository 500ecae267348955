"""Attributes the difference between the outputs of two attention layers to differing factors.

Factors are: weights, heads, scale, masks, values for masked pairs and fully masked rows, the dtype
of the softmax. A mixture takes some factors from b and the others from a; its output is computed in
float64. Changing one factor from a to b changes the output by an amount that depends on the factors
changed before, so the amounts are averaged over all orders (Shapley values; Shapley 1953, "A value
for n-person games"). For layers with their own forward, the order of floating-point operations
explains what no factor does.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.verify import (
    comparands,
    comparison,
    factors,
    forward_check,
    oracle,
    other_tensors,
)
from jaxmha.converters.verify.captured_layer import Inputs, Layer, as_inputs, of_block, of_call
from jaxmha.converters.verify.comparands import BlockSide
from jaxmha.converters.verify.factors import Factor
from jaxmha.converters.verify.weights import kept_otherwise

# Most factors: n factors need 2 ** n mixtures. If there are more, all weights become one factor.
MOST = 8
# A factor that changes the output by less than this fraction has no effect: float64 rounding.
NOTHING = 1e-13
# Errors up to ROUNDING times the expected rounding error count as rounding.
ROUNDING = 32.0


@dataclass(frozen=True)
class Part:
    """The contribution of one factor.

    Attributes:
      name: of the factor, such as `mask polarity`; `rounding` or `unexplained` for the remainder.
      sentence: the difference in words.
      share: signed fraction of the difference; the shares sum to 1.
      size: `share` times the total, in units of the output; the sizes sum to the total.
      rms: RMS change of the output by this factor alone; above `size` if other factors undo it.
      not_finite: number of output elements that it turns to NaN or infinity, minus those it cures.
    """

    name: str
    sentence: str
    share: float
    size: float
    rms: float
    not_finite: float = 0.0

    def __str__(self) -> str:
        return f"{self.name}: {self.text}; {percent(self.share)} of the difference"

    @property
    def text(self) -> str:
        """The sentence, and the source in which the factor causes NaN."""
        if not self.not_finite:
            return self.sentence
        side = "b" if self.not_finite > 0 else "a"
        return f"{self.sentence}; {abs(self.not_finite):.4g} elements are NaN in {side} for it"


@dataclass(frozen=True)
class Attribution:
    """The difference between two layers, in parts that sum to it.

    The difference is the vector `b - a` of all outputs. The part of a factor is the mean change of
    the output when this factor changes from a to b, over all orders of changing the factors; these
    vectors sum to `b - a`. The size of a part is its projection onto `b - a`, divided by the square
    root of the number of elements. Sizes are therefore signed, and sum to the RMS of `b - a`.

    Attributes:
      a, b: names of the layers.
      total: RMS of `b - a` over the elements that are finite in every mixture; NaN if there are
        none.
      relative: `total` over the RMS of the larger output.
      floor: RMS error of rounding a's output to its dtype.
      compared: number of those elements; `not_finite` of each part counts the others.
      elements: number of elements of the output.
      parts: contributions of the factors, the largest first.
      idle: factors that differ but have no effect on these inputs, alone or together.
      outside: from `attribute`: tensors outside the block that differ or were not compared, in
        words.
      stored: for sources without a live layer: weights that differ without effect, in words.
    """

    a: str
    b: str
    total: float
    relative: float
    floor: float
    compared: int
    elements: int
    parts: tuple[Part, ...]
    idle: tuple[str, ...]
    outside: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """True if only rounding differs: in the output, outside the block and in the weights."""
        return not (self.outside or self.stored or self.moves)

    @property
    def moves(self) -> bool:
        """True if a factor other than rounding changes the output."""
        return any(part.name != "rounding" for part in self.parts)

    @property
    def headline(self) -> str:
        """The total difference in words, and the elements that it leaves out."""
        where = "in one of the two, or in a mixture of them"
        if not self.compared:
            return f"nothing can be compared: every element is NaN or infinite {where}"
        text = f"RMS difference {self.total:.3g}, {percent(self.relative)} of the output"
        if bad := self.elements - self.compared:
            return (
                f"{bad} of {self.elements} elements are not finite {where}; "
                f"over the other {self.compared}: {text}"
            )
        return text

    def __str__(self) -> str:
        lines = [f"{self.a} and {self.b}: {self.headline}"]
        lines += [f"  {part}" for part in self.parts]
        lines += [f"  without effect here: {sentence}" for sentence in self.idle]
        lines += [f"  kept otherwise: {sentence}" for sentence in self.stored]
        lines += [f"  outside the block: {sentence}" for sentence in self.outside]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON-compatible data."""
        return {"same": self.same, **asdict(self)}


def percent(share: float) -> str:
    """Formats a share as a percentage.

    >>> percent(0.934), percent(3e-7), percent(0.0)
    ('93 %', '3e-05 %', '0 %')
    """
    return f"{100 * share:.0f} %" if abs(share) >= 0.005 or not share else f"{100 * share:.1g} %"


def attribute(
    a: Any,
    b: Any,
    inputs: Any = None,
    *,
    mask: Any = None,
    masks_a: Any = None,
    masks_b: Any = None,
    num_heads: int | None = None,
    seed: int = 0,
) -> Attribution:
    """Attributes the difference between two layers' outputs to differing factors.

    Args:
      a, b: a live layer of torch, Keras or flax (or a linen pair), a flat dict of arrays, a path,
        or `MHAParams` (alone or with `Semantics`), each with one attention block; or a `Layer`.
      inputs: query `B T Dq`, key `B S Dk`, value `B S Dv`, all finite: in this order, as a mapping
        of these names (key defaults to query, value to key), or one array for all three; None draws
        random inputs.
      mask: for both: a `Mask` or a Boolean array broadcastable to `B N T S`, True = attend.
      masks_a, masks_b: instead of `mask`: for a live layer the mask arguments of its framework,
        `{"key_padding_mask": blocked}`, `{"attention_mask": there}`; for others
        `{"mask": ..., "bias": ...}`.
      num_heads: for sources without the head count.
      seed: seed of random inputs.

    Raises:
      TypeError, ValueError: a source cannot be read, has several blocks, or no factor can be
        swapped.

    >>> import jax, jaxmha
    >>> params = jaxmha.init_params(jax.random.key(0), num_heads=2, features=6)
    >>> found = attribute(params, (params, jaxmha.Semantics(scale=1.0)))
    >>> found.parts[0].name, round(found.parts[0].share, 9)
    ('scale', 1.0)
    """
    if mask is not None and not (masks_a is None and masks_b is None):
        raise ValueError("give mask= for both layers, or masks_a= and masks_b= for each")
    blocks: list[BlockSide | None] = [None, None]
    rest: tuple[str, ...] = ()
    plain = [n for n, x in enumerate((a, b)) if not isinstance(x, Layer)]
    if len(plain) == 2:
        both = comparison.read_both(a, b, num_heads)
        blocks = [_only(side, x) for side, x in zip(both, (a, b), strict=True)]
        found_outside = other_tensors.compare(*(side.source for side in both))
        rest = (
            *(f"{name} differs: {how}" for name, how in found_outside.differing.items()),
            *(f"not compared: {left}" for left in found_outside.left),
        )
    elif plain:
        one = (a, b)[plain[0]]
        blocks[plain[0]] = _only(comparands.read(one, num_heads), one)
    factors.check_widths(*((block or x).params for block, x in zip(blocks, (a, b), strict=True)))
    params = (blocks[0] or a).params
    if inputs is not None:
        given = as_inputs(inputs, params)
    else:
        if any(isinstance(x, Layer) and x.output is not None for x in (a, b)):
            raise ValueError("a Layer with an output needs the inputs that it is of: give inputs=")
        given = forward_check.inputs(
            next(comparands.layers("", "", params, (blocks[0] or a).semantics)), seed
        )
    found: list[Layer] = []
    for which, x, block, masks in zip("ab", (a, b), blocks, (masks_a, masks_b), strict=True):
        if block is None:
            if masks is not None or mask is not None:
                raise ValueError(f"{which} is a Layer, which has its mask: give it none")
            found.append(x)
        elif masks is not None and block.live:
            found.append(of_call(x, given, masks))
        else:
            found.append(of_block(block, given, **(masks or {"mask": mask})))
    guessed = _guessed(between(found[0], found[1], given), blocks, seed)
    kept = [block.params for block in blocks if block is not None and not block.live]
    stored = kept_otherwise(kept[0], kept[1], guessed.moves) if len(kept) == 2 else ()
    return replace(guessed, outside=rest, stored=stored)


def _guessed(found: Attribution, blocks: Sequence[BlockSide | None], seed: int) -> Attribution:
    """Adds to an unexplained part the known error, if any, that a live layer seems to have."""
    if all(part.name != "unexplained" for part in found.parts):
        return found
    guesses = [
        f"{which} looks like this: {guess}"
        for which, block in zip("ab", blocks, strict=True)
        if block is not None
        and block.live
        and (guess := forward_check.explain_forward(block, seed))
    ]
    parts = [
        replace(part, sentence="; ".join((part.sentence, *guesses)))
        if part.name == "unexplained"
        else part
        for part in found.parts
    ]
    return replace(found, parts=tuple(parts))


def between(a: Layer, b: Layer, inputs: Inputs) -> Attribution:
    """Attributes the difference between two `Layer`s; `inputs` are those of their outputs.

    Raises:
      ValueError: the widths differ, so that outputs cannot be compared.
    """
    x, y, found = factors.find(a, b, inputs)
    if len(found) > MOST:
        found = _weights_at_once(found)
    vectors, not_finite, ends = _shapley(x, y, found, inputs)
    first, last = (
        end if layer.output is None else np.asarray(layer.output, np.float64)
        for layer, end in zip((a, b), ends, strict=True)
    )
    if first.shape != ends[0].shape or last.shape != ends[1].shape:
        raise ValueError(
            f"output: expected axes (B, T, Do), {ends[0].shape}, got {first.shape} and {last.shape}"
        )
    difference = last - first
    compared = np.isfinite(difference)
    for vector in vectors:
        compared &= np.isfinite(vector)
    total = _rms(difference[compared]) if compared.any() else math.nan
    scale = max(_rms(first[compared]), _rms(last[compared]))
    nothing = NOTHING * scale
    undone = _rms((ends[1] - ends[0])[compared]) <= nothing
    parts, idle = [], []
    # Subtract the parts from the difference, not from the errors against both exact outputs: parts
    # then sum to the total to the last bit, however small it is.
    left = difference[compared]
    for factor, vector, count in zip(found, vectors, not_finite, strict=True):
        part = _part(factor, vector[compared], difference[compared], total, count)
        small = part.rms <= nothing
        if part.not_finite or not compared.any() or not (small or undone):
            parts.append(part)
            left = left - vector[compared]
        else:
            idle.append(factor.sentence + "; what else differs undoes it" * (not small))
    if a.output is not None or b.output is not None:
        # Elements whose exact output is not finite show nothing about the layer.
        bad = [
            float((np.isfinite(right) & ~np.isfinite(out)).sum())
            for right, out in zip(ends, (first, last), strict=True)
        ]
        count = bad[1] - bad[0]
        rest = _rest((a, b), ends, (first, last), inputs)
        parts.append(_part(rest, left, difference[compared], total, count))
    else:
        rest = Factor("rounding", "what is below the rounding of float64", ())
        part = _part(rest, left, difference[compared], total, 0.0)
        if abs(part.share) > NOTHING:
            parts.append(part)
    parts.sort(key=lambda part: (-abs(part.not_finite), -abs(part.share), -part.rms))
    floor = oracle.rounding_floor(first[compared], a.dtype) if compared.any() else 0.0
    return Attribution(
        a.name,
        b.name,
        total,
        total / scale if scale else 0.0 * total,
        floor,
        int(compared.sum()),
        compared.size,
        tuple(parts),
        tuple(idle),
    )


def _shapley(
    x: factors.Values, y: factors.Values, found: Sequence[Factor], inputs: Inputs
) -> tuple[list[NDArray], list[float], tuple[NDArray, NDArray]]:
    """The vector and the count of non-finite elements of each factor, and both exact outputs."""
    n = len(found)
    vectors: list[Any] = [0.0] * n
    counts = [0.0] * n
    first = last = factors.output(x, inputs)
    for chosen in range(2**n):
        mixed = dict(x)
        for i, factor in enumerate(found):
            if chosen >> i & 1:
                mixed |= {name: y.get(name) for name in factor.values}
        out = first if not chosen else factors.output(mixed, inputs)
        last = out
        broken = float((~np.isfinite(out)).sum())
        size = chosen.bit_count()
        for i in range(n):
            inside = chosen >> i & 1
            before = size - inside  # number of factors changed before this one
            weight = math.factorial(before) * math.factorial(n - before - 1) / math.factorial(n)
            # The weights sum to 0, so a's output can be subtracted first: this keeps small
            # differences.
            vectors[i] = vectors[i] + (weight if inside else -weight) * (out - first)
            counts[i] += (weight if inside else -weight) * broken
    return vectors, counts, (first, last)


def _part(
    factor: Factor, vector: NDArray, difference: NDArray, total: float, not_finite: float
) -> Part:
    squared = float(difference @ difference)
    share = float(vector @ difference) / squared if squared else 0.0
    count = round(not_finite, 9) + 0.0
    return Part(factor.name, factor.sentence, share, share * total, _rms(vector), count)


def _rest(
    layers: Sequence[Layer], exact: Sequence[NDArray], outputs: Sequence[NDArray], inputs: Inputs
) -> Factor:
    """The remainder: rounding, if each layer is as near its exact output as its dtype allows."""
    wrong = []
    for which, layer, right, out in zip("ab", layers, exact, outputs, strict=True):
        if layer.output is None:
            continue
        finite = np.isfinite(right) & np.isfinite(out)
        # A framework may turn NaN weights into finite outputs, but not the reverse.
        odd = (np.isfinite(out) != np.isfinite(right)) & (
            np.isfinite(right) | (not comparison.not_finite(layer.params))
        )
        how = [f"{odd.sum()} elements are NaN or infinite, or are to be"] if odd.any() else []
        if finite.any():
            floor = oracle.rounding_floor(right[finite], layer.dtype)
            floors = _rms((out - right)[finite]) / floor
            if how or floors > ROUNDING * max(forward_check.SMALL, _cost(layer, inputs)):
                how.append(f"{floors:.3g} rounding floors away")
        if how:
            wrong.append(f"{which} ({', '.join(reversed(how))})")
    if wrong:
        what = " and ".join(wrong)
        sentence = f"{what} answers something else than its weights, mask and behaviour say"
        return Factor("unexplained", sentence, ())
    narrow = [
        f"{which} computes in {layer.dtype}, narrower than its weights"
        for which, layer in zip("ab", layers, strict=True)
        if layer.dtype != np.asarray(layer.params.query.kernel).dtype
    ]
    if narrow:
        return Factor("compute dtype", "; ".join(narrow), ())
    return Factor("rounding", "the order of floating-point operations", ())


def _cost(layer: Layer, inputs: Inputs) -> float:
    """The error of rounding every stage to the dtype of the weights, in rounding floors."""
    return forward_check.cost(layer.params, layer.semantics, inputs, None)


def _weights_at_once(found: list[Factor]) -> list[Factor]:
    """Merges the factors of weights into one, so that few enough factors remain."""
    weights = [f for f in found if any("kernel" in v or v.endswith(".bias") for v in f.values)]
    values = tuple(dict.fromkeys(v for f in weights for v in f.values))
    one = Factor("weights", "; ".join(f.sentence for f in weights), values)
    return [one, *(f for f in found if f not in weights)]


def _only(side: comparands.Side, given: Any) -> BlockSide:
    if len(side.blocks) == 1:
        return side.blocks[0]
    names = ", ".join(block.name for block in side.blocks[:5])
    raise ValueError(
        f"{len(side.blocks)} attention blocks in a {type(given).__name__} ({names} ...): give one, "
        "such as params or a layer; `jaxmha diff` compares all blocks of two files"
    )


def _rms(x: NDArray) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0
