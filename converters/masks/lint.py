"""What is suspicious about mask arguments, in plain words, each with its fix."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from jaxmha.axes import parse
from jaxmha.converters.arrays import NDArray, to_numpy
from jaxmha.converters.masks.argument import MaskArg
from jaxmha.semantics import one_of

FRAMEWORKS = ("torch", "sdpa", "keras", "flax", "jax", "huggingface")
SIZES = {"B": "batch_size", "N": "num_heads", "T": "query_length", "S": "key_length"}
FLOAT16_LOWEST = -65504.0


class Finding(NamedTuple):
    """One suspicion: its name, the argument, what is wrong, and what to do."""

    name: str
    argument: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.argument}: {self.what}. {self.fix}."


class Given(NamedTuple):
    """An argument, how its axes are read, and the pairs that the framework attends by it.

    `letters` are the axes of `keep`, `(B N)` split in two where N is known.
    """

    argument: MaskArg
    array: NDArray
    keep: NDArray
    letters: tuple[str, ...]
    sizes: Mapping[str, int]
    dtype: str


def lint_masks(
    framework: str,
    *,
    batch_size: int | None = None,
    num_heads: int | None = None,
    query_length: int | None = None,
    key_length: int | None = None,
    dtype: Any = None,
    **arguments: Any,
) -> list[Finding]:
    """What is suspicious about the mask arguments of one call; nothing that is right is named.

    Args:
      framework: one of `torch` (nn.MultiheadAttention), `sdpa`, `keras`, `flax`, `jax`,
        `huggingface`.
      batch_size, num_heads, query_length, key_length: B, N, T, S of the call; the more are
        known, the more is seen.
      dtype: compute dtype of the model, where it is not that of the mask.
      arguments: the framework's own, as `import_masks` takes them.

    Raises:
      ValueError: an unknown framework.

    >>> padding = np.array([[True, True, False], [True, True, True]])  # True = a token
    >>> for finding in lint_masks("torch", key_padding_mask=padding):
    ...     print(finding.name)
    inverted
    empty rows
    """
    one_of("framework", framework, FRAMEWORKS)
    table: tuple[MaskArg, ...] = _module(framework).ARGUMENTS
    given = (batch_size, num_heads, query_length, key_length)
    sizes = {letter: n for letter, n in zip(SIZES, given, strict=True) if n is not None}
    found: list[Finding] = []
    for argument in table:
        value = arguments.get(argument.name)
        if value is None or (read := _given(argument, to_numpy(value), sizes, dtype)) is None:
            continue
        found += [finding for check in CHECKS if (finding := check(read)) is not None]
    found += _is_causal(framework, arguments, sizes)
    found += _whole(framework, arguments, sizes, {finding.name for finding in found})
    return found


def _module(framework: str) -> Any:
    return import_module(f"jaxmha.converters.masks.{framework}")


def _given(argument: MaskArg, array: NDArray, sizes: Mapping[str, int], dtype: Any) -> Given | None:
    """None where no axes fit: `import_masks` says so itself."""
    axes = next((a for a in argument.axes if len(parse(a)) == array.ndim), None)
    if axes is None or argument.field.endswith("lengths"):
        return None
    added = array.dtype != np.bool_ and argument.other == "added"
    keep = array > FLOAT16_LOWEST / 2 if added else (array != 0) == argument.keep
    letters: list[str] = []
    shape: list[int] = []
    for group, size in zip(parse(axes.replace("#", "")), array.shape, strict=True):
        N = sizes.get("N", 0)
        split = len(group) == 2 and N and size % N == 0
        letters += group if split else ["".join(group)]
        shape += [size // N, N] if split else [size]
    own = {a: n for a, n in zip(letters, shape, strict=True) if n > 1}
    computed = str(np.dtype(dtype) if dtype is not None else array.dtype)
    return Given(argument, array, keep.reshape(shape), tuple(letters), {**own, **sizes}, computed)


def _pairs(given: Given) -> NDArray | None:
    """Every (T, S) slice, where both axes are there and longer than 1."""
    if given.letters[-2:] != ("T", "S") or min(given.keep.shape[-2:]) < 2:
        return None
    return given.keep.reshape(-1, *given.keep.shape[-2:])


def _rows(given: Given) -> NDArray | None:
    """Padding of every batch row `(B, S)`, where that is all that the argument says."""
    if given.letters[-1] != "S":
        return None
    axes = given.keep.shape[:-1]
    batch = given.letters.index("B") if "B" in given.letters else None
    if any(n > 1 for i, n in enumerate(axes) if i != batch):
        return None
    return given.keep.reshape(-1, given.keep.shape[-1])


def _one_block(rows: NDArray) -> bool:
    """Whether True is a prefix of every row, or a suffix of every row: tokens beside padding."""
    steps = np.diff(rows.astype(int), axis=1)
    return bool((steps <= 0).all() or (steps >= 0).all())


def _paddings(slices: NDArray) -> NDArray | None:
    """Padding `(B, S)` of a batch of `(T, S)` slices that differ by it alone."""
    rows = np.asarray(slices.any(1))
    if not (slices == (slices.any(0, keepdims=True) & rows[:, None])).all():
        return None
    differ = not (rows == rows[:1]).all()
    batch = differ and rows.all(1).any() and rows.any(1).all() and _one_block(rows)
    return rows if batch else None


def _band(rows: NDArray) -> bool:
    """Whether both edges move to the right from row to row, as in a causal mask or a window."""
    edges = [rows.argmax(1), rows.shape[1] - rows[:, ::-1].argmax(1)]
    return all((np.diff(edge) >= 0).all() for edge in edges)


def _inverted(given: Given) -> Finding | None:
    polarity = "attend" if given.argument.keep else "blocked"
    if (slices := _pairs(given)) is not None:
        T, S = slices.shape[1:]
        for offset in {0, S - T}:
            past = np.tri(T, S, offset, dtype=bool)
            if not slices[:, past].any() and all(x[~past].any() for x in slices):
                return Finding(
                    "inverted",
                    given.argument.name,
                    "it hides the past and the diagonal and shows the future: a causal mask whose "
                    f"polarity is inverted, since here True means {polarity}",
                    "Pass its negation (`~mask`)",
                )
    rows = _rows(given)
    if rows is None or rows.shape[1] < 2 or not _one_block(rows):
        return None
    if (~rows).all(1).any() and not rows.all(1).any():
        return Finding(
            "inverted",
            given.argument.name,
            "it hides every token of the longest row and shows what looks like padding, since "
            f"here True means {polarity}",
            "Pass its negation (`~mask`)",
        )
    return None


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
    array = given.array
    if given.argument.other != "nonzero" or not np.issubdtype(array.dtype, np.floating):
        return None
    if not (array == 0).any() or (array > 0).any() or not (array != 0).any():
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
    finite = given.array[np.isfinite(given.array)]
    if not (finite.astype(np.float64) <= FLOAT16_LOWEST / 4).any():
        return None
    return Finding(
        "float16",
        given.argument.name,
        f"{finite.min():.3g} in float16: below {FLOAT16_LOWEST:.0f} it does not exist, and near it "
        "sums overflow, so that rows become NaN or unmasked",
        "Pass Booleans, or -inf",
    )


def _head_order(given: Given) -> Finding | None:
    if given.letters[:2] != ("B", "N") or "(" not in "".join(given.argument.axes):
        return None
    B, N, *_ = given.keep.shape
    if B < 2 or N < 2:
        return None
    values = given.array.reshape(given.keep.shape)
    other = given.array.reshape(N, B, *given.array.shape[1:])
    of_batch = _paddings(given.keep[0]) is not None if B == N else True
    if (values == values[:, :1]).all() or not (other == other[:1]).all() or not of_batch:
        return None
    if B != N and (values == values[:1]).all():
        return None  # masks of heads, the same for every batch row
    return Finding(
        "head order",
        given.argument.name,
        f"its first axis of {B * N} repeats whole batches: it looks like (N B) where (B N) is read, "
        "so that rows get the masks of other rows",
        f"Repeat each batch row N={N} times in place (`np.repeat(mask, {N}, axis=0)`)",
    )


def _wrong_axis(given: Given) -> Finding | None:
    """A batch of paddings whose batch axis is read as another of the same size."""
    B = given.sizes.get("B")
    if B is None or B < 2:
        return None
    shape, letters = given.keep.shape, given.letters
    if letters == ("T", "S") and shape[0] == B == given.sizes.get("T"):
        paddings, wanted = _paddings(given.keep[:, None]), "[:, None, None, :]"
        if paddings is None or _band(paddings) or paddings.diagonal().all():
            return None
    elif letters == ("N", "T", "S") and shape[0] == B == given.sizes.get("N"):
        paddings, wanted = _paddings(given.keep), "[:, None]"
        if paddings is None:
            return None
    else:
        return None
    return Finding(
        "wrong axis",
        given.argument.name,
        f"its first axis of {B} is read as {letters[0]}, and looks like the batch (B={B}): padding of "
        f"one batch row would be applied to one {'query' if letters[0] == 'T' else 'head'} of all",
        f"Give it its axes: `mask{wanted}`",
    )


CHECKS: tuple[Callable[[Given], Finding | None], ...] = (
    _inverted,
    _zero_one,
    _cast,
    _overflow,
    _head_order,
    _wrong_axis,
)


def _is_causal(
    framework: str, arguments: Mapping[str, Any], sizes: Mapping[str, int]
) -> Iterator[Finding]:
    if not arguments.get("is_causal"):
        return
    name = "is_causal"
    if framework == "flax" and arguments.get("decode"):
        yield Finding(
            name,
            name,
            "with decode every step attends key 0 only",
            "Leave is_causal out in decoding",
        )
    mask = arguments.get("attn_mask")
    if framework == "sdpa" and mask is not None:
        yield Finding(
            name,
            name,
            "beside attn_mask it is joined with it by one kernel and refused by another",
            "Put the triangle into attn_mask and leave is_causal out",
        )
    if framework != "torch":
        return
    if mask is None:
        yield Finding(
            name,
            name,
            "without attn_mask torch refuses it, or ignores it on the fast path of eval: then "
            "nothing is causal",
            "Pass the triangle as attn_mask too",
        )
        return
    array = to_numpy(mask)
    blocked = array if array.dtype == np.bool_ else array == -np.inf
    if (blocked == (np.tri(*blocked.shape[-2:]) == 0)).all():
        return
    dropped = arguments.get("need_weights", True) is False and (
        arguments.get("key_padding_mask") is None
    )
    yield Finding(
        name,
        name,
        "torch drops the attn_mask given and uses the top-left triangle"
        if dropped
        else "torch ignores it, since an attn_mask that is not the triangle is given",
        "Leave is_causal out, and put the triangle into attn_mask if it is wanted",
    )


def _whole(
    framework: str, arguments: dict[str, Any], sizes: Mapping[str, int], known: set[str]
) -> Iterator[Finding]:
    """Findings about all arguments together: refused, or rows with nothing left."""
    if "N" in sizes and framework != "sdpa":
        arguments = {"num_heads": sizes["N"], **arguments}
    try:
        mask, bias = _module(framework).import_masks(**arguments)
    except (ValueError, TypeError) as refusal:
        if "is_causal" not in known:
            yield Finding("refused", "arguments", str(refusal).rstrip("."), "See the message")
        return
    fields = {} if mask is None else {"T": mask.query_padding, "S": mask.key_value_padding}
    T, S = (
        sizes.get(a) or next(iter(_lengths(a, axis, mask, bias, fields)), 1)
        for a, axis in (("T", -2), ("S", -1))
    )
    if not T or not S:
        return
    allowed = np.ones((1, 1, T, S), bool)
    if mask is not None:
        absent = replace(mask, query_padding=None, query_lengths=None)
        allowed = allowed & np.asarray(absent.to_array(T, S, np))
    if bias is not None:
        allowed = allowed & (np.asarray(bias, np.float64) > -1e30)
    empty = ~allowed.any(-1)
    if empty.any():
        b, _, t = np.argwhere(empty)[0]
        yield Finding(
            "empty rows",
            "arguments",
            f"{empty.sum()} of {empty.size} rows have nothing left to attend, the first at batch "
            f"row {b}, query {t}: frameworks answer 0, NaN or a mean",
            "Leave each query one key, or name the answer (`fully_masked=`)",
        )


def _lengths(
    letter: str, axis: int, mask: Any, bias: Any, fields: Mapping[str, Any]
) -> Iterator[int]:
    """Sizes of an axis that the arrays of a mask and a bias show."""
    arrays = [bias, None if mask is None else mask.array]
    yield from (x.shape[axis] for x in arrays if x is not None and x.shape[axis] > 1)
    if fields.get(letter) is not None:
        yield fields[letter].shape[-1]
