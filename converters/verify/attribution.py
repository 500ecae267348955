"""Attributes the difference between the outputs of two attention layers to differing factors.

Possible factors: weights, heads, scale, masks, the values for masked pairs and fully masked rows,
and the softmax dtype. A mixed layer takes some factors from b and the others from a; its output is
computed in float64. Changing one factor from a to b changes the output by an amount that depends on
the factors changed before, so the amounts are averaged over all orders (Shapley values; Shapley
1953, "A value for n-person games"). The remainder, which the forward of a layer object adds to the
float64 outputs, is reported as rounding, as a narrower compute dtype, or as unexplained.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxmha import Mask
from jaxmha.converters.layout.arrays import AnyArray, NDArray
from jaxmha.converters.verify import (
    comparands,
    comparison,
    factors,
    forward_check,
    model_facts,
    oracle,
    other_tensors,
)
from jaxmha.converters.verify.attribution_report import Attribution, Part, percent
from jaxmha.converters.verify.captured_layer import Inputs, Layer, as_inputs, of_block, of_call
from jaxmha.converters.verify.comparands import AnySource, ComparedBlock
from jaxmha.converters.verify.factors import Factor
from jaxmha.converters.verify.weights import stored_differently

__all__ = ["Attribution", "Part", "attribute", "between", "percent"]

# Maximum number of factors, because n factors need 2 ** n outputs. If there are more, all weight
# factors are merged into one.
MOST = 8
# A factor whose RMS effect is below this fraction of the output's RMS counts as float64 rounding.
NOTHING = 1e-13
# Errors of a layer's own output up to ROUNDING times the expected rounding error count as rounding.
ROUNDING = 32.0


def attribute(
    a: AnySource,
    b: AnySource,
    inputs: object = None,
    *,
    mask: Mask | AnyArray | None = None,
    masks_a: Mapping[str, Any] | None = None,
    masks_b: Mapping[str, Any] | None = None,
    num_heads: int | None = None,
    seed: int = 0,
) -> Attribution:
    """Attributes the difference between two layers' outputs to differing factors.

    Each source has one attention block; `jaxmha.converters.matching.prove` compares whole models.

    Args:
      a, b: a layer object of torch, Keras, flax, equinox or jaxmha (or a linen pair), a flat dict of
        arrays, a path, or `MHAParams` (alone or with `Semantics`), each with one attention block;
        or a `Layer`.
      inputs: query `B T Dq`, key `B S Dk`, value `B S Dv`, all finite: in this order, as a mapping
        of these names (key defaults to query, value to key), or one array for all three; None draws
        random inputs.
      mask: the mask of both layers: a `Mask`, or a Boolean array broadcastable to `B N T S`,
        True = attend.
      masks_a, masks_b: separate masks instead of `mask`. For a layer object: the mask arguments of
        its framework, such as `{"key_padding_mask": blocked}` or `{"attention_mask": valid}`; for
        other sources: `{"mask": ..., "bias": ...}`.
      num_heads: head count of sources that do not store it.
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
    blocks, outside = _read(a, b, num_heads)
    params = [x.params for x in blocks]
    factors.check_widths(*params)
    if inputs is not None:
        given = as_inputs(inputs, params[0])
    elif any(isinstance(x, Layer) and x.output is not None for x in blocks):
        raise ValueError("a Layer with an output needs the inputs of that call: give inputs=")
    else:
        block = next(comparands.layers("", "", params[0], blocks[0].semantics))
        given = forward_check.inputs(block, seed)
    found: list[Layer] = []
    for which, x, block_or_layer, masks in zip(
        "ab", (a, b), blocks, (masks_a, masks_b), strict=True
    ):
        if isinstance(block_or_layer, Layer):
            if masks is not None or mask is not None:
                raise ValueError(f"{which} is a Layer, which has its mask: give it none")
            found.append(block_or_layer)
        elif masks is not None and block_or_layer.is_live:
            found.append(of_call(x, given, masks))
        else:
            found.append(of_block(block_or_layer, given, **(masks or {"mask": mask})))
    guessed = _guessed(between(found[0], found[1], given), blocks, seed)
    kept = [x.params for x in blocks if not isinstance(x, Layer) and not x.is_live]
    idle = stored_differently(kept[0], kept[1], guessed.changes_output) if len(kept) == 2 else ()
    return replace(guessed, outside=outside, idle_weights=idle)


Operand = ComparedBlock | Layer


def _read(
    a: AnySource, b: AnySource, num_heads: int | None
) -> tuple[tuple[Operand, Operand], tuple[str, ...]]:
    """Returns the only block of each source, and describes other tensors and facts that differ."""
    if isinstance(a, Layer) and isinstance(b, Layer):
        return (a, b), ()
    if isinstance(a, Layer):
        return (a, _only(comparands.read(b, num_heads), b)), ()
    if isinstance(b, Layer):
        return (_only(comparands.read(a, num_heads), a), b), ()
    x, y = comparison.read_both(a, b, num_heads)
    found = other_tensors.compare(x.source, y.source)
    outside = (
        *(f"{name} differs: {how}" for name, how in found.differing.items()),
        *(f"not compared: {left}" for left in found.left),
    )
    blocks = _only(x, a), _only(y, b)
    return blocks, (*outside, *model_facts.compare(x.source, y.source, [blocks]).differing)


