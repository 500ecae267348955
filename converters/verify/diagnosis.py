"""Diagnoses known conversion errors that no shape check detects.

A square matrix has the same shape when it is transposed or split wrongly, so a wrong conversion
loads without an error. Each known error is a function of two leaves, or one that rewrites correct
leaves. An error that turns the weights of one source into the weights of the other, bit by bit, is
the explanation.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from einops import rearrange

from jaxmha import MHAParams
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.params import CANONICAL, leaves

Leaves = Mapping[str, NDArray]
_ROLES = (
    "query.kernel", "key.kernel", "value.kernel", "out.kernel",
    "query.bias", "key.bias", "value.bias",
)  # fmt: skip


class LeafDiagnosis(NamedTuple):
    """A conversion error within single leaves, and its remedy.

    `explains(name, x, y)` is True if the error turns one of the two arrays into the other.
    """

    name: str
    remedy: str
    explains: Callable[[str, NDArray, NDArray], bool]


class SwapDiagnosis(NamedTuple):
    """A conversion error that mixes several leaves, and its remedy.

    `rewrite` yields every dict of leaves that the error may produce from correct leaves.
    """

    name: str
    remedy: str
    rewrite: Callable[[Leaves], Iterator[dict[str, NDArray]]]


def explain(a: MHAParams, b: MHAParams) -> str | None:
    """Returns the single conversion error that relates the weights of a and b, or None.

    The weights do not show which of the two is correct.

    >>> from jaxmha import Projection
    >>> q, k, v = (Projection(np.random.default_rng(i).normal(size=(6, 2, 3))) for i in range(3))
    >>> print(explain(MHAParams(q, k, v), MHAParams(k, q, v)))
    query and key exchanged: call or pack them as (query, key, value)
    """
    for one, other in of_one_dtype(a, b):
        if _equal(one, other):
            return None
        for swap in SWAP_DIAGNOSES:
            if any(_equal(rewritten, other) for rewritten in swap.rewrite(one)):
                return f"{swap.name}: {swap.remedy}"
        for known in LEAF_DIAGNOSES:
            if found := _leaves_hit(known, one, other):
                return f"{known.name} in {', '.join(found)}: {known.remedy}"
    return None


class Explained(NamedTuple):
    """Differing leaves and the error that explains them; `remedy` is None if no known one does."""

    name: str
    remedy: str | None
    leaves: tuple[str, ...]


def explain_each(x: Leaves, y: Leaves) -> list[Explained]:
    """Groups all differing leaves by the error that explains them; several errors may occur.

    Unexplained leaves are grouped by role, with all biases together.

    >>> x = {"query.kernel": np.ones((6, 2, 3)), "out.bias": np.ones(6)}
    >>> y = {"query.kernel": np.zeros((6, 2, 3))}
    >>> [(found.name, found.leaves) for found in explain_each(x, y)]
    [('dropped bias', ('out.bias',)), ('query weights', ('query.kernel',))]
    """
    absent = np.zeros(0)
    left = [n for n in {**x, **y} if n not in x or n not in y or not _same(x[n], y[n])]
    left = [n for n in left if not harmless(n, x.get(n), y.get(n))]
    found: list[Explained] = []
    for swap in SWAP_DIAGNOSES:
        for made in swap.rewrite(x):
            moved = [n for n in made if n not in x or not _same(made[n], x[n])]
            if moved and all(n in left and n in y and _same(made[n], y[n]) for n in moved):
                found.append(Explained(swap.name, swap.remedy, tuple(moved)))
                left = [n for n in left if n not in moved]
    for known in LEAF_DIAGNOSES:
        hit = [n for n in left if known.explains(n, x.get(n, absent), y.get(n, absent))]
        if hit:
            found.append(Explained(known.name, known.remedy, tuple(hit)))
            left = [n for n in left if n not in hit]
    roles: dict[str, list[str]] = {}
    for n in left:
        role, _, part = n.partition(".")
        named = "biases" if part == "bias" else f"{role.replace('out', 'output')} weights"
        roles.setdefault(named, []).append(n)
    return found + [Explained(name, None, tuple(hit)) for name, hit in roles.items()]


def harmless(name: str, x: NDArray | None, y: NDArray | None) -> bool:
    """True if the leaf is a bias that is absent or all zeros in each of the two sources."""
    return name.endswith(".bias") and all(
        operand is None or not operand.any() for operand in (x, y)
    )


def of_one_dtype(a: MHAParams, b: MHAParams) -> Iterator[tuple[Leaves, Leaves]]:
    """Yields the leaves of both, then each rounded to the dtype of the other, if that has only one.

    Biases that are absent or all zeros in both are left out.
    """
    x, y = ({n: to_numpy(leaf) for n, leaf in leaves(operand).items()} for operand in (a, b))
    zero = [n for n in {**x, **y} if harmless(n, x.get(n), y.get(n))]
    x, y = ({n: leaf for n, leaf in operand.items() if n not in zero} for operand in (x, y))
    yield x, y
    kinds = [{leaf.dtype for leaf in operand.values()} for operand in (x, y)]
    if kinds[0] != kinds[1]:
        if len(kinds[1]) == 1:
            yield _rounded(x, *kinds[1]), y
        if len(kinds[0]) == 1:
            yield x, _rounded(y, *kinds[0])


def _rounded(operand: Leaves, dtype: np.dtype[Any]) -> Leaves:
    with np.errstate(over="ignore"):
        return {name: leaf.astype(dtype) for name, leaf in operand.items()}


def _leaves_hit(known: LeafDiagnosis, x: Leaves, y: Leaves) -> list[str]:
    """Returns the names of all differing leaves if the error explains every one, else []."""
    hit = [n for n in {**x, **y} if n not in x or n not in y or not _same(x[n], y[n])]
    absent = np.zeros(0)
    explained = (known.explains(n, x.get(n, absent), y.get(n, absent)) for n in hit)
    return hit if all(explained) else []


def _rewriting(
    rewrite: Callable[[str, NDArray], Iterator[NDArray]],
) -> Callable[[str, NDArray, NDArray], bool]:
    """Returns a predicate: `rewrite` turns one leaf of a pair into the other, either way."""

    def explains(name: str, x: NDArray, y: NDArray) -> bool:
        return any(
            _same(made, other)
            for one, other in ((x, y), (y, x))
            if one.size
            for made in rewrite(name, one)
        )

    return explains


def _equal(x: Leaves, y: Leaves) -> bool:
    return x.keys() == y.keys() and all(_same(x[name], y[name]) for name in x)


def _same(x: NDArray, y: NDArray) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()


def _heads_last(name: str, array: NDArray) -> NDArray | None:
    """Transposes a leaf to (other axes, heads, head size); None if it has no head axis."""
    if name == "out.bias" or name not in _ROLES:
        return None
    if name == "out.kernel":
        return rearrange(array, "N h D -> D N h")
    return array if array.ndim == 3 else array[None]


def _restored(name: str, array: NDArray, like: NDArray) -> NDArray:
    if name == "out.kernel":
        array = rearrange(array, "D N h -> N h D")
    return np.ascontiguousarray(array.reshape(array.shape if like.ndim == 3 else array.shape[1:]))


def _transposed(name: str, array: NDArray) -> Iterator[NDArray]:
    if name.endswith("kernel"):
        matrix = array.reshape(
            (-1, array.shape[2]) if name == "out.kernel" else (array.shape[0], -1)
        )
        if matrix.shape[0] == matrix.shape[1]:
            yield np.ascontiguousarray(matrix.T).reshape(array.shape)


def _heads_and_size_exchanged(name: str, array: NDArray) -> Iterator[NDArray]:
    heads = _heads_last(name, array)
    if heads is not None:
        _, N, H = heads.shape
        merged = rearrange(heads, "D N H -> D (N H)")
        yield _restored(name, rearrange(merged, "D (H N) -> D N H", N=N, H=H), array)


def _rotary_order(name: str, array: NDArray) -> Iterator[NDArray]:
    heads = _heads_last(name, array)
    if name.split(".")[0] in ("query", "key") and heads is not None and heads.shape[2] % 2 == 0:
        turned = rearrange(heads, "D N (pair two) -> D N (two pair)", two=2)
        yield _restored(name, turned, array)


def _dropped(name: str, x: NDArray, y: NDArray) -> bool:
    return name.endswith(".bias") and bool(x.size) != bool(y.size)


def _zero(name: str, x: NDArray, y: NDArray) -> bool:
    return name.endswith(".bias") and x.shape == y.shape and bool(x.any()) != bool(y.any())


def _permuted(name: str, x: NDArray, y: NDArray) -> bool:
    one, other = (_heads_last(name, operand) if operand.size else None for operand in (x, y))
    if one is None or other is None or one.shape != other.shape:
        return False
    orders = (
        sorted(operand[:, n].tobytes() for n in range(operand.shape[1])) for operand in (one, other)
    )
    return next(orders) == next(orders)


def _swap_roles(one: str, other: str) -> Callable[[Leaves], Iterator[dict[str, NDArray]]]:
    def rewrite(x: Leaves) -> Iterator[dict[str, NDArray]]:
        swapped = {one: other, other: one}
        for parts in (("kernel", "bias"), ("kernel",), ("bias",)):
            moved = {}
            for name, array in x.items():
                role, _, part = name.partition(".")
                moved[f"{swapped.get(role, role)}.{part}" if part in parts else name] = array
            yield moved

    return rewrite


def _packing(wrote: str, read: str) -> Callable[[Leaves], Iterator[dict[str, NDArray]]]:
    def rewrite(x: Leaves) -> Iterator[dict[str, NDArray]]:
        packed = {part: _repacked(x, part, wrote, read) for part in ("kernel", "bias")}
        for parts in (("kernel", "bias"), ("kernel",), ("bias",)):
            yield dict(x) | {k: leaf for part in parts for k, leaf in packed[part].items()}

    return rewrite


def _repacked(x: Leaves, part: str, wrote: str, read: str) -> dict[str, NDArray]:
    """Packs kernels or biases of query, key and value in the order `wrote`; unpacks as `read`.

    Returns {} if one of the three is missing, or their shapes differ.
    """
    names = [f"{role}.{part}" for role in ("query", "key", "value") if f"{role}.{part}" in x]
    if len(names) < 3 or len({x[name].shape for name in names}) > 1:
        return {}
    like = x[names[0]]
    stack = np.stack([x[name] if like.ndim == 3 else x[name][None] for name in names])
    rows = rearrange(stack, f"qkv D N H -> D ({wrote})")
    sizes = {"qkv": 3, "N": stack.shape[2], "H": stack.shape[3]}
    parts = rearrange(rows, f"D ({read}) -> qkv D N H", **sizes)
    return {
        name: np.ascontiguousarray(array.reshape(like.shape))
        for name, array in zip(names, parts, strict=True)
    }


def _split_as(x: Leaves, swapped: bool) -> Iterator[dict[str, NDArray]]:
    """Yields all leaves with their head axes split into another number of heads.

    `swapped`: into H heads of N features, as if N and H were exchanged; otherwise into every other
    number of heads that divides the axis.
    """
    sizes: dict[str, int] = {}
    for name, array in x.items():
        sizes |= dict(zip(CANONICAL[name].split(), array.shape, strict=True))
    if not sizes.keys() >= set("NKHh"):
        return
    N, K, H, h = (sizes[letter] for letter in "NKHh")
    for heads in (n for n in range(1, N * H + 1) if n != N and (n == H) == swapped):
        if any(product % heads for product in (N * H, N * h)) or K * heads % N:
            continue
        new = sizes | {"N": heads, "K": K * heads // N, "H": N * H // heads, "h": N * h // heads}
        shapes = {name: [new[letter] for letter in CANONICAL[name].split()] for name in x}
        if all(x[name].size == np.prod(shape) for name, shape in shapes.items()):
            yield {name: array.reshape(shapes[name]) for name, array in x.items()}


SWAP_DIAGNOSES: tuple[SwapDiagnosis, ...] = (
    SwapDiagnosis(
        "query and key exchanged",
        "call or pack them as (query, key, value)",
        _swap_roles("query", "key"),
    ),
    SwapDiagnosis(
        "key and value exchanged",
        "Keras is called as (query, value, key), everything else as (query, key, value)",
        _swap_roles("key", "value"),
    ),
    SwapDiagnosis(
        "interleaved packing",
        "rows packed as (qkv N H) were read head by head, as (N qkv H)",
        _packing("qkv N H", "N qkv H"),
    ),
    SwapDiagnosis(
        "interleaved packing",
        "rows packed head by head, as (N qkv H), were read as (qkv N H)",
        _packing("N qkv H", "qkv N H"),
    ),
    SwapDiagnosis(
        "heads and head_dim exchanged",
        "one source has N heads of size H, the other H heads of size N: give num_heads=N, head_dim=H",
        lambda x: _split_as(x, swapped=True),
    ),
    SwapDiagnosis(
        "wrong head count",
        "give num_heads from the model's configuration",
        lambda x: _split_as(x, swapped=False),
    ),
)
LEAF_DIAGNOSES: tuple[LeafDiagnosis, ...] = (
    LeafDiagnosis("dropped bias", "copy it, or check that the source has none", _dropped),
    LeafDiagnosis(
        "zero bias",
        "one source has the zeros that Keras and Flax start with: copy the other bias, if both "
        "should be one layer",
        _zero,
    ),
    LeafDiagnosis(
        "transposed kernel",
        "torch Linear is (out, in), Dense and Conv1D are (in, out)",
        _rewriting(_transposed),
    ),
    LeafDiagnosis(
        "heads and head size exchanged",
        "the merged axis is (N H), heads outermost",
        _rewriting(_heads_and_size_exchanged),
    ),
    LeafDiagnosis(
        "head order",
        "the heads are the same in another order; harmless if every kernel and bias has it",
        _permuted,
    ),
    LeafDiagnosis(
        "rotary convention",
        "rows are ordered for pairs (2p, 2p + 1) in one source and (p, p + H / 2) in the other: "
        "permute query and key, or set rope(interleaved=)",
        _rewriting(_rotary_order),
    ),
)
