"""Did a conversion keep everything? Every tensor bit by bit, every block's output, one report."""

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmha import MHAParams
from jaxmha.converters import blocks, checkpoint, neighbours, plan, sides, verify
from jaxmha.converters.arrays import NDArray, to_numpy
from jaxmha.converters.blocks import Block
from jaxmha.converters.checkpoint import Loss
from jaxmha.converters.checkpoint.digests import hasher, manifest
from jaxmha.converters.checkpoint.errors import printable
from jaxmha.converters.checkpoint.tensor import blocks as blocks_of
from jaxmha.converters.checkpoint.tensor import contiguous, to_bytes
from jaxmha.converters.migrate import DIGEST
from jaxmha.converters.plan import Move, Plan
from jaxmha.params import from_leaves, leaves

_AT_ONCE = 4 << 20  # bytes
_PACKAGES = ("jaxmha", "jax", "numpy", "einops", "ml_dtypes", "h5py")


@dataclass(frozen=True)
class MoveReport:
    """What became of one layer.

    Attributes:
      kind, source, target: as in `plan.Move`.
      tensors: name in the destination -> names in the source.
      differences: in words; empty: every bit is the same.
      errors: of attention, mask -> RMS error of the forward against float64, before and after, in
        rounding floors of the output.
    """

    kind: str
    source: str
    target: str
    tensors: dict[str, tuple[str, ...]]
    differences: tuple[str, ...]
    errors: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class ConversionReport:
    """A conversion, checked by reading both files again; true exactly when nothing differs.

    `source` and `target` name path, format, number of tensors and digest of the contents;
    `digests` those of every tensor of the target; `losses` what a cast did to each.
    """

    same: bool
    source: dict[str, Any]
    target: dict[str, Any]
    layout: str
    dtype: str | None
    modules: tuple[MoveReport, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    notes: tuple[str, ...]
    digests: dict[str, str]
    losses: dict[str, dict[str, Any]]
    versions: dict[str, str]

    def __bool__(self) -> bool:
        return self.same

    def to_json(self) -> dict[str, Any]:
        """Plain data for machines."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{printable(one.target or '(top)')}: {printable(text)}"
            for one in self.modules
            for text in one.differences
        ]
        lines += [f"{printable(name)}: not in the destination" for name in self.missing]
        lines += [f"{printable(name)}: only in the destination" for name in self.unexpected]
        return "\n".join(lines)


def check(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    done: Plan,
    *,
    forward: bool = True,
    progress: Callable[[Sequence[Move]], Iterable[Move]] = iter,
    notes: Sequence[str] = (),
    losses: Mapping[str, Loss] = MappingProxyType({}),
) -> ConversionReport:
    """Compares a converted file with its source by the plan that was carried out.

    The destination is read on its own, as anyone would read it. Where the plan has a dtype, the
    source is cast to it first.

    Args:
      source, destination, done: the files and the plan.
      forward: False: weights alone, without running any block.
      progress: wraps the moves, to show how far the work is.
      notes, losses: what to put into the report.

    Raises:
      CheckpointError, ValueError: a file cannot be read.
    """
    with checkpoint.open(source) as old, checkpoint.open(destination) as new:
        resolved = plan.resolve(done, old)
        to = blocks.named(done.to)
        there = {block.prefix: block for block in blocks.find(sides.shapes(new), [to])}
        digests: tuple[dict[str, str], dict[str, str]] = ({}, {})
        missing = tuple(name for name in resolved.made if name not in new)
        reports = []
        by_move = dict(resolved.by_move)
        for move in progress(list(by_move)):
            made = by_move[move]
            tensors = {name: one.sources for name, one in made.items()}
            differences: list[str] = []
            errors: dict[str, tuple[float, float]] = {}
            if any(name not in new for name in made):
                digests[0].update({name: _digest(old[name]) for name in move.tensors})
                digests[1].update({name: _digest(new[name]) for name in made if name in new})
            elif move.kind == "attention":
                differences, errors, held = _attention(
                    move,
                    done,
                    resolved.blocks[move],
                    there.get(move.target),
                    partial(_read, old, move.tensors, digests[0]),
                    partial(_read, new, tuple(made), digests[1]),
                    forward,
                )
                notes = [*notes, *held]
            else:
                for pair in _pairs(move, done, old, new, list(made)):
                    differences += _compare(pair, done.dtype, old, new, digests)
            reports.append(
                MoveReport(move.kind, move.source, move.target, tensors, tuple(differences), errors)
            )
        unexpected = tuple(name for name in new if name not in resolved.made)
        digests[1].update({name: _digest(new[name]) for name in unexpected})
        same = not missing and not unexpected and not any(one.differences for one in reports)
        return ConversionReport(
            same,
            _file(old, digests[0]),
            _file(new, digests[1]),
            done.to,
            done.dtype,
            tuple(reports),
            missing,
            unexpected,
            tuple(notes),
            digests[1],
            {name: loss._asdict() for name, loss in losses.items()},
            _versions(),
        )


def _file(file: checkpoint.Checkpoint, digests: Mapping[str, str]) -> dict[str, Any]:
    return {
        "path": str(file.path),
        "format": file.format,
        "tensors": len(file),
        "digest": manifest(file.info, digests, (), DIGEST, file.path),
    }


Unpack = Callable[[NDArray], NDArray]


class _Pair(NamedTuple):
    """A leaf, the names of the tensors that are it on either side, and how it lies in them."""

    leaf: str
    names: tuple[str, str]
    unpack: tuple[Unpack, Unpack]


def _pairs(
    move: Move,
    done: Plan,
    old: checkpoint.Checkpoint,
    new: checkpoint.Checkpoint,
    made: Sequence[str],
) -> list[_Pair]:
    """The leaves of what is no attention, each side read by its own convention."""
    if move.kind == "other":
        return [_Pair("", (move.tensors[0], made[0]), (_whole, _whole))]
    convention = neighbours.beside(done.to)
    assert convention is not None
    module = plan.module_of(move, old.info)
    there = plan.module_of(
        replace(
            move,
            kind=move.becomes or module.kind,
            layout=convention.name,
            source=move.target,
            tensors=tuple(made),
        ),
        new.info,
    )
    return [
        _Pair(
            leaf,
            (module.keys[entry.key], there.keys[there.entries[leaf].key]),
            (partial(neighbours.unpack, entry), partial(neighbours.unpack, there.entries[leaf])),
        )
        for leaf, entry in module.entries.items()
    ]


def _whole(array: NDArray) -> NDArray:
    return array


def _compare(
    pair: _Pair,
    dtype: str | None,
    old: checkpoint.Checkpoint,
    new: checkpoint.Checkpoint,
    digests: tuple[dict[str, str], dict[str, str]],
) -> list[str]:
    """What differs in a leaf. One side is held at a time: embeddings are the largest tensors."""
    found = []
    for side, to, name, unpack, seen in zip(
        (old, new), (dtype, None), pair.names, pair.unpack, digests, strict=True
    ):
        array = side[name]
        seen[name] = _digest(array)
        leaf = unpack(array)
        alike = _digest(leaf, to) if to or leaf is not array else seen[name]
        found.append((leaf.shape, cast(np.empty(0, leaf.dtype), to).dtype, alike))
        del array, leaf
    if found[0] == found[1]:
        return []
    before = cast(pair.unpack[0](old[pair.names[0]]), dtype)
    return _differences({pair.leaf: before}, {pair.leaf: pair.unpack[1](new[pair.names[1]])})


def _digest(array: NDArray, dtype: str | None = None) -> str:
    """As `checkpoint.digest`, of the array in another dtype."""
    state = hasher(DIGEST, "")
    for block in blocks_of(array):
        state.update(to_bytes(cast(block, dtype)).data)
    return f"{DIGEST}:{state.hexdigest()}"


def _read(
    file: checkpoint.Checkpoint, names: Sequence[str], digests: dict[str, str]
) -> dict[str, NDArray]:
    """Tensors of a file, whose digests are noted."""
    arrays = {name: file[name] for name in names}
    digests |= {name: _digest(array) for name, array in arrays.items()}
    return arrays


def _attention(
    move: Move,
    done: Plan,
    source: Block,
    target: Block | None,
    before: Callable[[], Mapping[str, NDArray]],
    after: Callable[[], Mapping[str, NDArray]],
    forward: bool,
) -> tuple[list[str], dict[str, tuple[float, float]], list[str]]:
    """Differences, errors of the forward, and notes. One side is read after the other."""
    if target is None:
        before(), after()
        return [f"no block of layout {done.to} is there"], {}, []
    params, semantics = source.read(before(), move.num_heads)
    params = _cast_params(params, done.dtype)
    count = params.query.kernel.shape[-2]
    again, semantics_again = target.read(after(), None if target.layout.stores_num_heads else count)
    pair = [
        {name: np.asarray(array) for name, array in leaves(one).items()} for one in (params, again)
    ]
    differences = _differences(*pair)
    errors: dict[str, tuple[float, float]] = {}
    if not forward:
        return differences, errors, []
    notes = []
    both = zip(
        sides.layers(move.source, source.layout.name, params, semantics),
        sides.layers(move.target, target.layout.name, again, semantics_again),
        strict=True,
    )
    for a, b in both:
        if held := verify.not_finite(a.params):
            notes.append(
                f"{a.name or '(top)'}: {', '.join(held)} holds NaN or infinity: no outputs were compared"
            )
            continue
        compared = verify.compare_blocks(a, b)
        more = f"{a.name.removeprefix(move.source)} " * (a.name != move.source)
        errors |= {f"{more}{mask}": pair for mask, pair in compared.errors.items()}
        if not compared.same and not differences:
            differences += [*compared.behaviour, *filter(None, [compared.departs])]
    return differences, errors, notes


def _differences(a: Mapping[str, NDArray], b: Mapping[str, NDArray]) -> list[str]:
    """Leaves that are not the same, bit by bit, in words."""
    found = []
    for leaf in {**a, **b}:
        if leaf not in a or leaf not in b:
            found.append(f"{leaf} is only in the {'target' if leaf not in a else 'source'}")
            continue
        x, y = a[leaf], b[leaf]
        if x.shape != y.shape or x.dtype != y.dtype:
            found.append(f"{leaf} is {x.dtype} {x.shape}, and {y.dtype} {y.shape} in the target")
        elif differing := _differing(x, y):
            found.append(f"{leaf}: {differing} of {x.size} elements differ".removeprefix(": "))
    return found


def _differing(x: NDArray, y: NDArray) -> int:
    """Elements of two arrays of one shape and dtype that are not the same, bit by bit."""
    if x.nbytes <= _AT_ONCE or not x.ndim:
        return int((_bits(x) != _bits(y)).any(axis=-1).sum())
    step = max(1, _AT_ONCE * len(x) // x.nbytes)
    pieces = (i if step == 1 else slice(i, i + step) for i in range(0, len(x), step))
    return sum(_differing(x[piece], y[piece]) for piece in pieces)


def _bits(array: NDArray) -> NDArray:
    return contiguous(array).reshape(-1, 1).view(np.uint8)


def cast(array: NDArray, dtype: str | None) -> NDArray:
    """A floating array in another dtype."""
    if dtype is None or not jax.numpy.issubdtype(array.dtype, np.floating):
        return array
    return array.astype(jax.numpy.dtype(dtype))


def _cast_params(params: MHAParams, dtype: str | None) -> MHAParams:
    if dtype is None:
        return params
    arrays: dict[str, Any] = {
        name: cast(to_numpy(array), dtype) for name, array in leaves(params).items()
    }
    return from_leaves(arrays)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