def _guessed(found: Attribution, blocks: Sequence[Operand], seed: int) -> Attribution:
    """Appends to an unexplained part the known error that fits a layer object's output, if any.

    `forward_check.explain_forward` knows errors such as an inverted mask.
    """
    if all(part.name != "unexplained" for part in found.parts):
        return found
    guesses = [
        f"{which} looks like this: {guess}"
        for which, block in zip("ab", blocks, strict=True)
        if not isinstance(block, Layer)
        and block.is_live
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
    """Attributes the difference between the outputs of two `Layer`s to the factors that differ.

    Both layers were called with the same `inputs`.

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
    # The remainder is the difference minus all parts, so that the parts sum to it exactly. As a
    # difference of the errors of both layers it would lose a small total to rounding.
    left = difference[compared]
    for factor, vector, count in zip(found, vectors, not_finite, strict=True):
        part = _part(factor, vector[compared], difference[compared], total, count)
        small = part.rms <= nothing
        if part.not_finite or not compared.any() or not (small or undone):
            parts.append(part)
            left = left - vector[compared]
        else:
            idle.append(factor.sentence + "; the other differences undo it" * (not small))
    rest, count = _remainder((a, b), ends, (first, last), inputs)
    part = _part(rest, left, difference[compared], total, count)
    if a.output is not None or b.output is not None or abs(part.share) > NOTHING:
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


def _remainder(
    layers: Sequence[Layer], exact: Sequence[NDArray], outputs: Sequence[NDArray], inputs: Inputs
) -> tuple[Factor, float]:
    """Returns the difference that no factor explains, and its number of non-finite elements.

    The number counts elements that only the layer's own output makes NaN or infinite: b minus a.
    """
    if all(layer.output is None for layer in layers):
        return Factor("rounding", "less than the rounding of float64", ()), 0.0
    # Where the exact output is not finite, the factors already account for NaN or infinity.
    bad = [
        float((np.isfinite(right) & ~np.isfinite(out)).sum())
        for right, out in zip(exact, outputs, strict=True)
    ]
    return _rest(layers, exact, outputs, inputs), bad[1] - bad[0]


def _shapley(
    x: factors.Values, y: factors.Values, found: Sequence[Factor], inputs: Inputs
) -> tuple[list[NDArray], list[float], tuple[NDArray, NDArray]]:
    """Returns each factor's mean change of the output and of the number of non-finite elements.

    The means are over all orders of changing the factors. Also returns both exact outputs.
    """
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
            # For each factor the signed weights sum to 0, so subtracting a's output does not change
            # the sum, but preserves the precision of small differences.
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
    """Returns the remainder as the factor "unexplained", "compute dtype" or "rounding"."""
    wrong = []
    for which, layer, right, out in zip("ab", layers, exact, outputs, strict=True):
        if layer.output is None:
            continue
        finite = np.isfinite(right) & np.isfinite(out)
        # A non-finite output is wrong if the exact output is finite. A finite output is wrong for
        # a non-finite exact output only if the parameters are finite: frameworks may suppress NaN.
        odd = (np.isfinite(out) != np.isfinite(right)) & (
            np.isfinite(right) | (not comparison.not_finite(layer.params))
        )
        how = [f"{odd.sum()} elements are NaN or infinite, or should be"] if odd.any() else []
        if finite.any():
            floor = oracle.rounding_floor(right[finite], layer.dtype)
            floors = _rms((out - right)[finite]) / floor
            if how or floors > ROUNDING * max(forward_check.SMALL, _rounding_error(layer, inputs)):
                how.append(f"{floors:.3g} rounding floors away")
        if how:
            wrong.append(f"{which} ({', '.join(reversed(how))})")
    if wrong:
        what = " and ".join(wrong)
        sentence = f"{what} does not compute what its weights, mask and behaviour imply"
        return Factor("unexplained", sentence, ())
    narrow = [
        f"{which} computes in {layer.dtype}, narrower than its weights"
        for which, layer in zip("ab", layers, strict=True)
        if layer.dtype != np.asarray(layer.params.query.kernel).dtype
    ]
    if narrow and layers[0].dtype != layers[1].dtype:
        return Factor("compute dtype", "; ".join(narrow), ())
    return Factor("rounding", "the order of floating-point operations", ())


def _rounding_error(layer: Layer, inputs: Inputs) -> float:
    """Returns the RMS error from rounding every stage to the layer's dtype, in rounding floors."""
    return forward_check.cost(layer.params, layer.semantics, inputs, None, layer.dtype)


def _weights_at_once(found: list[Factor]) -> list[Factor]:
    """Merges all weight factors into one, to limit the number of mixed layers."""
    weights = [f for f in found if any("kernel" in v or v.endswith(".bias") for v in f.values)]
    values = tuple(dict.fromkeys(v for f in weights for v in f.values))
    one = Factor("weights", "; ".join(f.sentence for f in weights), values)
    return [one, *(f for f in found if f not in weights)]


def _only(comparand: comparands.Comparand, given: AnySource) -> ComparedBlock:
    if len(comparand.blocks) == 1:
        (block,) = comparand.blocks
        if block.kind and not block.is_live:
            raise ValueError(
                f"no outputs to attribute: {'; '.join(comparand.notes)}; for the weights alone "
                "give its parameters"
            )
        return block
    comparands.require_blocks(comparand, given)
    names = ", ".join(block.name for block in comparand.blocks[:5])
    raise ValueError(
        f"{len(comparand.blocks)} attention blocks in a {type(given).__name__} ({names} ...): give one, "
        "such as params or a layer; `jaxmha diff` compares all blocks of two files, and "
        f"{comparands.OF_MODELS}"
    )


def _rms(x: NDArray) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0
