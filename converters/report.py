"""Did a conversion keep everything? Every tensor bit by bit, every block's output, one report."""

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxmha import MHAParams
from jaxmha.converters import blocks, checkpoint, neighbours, plan, sides, verify
from jaxmha.converters.arrays import NDArray, to_numpy
from jaxmha.converters.blocks import Block
from jaxmha.converters.checkpoint import Loss
from jaxmha.converters.checkpoint.digests import manifest
from jaxmha.converters.checkpoint.errors import printable
from jaxmha.converters.migrate import DIGEST
from jaxmha.converters.plan import Move, Plan
from jaxmha.params import from_leaves, leaves

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
            before = {name: old[name] for name in move.tensors}
            after = {name: new[name] for name in made if name in new}
            for seen, arrays in zip(digests, (before, after), strict=True):
                seen |= {name: checkpoint.digest(a, DIGEST) for name, a in arrays.items()}
            tensors = {name: one.sources for name, one in made.items()}
            differences: list[str] = []
            errors: dict[str, tuple[float, float]] = {}
            if len(after) == len(made):
                differences, errors = _compare(
                    move,
                    done,
                    resolved.blocks.get(move),
                    there.get(move.target),
                    before,
                    after,
                    forward,
                )
            reports.append(
                MoveReport(move.kind, move.source, move.target, tensors, tuple(differences), errors)
            )
        unexpected = tuple(name for name in new if name not in resolved.made)
        digests[1].update({name: checkpoint.digest(new[name], DIGEST) for name in unexpected})
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


def _compare(
    move: Move,
    done: Plan,
    source: Block | None,
    target: Block | None,
    before: Mapping[str, NDArray],
    after: Mapping[str, NDArray],
    forward: bool,
) -> tuple[list[str], dict[str, tuple[float, float]]]:
    """What differs in one layer, and the errors of its forward."""
    if move.kind == "attention":
        assert source is not None
        if target is None:
            return [f"no block of layout {done.to} is there"], {}
        return _attention(move, done, source, target, before, after, forward)
    if move.kind == "other":
        ((a, b),) = [(x, y) for x in before.values() for y in after.values()]
        return _differences({"": cast(a, done.dtype)}, {"": b}), {}
    convention = neighbours.beside(done.to)
    assert convention is not None
    module = plan.module_of(move, before)
    there = replace(
        move,
        kind=move.becomes or module.kind,
        layout=convention.name,
        source=move.target,
        tensors=tuple(after),
    )
    old, new = module.entries, plan.module_of(there, after).entries
    leaves_before = {
        leaf: cast(neighbours.unpack(entry, before[module.keys[entry.key]]), done.dtype)
        for leaf, entry in old.items()
    }
    keys = plan.module_of(there, after).keys
    leaves_after = {
        leaf: neighbours.unpack(entry, after[keys[entry.key]]) for leaf, entry in new.items()
    }
    return _differences(leaves_before, leaves_after), {}


def _attention(
    move: Move,
    done: Plan,
    source: Block,
    target: Block,
    before: Mapping[str, NDArray],
    after: Mapping[str, NDArray],
    forward: bool,
) -> tuple[list[str], dict[str, tuple[float, float]]]:
    params, semantics = source.read(before, move.num_heads)
    params = _cast_params(params, done.dtype)
    count = params.query.kernel.shape[-2]
    again, semantics_again = target.read(after, None if target.layout.stores_num_heads else count)
    pair = [
        {name: to_numpy(array) for name, array in leaves(one).items()} for one in (params, again)
    ]
    differences = _differences(*pair)
    errors: dict[str, tuple[float, float]] = {}
    if not forward:
        return differences, errors
    both = zip(
        sides.layers(move.source, source.layout.name, params, semantics),
        sides.layers(move.target, target.layout.name, again, semantics_again),
        strict=True,
    )
    for a, b in both:
        compared = verify.compare_blocks(a, b)
        more = f"{a.name.removeprefix(move.source)} " * (a.name != move.source)
        errors |= {f"{more}{mask}": pair for mask, pair in compared.errors.items()}
        if not compared.same and not differences:
            differences += [*compared.behaviour, *filter(None, [compared.departs])]
    return differences, errors


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
        elif x.tobytes() != y.tobytes():
            differing = int((_bits(x) != _bits(y)).any(axis=-1).sum())
            found.append(f"{leaf}: {differing} of {x.size} elements differ".removeprefix(": "))
    return found


def _bits(array: NDArray) -> NDArray:
    return np.ascontiguousarray(array).reshape(-1, 1).view(np.uint8)


def cast(array: NDArray, dtype: str | None) -> NDArray:
    """A floating array in another dtype."""
    if dtype is None or not jax.numpy.issubdtype(array.dtype, np.floating):
        return array
    return array.astype(jax.numpy.dtype(dtype))


def _cast_params(params: MHAParams, dtype: str | None) -> MHAParams:
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
