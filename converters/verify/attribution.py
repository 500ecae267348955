"""How much of the difference between two attention layers comes from what.

The layers differ in factors: weights, heads, scale, what the mask means, what blocked pairs and
empty rows get, the dtype of the softmax. A mixture that takes some factors from b and the others
from a is a layer too, whose output is computed in float64. Changing one factor at a time from a to
b moves the output; how far depends on which were changed before, so every order is averaged
(Shapley values; Shapley 1953, "A value for n-person games"). What no factor moves is the order of
floating-point operations, where a layer has a forward of its own.
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

# More factors than this are 2 ** MOST mixtures; then all weights become one.
MOST = 8
# What moves the output by less than this part of it does nothing: rounding of float64.
NOTHING = 1e-13
# An error of a layer within so many times the cost of stages stored in its dtype is of rounding.
ROUNDING = 32.0


@dataclass(frozen=True)
class Part:
    """What one factor contributes.

    Attributes:
      name: of the factor, such as `mask polarity`; `rounding` and `unexplained` are what is left.
      sentence: what differs, in words.
      share: signed part of the difference; the shares sum to 1.
      size: `share` times the total, in units of the output; the sizes sum to the total.
      rms: how far the factor moves the output by itself, RMS. More than `size` where others undo it.
      not_finite: elements of the output that it turns into NaN or infinity, less those it cures.
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
        """The sentence, and on which side it leaves NaN."""
        if not self.not_finite:
            return self.sentence
        side = "b" if self.not_finite > 0 else "a"
        return f"{self.sentence}; {abs(self.not_finite):.4g} elements are NaN in {side} for it"


@dataclass(frozen=True)
class Attribution:
    """The difference between two layers, in parts that sum to it.

    The difference is the vector `b - a` of all outputs, and a part is the mean, over all orders of
    changing factors from a to b, of what its change adds to that vector. These vectors sum to
    `b - a`. The size of a part is its length along `b - a`, over the square root of the number of
    elements: so sizes have a sign and sum to the RMS of `b - a`.

    Attributes:
      a, b: names of the layers.
      total: RMS of `b - a` over the elements that are finite in every mixture; NaN: there are none.
      relative: `total` over the RMS of the larger output.
      floor: RMS error of rounding a's output to its dtype.
      compared: number of those elements; the others count in `not_finite` of each part.
      elements: number of all elements of the output.
      parts: the largest first.
      idle: factors that differ, without effect on these inputs, alone or all together.
      outside: of `attribute`: tensors outside the block that differ or were not compared, in words.
      stored: of two sides that are not live: weights that differ without effect, in words.
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
        """Nothing but rounding differs, inside the block, outside it and as the weights are kept."""
        return not (self.outside or self.stored or self.moves)

    @property
    def moves(self) -> bool:
        """Something other than rounding moves the output."""
        return any(part.name != "rounding" for part in self.parts)

    @property
    def headline(self) -> str:
        """The whole difference, and what it leaves out."""
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
        """Plain data for machines."""
        return {"same": self.same, **asdict(self)}


def percent(share: float) -> str:
    """A share for readers.

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
    """Says how much of the difference between two layers' outputs comes from each factor.

    Args:
      a, b: a live layer of torch, Keras or flax (or a linen pair), a flat dict of arrays, a path,
        `MHAParams` (alone or with `Semantics`), with one attention block each; or a `Layer`.
      inputs: query `B T Dq`, key `B S Dk`, value `B S Dv`, all finite: in this order, or a mapping
        of these names (key defaults to query, value to key), or one array for all three; None:
        drawn.
      mask: for both: a `Mask` or a Boolean array broadcastable to `B N T S`, True = attend.
      masks_a, masks_b: instead of it, the arguments that a live layer is called with, as its
        framework names them: `{"key_padding_mask": blocked}`, `{"attention_mask": there}`; for
        others `{"mask": ..., "bias": ...}`.
      num_heads: for sides that do not store it.
      seed: of drawn inputs.

    Raises:
      TypeError, ValueError: a side cannot be read, holds several blocks, or nothing can be swapped.

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
    """Adds what an unexplained rest looks like, where a live layer makes one of the usual mistakes."""
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
    """The same for two `Layer`s; `inputs` are those that gave their outputs.

    Raises:
      ValueError: widths differ, so that nothing can be compared.
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
    # The difference less all parts, and not the errors against both ends: parts then sum to the
    # total to the last bit, however small it is.
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
        # Where the exact output is not finite, what the layer answers tells nothing.
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
    """Each factor's vector and count of elements that are not finite; and the exact outputs."""
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
            before = size - inside  # factors changed before this one
            weight = math.factorial(before) * math.factorial(n - before - 1) / math.factorial(n)
            # Weights sum to 0, so that a can be taken off first: small differences keep their digits.
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
    """What is left: rounding, if both layers are as near to what they say as their dtype allows."""
    wrong = []
    for which, layer, right, out in zip("ab", layers, exact, outputs, strict=True):
        if layer.output is None:
            continue
        finite = np.isfinite(right) & np.isfinite(out)
        # Of NaN in weights a framework's softmax may make finite numbers, of finite weights not.
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
    """What storing every stage in the dtype of the weights costs, in rounding floors."""
    return forward_check.cost(layer.params, layer.semantics, inputs, None)


def _weights_at_once(found: list[Factor]) -> list[Factor]:
    """The factors of weights as one, so that there are few enough."""
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
