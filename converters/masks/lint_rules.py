"""The checks of the mask linter, each with its message."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import DTypeLike

from jaxmha import Mask
from jaxmha.arrays import to_dtype
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.masks.lint_patterns import (
    TURNS,
    hides_longest,
    is_batch,
    is_inverted_batch,
    is_inverted_causal,
    is_inverted_padding,
    one_block,
    paddings,
    products,
    turned,
)
from jaxmha.converters.masks.spec import MaskArg, is_additive
from jaxmha.dims import parse

FLOAT16_LOWEST = -65504.0
# Additive values <= CONSTANT are meant to exclude a key. A constant > SWALLOWS is too weak: adding
# it does not round the logits away, so that a fully masked row attends as if unmasked.
CONSTANT, SWALLOWS = -1e3, -1e8


class Finding(NamedTuple):
    """One suspicious argument: the name of the problem, the argument, a description, and a fix."""

    name: str
    argument: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.argument}: {self.what}. {self.fix}."


class Given(NamedTuple):
    """A mask argument, the axes by which it is read, and the pairs that it allows.

    `keep` is True where a pair is allowed, and `letters` are its axes; the axis `(B N)` is split in
    two if N is known. `sizes`: known sizes of the call. `dtype`: the compute dtype. `made_of`: the
    `Mask` from which the array was made, if the caller gave one.
    """

    argument: MaskArg
    array: NDArray
    keep: NDArray
    letters: tuple[str, ...]
    sizes: Mapping[str, int]
    dtype: str
    made_of: Mask | None


def given(
    argument: MaskArg,
    array: NDArray,
    sizes: Mapping[str, int],
    dtype: object,
    made_of: Mask | None = None,
) -> Given | None:
    """Reads a mask argument by its axes.

    Returns None for lengths, and if no axes have the rank of the array; `import_masks` then raises.

    >>> given(MaskArg("mask", ("#S", "#T #S")), np.ones((2, 3), bool), {}, None).letters
    ('T', 'S')
    """
    axes = next((a for a in argument.axes if len(parse(a)) == array.ndim), None)
    if axes is None or argument.field.endswith("lengths"):
        return None
    added = array.dtype != np.bool_ and argument.other == "added"
    keep = ~blocked_by(array) if added else (array != 0) == argument.keep
    if not added and is_additive(array):
        # An additive mask (0 = attend) in a Boolean argument: go on with the pairs that it means.
        # `_cast` reports it where nonzero numbers are allowed; elsewhere `import_masks` raises.
        keep = array == 0
    letters: list[str] = []
    shape: list[int] = []
    for group, size in zip(parse(axes.replace("#", "")), array.shape, strict=True):
        N = sizes.get("N", 0)
        split = len(group) == 2 and N and size % N == 0
        letters += group if split else ["".join(group)]
        shape += [size // N, N] if split else [size]
    computed = _name_of(array.dtype if dtype is None else dtype)
    return Given(argument, array, keep.reshape(shape), tuple(letters), sizes, computed, made_of)


def blocked_by(added: NDArray) -> NDArray:
    """True where an additive value is meant to exclude the key.

    >>> blocked_by(np.array([0.0, -1e4, -np.inf])).tolist(), blocked_by(np.array([-2e3, 1.0])).any()
    ([False, True, True], np.False_)
    """
    with np.errstate(invalid="ignore"):
        values = added.astype(np.float64)
    constant = _constant(values)
    lowest = FLOAT16_LOWEST / 2 if constant is None else constant
    return values <= lowest


def _constant(values: NDArray) -> float | None:
    """The constant c if the finite values are only 0 and c, and c is at most `CONSTANT`."""
    finite = values[np.isfinite(values)]
    lowest = float(finite.min(initial=0))
    two = bool(np.all((finite == 0) | (finite == lowest)))
    return lowest if two and lowest <= CONSTANT else None


def _name_of(dtype: object) -> str:
    """The name of a dtype of NumPy, JAX, torch or TensorFlow."""
    if type(dtype).__module__.split(".")[0] == "torch":
        return str(dtype).removeprefix("torch.")
    name = getattr(dtype, "name", None)
    if isinstance(dtype, str):
        return dtype
    return name if isinstance(name, str) else str(to_dtype(cast(DTypeLike, dtype)))


def _flat(keep: NDArray, tail: int) -> NDArray:
    """Merges all axes but the last `tail` into one."""
    lead = keep.ndim - tail
    return keep.reshape(math.prod(keep.shape[:lead]), *keep.shape[lead:])


def _slices(given: Given) -> NDArray | None:
    """All (T, S) slices; None unless both axes are present and longer than 1."""
    if given.letters[-2:] != ("T", "S") or min(given.keep.shape[-2:]) < 2:
        return None
    slices = _flat(given.keep, 2)
    return slices if len(slices) else None


def _rows(given: Given) -> NDArray | None:
    """The padding `(B, S)` of all batch rows; None if the argument holds more than padding."""
    if given.letters[-1] != "S" or not given.keep.size:
        return None
    keep = given.keep
    batch = given.letters.index("B") if "B" in given.letters else None
    for axis in range(keep.ndim - 1):
        if axis != batch:
            if not (keep == keep.take([0], axis)).all():
                return None
            keep = keep.take([0], axis)
    return _flat(keep, 1)


def _inverted(given: Given) -> Finding | None:
    polarity = _polarity(given)
    causal = "it hides the past and the diagonal and shows the future: a causal mask"
    padding = "it hides every token of the longest row and shows what looks like padding"
    slices, rows, what, fix = _slices(given), _rows(given), None, _negation(given)
    dense = given.made_of is None or given.made_of.array is not None
    if given.made_of is not None and given.made_of.key_value_padding is not None:
        rows = np.asarray(given.made_of.key_value_padding)
    elif not dense:
        return None  # only a Boolean array could be inverted
    if slices is not None and is_inverted_causal(slices):
        what = f"{causal} whose polarity is inverted, since {polarity}"
    elif rows is not None and is_inverted_padding(~rows, rows.shape[1]):
        what = f"{padding}, since {polarity}"
    elif slices is not None and dense and hides_longest(slices):
        what = f"next to a causal triangle {padding}, since {polarity}"
        fix = "Negate the padding before it joins the triangle (`~padding`)"
    elif slices is not None and dense:
        queries, tokens = products(~slices)
        outer = (~slices == (queries[:, :, None] & tokens[:, None])).all() and one_block(queries)
        if outer and is_inverted_padding(tokens, tokens.shape[1]) and queries.all(1).any():
            what = f"{padding}, since {polarity}"
    if what is None:
        return None
    return Finding("inverted", given.argument.name, what, fix)


def _turned(given: Given) -> Finding | None:
    slices = _slices(given)
    how = "" if slices is None else turned(slices)
    if not how:
        return None
    batch = ", or padding of a batch, whose axes are then missing" * (given.letters == ("T", "S"))
    back = TURNS[how] if given.made_of is None else "Mask.causal()"
    return Finding(
        "turned",
        given.argument.name,
        f"it is a causal triangle upside down: {how}, so that queries see the future{batch}",
        f"Pass `{back}`, unless the model is to read backwards",
    )


def _left_padding(given: Given) -> Finding | None:
    """Finds masks that keep only the last keys of every row: left or inverted right padding."""
    rows, slices = _rows(given), _slices(given)
    chunk = slices is not None and slices.shape[1] != slices.shape[2]  # decoding with a cache
    if rows is None and slices is not None:
        queries, tokens = products(~slices)  # inverted padding of queries and keys
        outer = (~slices == (queries[:, :, None] & tokens[:, None])).all() and one_block(queries)
        rows = ~tokens if outer and queries[:, 0].all() else None
    if rows is None or chunk or not (rows[:, -1].all() and not rows[:, 0].any()):
        return None
    if not one_block(rows):
        return None
    return Finding(
        "left padding",
        given.argument.name,
        "every row hides its first keys and keeps only its last: this is left padding, or right "
        f"padding the other way round, since {_polarity(given)}",
        f"{_negation(given)} if the padding is on the right",
    )


def _polarity(given: Given) -> str:
    return f"here True means {'attend' if given.argument.keep else 'blocked'}"


def _negation(given: Given) -> str:
    added = given.array.dtype != np.bool_ and given.argument.other == "added"
    if added:
        return "Exclude the others, `np.where(mask == 0, -np.inf, 0)`"
    negated = "~mask" if given.array.dtype == np.bool_ else "mask == 0"
    negated = "mask != 0" if is_additive(given.array) else negated
    if given.made_of is not None:
        array, padding = given.made_of.array, given.made_of.key_value_padding
        negated = "Mask.dense(~mask.to_array(T, S))" if array is None else "Mask.dense(~array)"
        negated = negated if padding is None else "Mask.padding(key_value=~padding)"
    return f"Pass its negation (`{negated}`)"


def _zero_one(given: Given) -> Finding | None:
    if given.argument.other != "added" or given.array.dtype == np.bool_:
        return None
    if set(np.unique(given.array)) != {0, 1}:
        return None
    return Finding(
        "0/1 added",
        given.argument.name,
        "its values are 0 and 1 and would be added to the logits: nothing is excluded",
        f"Pass Booleans (True means {'attend' if given.argument.keep else 'blocked'})",
    )


def _cast(given: Given) -> Finding | None:
    if given.argument.other != "nonzero" or not is_additive(given.array):
        return None
    return Finding(
        "additive cast",
        given.argument.name,
        "it is an additive mask (0 keeps), and is read as Boolean: 0 would be blocked, and what "
        "it blocks would attend",
        "Pass `mask == 0`",
    )


def _overflow(given: Given) -> Finding | None:
    if given.argument.other != "added" or given.dtype != "float16" or given.array.dtype == np.bool_:
        return None
    values = given.array.astype(np.float64)
    finite = values[np.isfinite(values)]
    if not (finite < FLOAT16_LOWEST).any():
        return None
    return Finding(
        "float16",
        given.argument.name,
        f"{finite.min():.3g} in float16: below {FLOAT16_LOWEST:.0f} it does not exist and becomes "
        "-inf, so that a row of nothing else may become NaN",
        "Pass Booleans, or -inf",
    )


def _weak(given: Given) -> Finding | None:
    if given.argument.other != "added" or given.array.dtype == np.bool_:
        return None
    constant = _constant(given.array.astype(np.float64))
    if constant is None or constant <= SWALLOWS or constant == FLOAT16_LOWEST:
        return None
    return Finding(
        "constant",
        given.argument.name,
        f"{constant:.3g} stands for exclusion and is too small for it: a row of nothing else "
        "attends as if unmasked, and a key lowered twice drops out if others are lowered once",
        "Pass Booleans, or -inf",
    )


def _head_order(given: Given) -> Finding | None:
    if given.letters[:2] != ("B", "N") or "(" not in "".join(given.argument.axes):
        return None
    B, N, *_ = given.keep.shape
    if B < 2 or N < 2 or not given.keep.size:
        return None
    values = given.array.reshape(given.keep.shape)
    other = given.array.reshape(N, B, *given.array.shape[1:])
    of_batch = paddings(given.keep[0]) is not None if B == N else True
    if (values == values[:, :1]).all() or not (other == other[:1]).all() or not of_batch:
        return None
    if B != N and (values == values[:1]).all():
        return None  # a correct mask per head, equal for all batch rows
    return Finding(
        "head order",
        given.argument.name,
        f"its first axis of {B * N} repeats whole batches: it looks like (N B) where (B N) is read, "
        "so that rows get the masks of other rows",
        f"Repeat each batch row N={N} times in place (`np.repeat(mask, {N}, axis=0)`)",
    )


def _wrong_axis(given: Given) -> Finding | None:
    """Finds a batch of paddings whose batch axis is read as another axis."""
    keep, letters, sizes = given.keep, given.letters, given.sizes
    if letters not in (("T", "S"), ("N", "T", "S")) or len(keep) < 2 or not keep.size:
        return None
    letter, B, size = letters[0], sizes.get("B"), sizes.get(letters[0])
    fits = all(sizes.get(a, n) == n for a, n in zip(letters[1:], keep.shape[1:], strict=True))
    if B not in (None, len(keep)) or not fits:
        return None
    by_size = B is not None and size not in (None, len(keep))
    by_rows = is_batch(keep, size) if letter == "T" else paddings(keep) is not None
    inverted = letter == "T" and size != len(keep) and is_inverted_batch(keep)
    if not (by_size or inverted or (by_rows and not (letter == "T" and turned(keep[None])))):
        return None
    wanted, sign = "[:, None, None, :]" if letter == "T" else "[:, None]", "~" * inverted
    fix = f"Give it its axes: `{sign}mask{wanted}`"
    if letter == "T" and given.made_of is not None:
        fix = f"Pass `Mask.padding(key_value={sign}array)`"
    elif letter == "T" and len(parse(given.argument.axes[-1])) < 4:
        fix = f"Pass {'its negation' if inverted else 'it'} as `key_padding_mask`"
    return Finding(
        "wrong axis",
        given.argument.name,
        f"its first axis of {len(keep)} is read as {letter}, and looks like the batch (B): padding "
        f"of one batch row would be applied to one {'query' if letter == 'T' else 'head'} of all "
        f"({_polarity(given)})",
        fix,
    )


CHECKS: tuple[Callable[[Given], Finding | None], ...] = (
    _inverted,
    _turned,
    _left_padding,
    _zero_one,
    _cast,
    _overflow,
    _weak,
    _head_order,
    _wrong_axis,
)
