"""Checks a finished conversion: every tensor bit by bit, and the output of every block."""

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

from jaxmha.checkpoint import Loss
from jaxmha.checkpoint.digests import manifest
from jaxmha.checkpoint.errors import printable
from jaxmha.converters.discovery import (
    attention_blocks,
    head_count,
    layer_layouts,
    stored_semantics,
)
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.migrate import plans, resolved
from jaxmha.converters.migrate.pipeline import DIGEST
from jaxmha.converters.migrate.plans import Plan, Step
from jaxmha.converters.verify import head_groups, streaming
from jaxmha.converters.verify.head_groups import Outputs
from jaxmha.converters.verify.streaming import File, FileLayer

_PACKAGES = ("jaxmha", "jax", "numpy", "einops", "ml_dtypes", "h5py")


@dataclass(frozen=True)
class StepReport:
    """The result for one planned layer.

    Attributes:
      kind, source, target: kind, source prefix and target prefix of its `plans.Step`.
      tensors: name in the destination -> names in the source.
      differences: descriptions of the differences; empty if every bit is the same.
      errors: mask -> RMS errors of an attention forward against float64, before and after the
        conversion, in units of the error of rounding the output (`oracle.rounding_floor`).
    """

    kind: str
    source: str
    target: str
    tensors: dict[str, tuple[str, ...]]
    differences: tuple[str, ...]
    errors: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class ConversionReport:
    """A conversion, checked by reading both files again; `bool(report)` is `report.same`.

    `source` and `target` hold path, format, number of tensors and digest of the contents.
    `digests`: target tensor -> its digest. `losses`: target tensor -> effect of the cast.
    """

    same: bool
    source: dict[str, Any]
    target: dict[str, Any]
    layout: str
    dtype: str | None
    modules: tuple[StepReport, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    notes: tuple[str, ...]
    digests: dict[str, str]
    losses: dict[str, dict[str, Any]]
    versions: dict[str, str]

    def __bool__(self) -> bool:
        return self.same

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON-compatible data."""
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
    progress: Callable[[Sequence[Step]], Iterable[Step]] = iter,
    notes: Sequence[str] = (),
    losses: Mapping[str, Loss] = MappingProxyType({}),
) -> ConversionReport:
    """Compares a converted file with its source by the plan that was carried out.

    The blocks of the destination are found from its own keys and metadata, not from the plan. If
    the plan has a dtype, the source is cast to it before the comparison.

    Args:
      source, destination, done: the files and the plan.
      forward: False compares only weights and runs no block.
      progress: wraps the planned layers, to report progress.
      notes, losses: added to the report.

    Raises:
      CheckpointError, ValueError: a file cannot be read.
    """
    with streaming.opened(source) as old, streaming.opened(destination) as new:
        carried = resolved.resolve(done, old.whole)
        by_step = dict(carried.by_step)
        missing = tuple(name for name in carried.made if name not in new.whole)
        shapes, to = attention_blocks.shapes(new.whole), done.layout
        targets = {  # by metadata of the destination: a config.json next to it describes the source
            block.prefix: stored_semantics.described(block, new.whole.metadata)
            for block in (attention_blocks.find(shapes, [to]) if to.entries else ())
        }
        reports = []
        for step in progress(list(by_step)):
            made = tuple(by_step[step])
            pair = carried.blocks.get(step), targets.get(step.target)
            found = _compare(step, made, done, old, new, pair, forward)
            notes = [*notes, *found.notes]
            tensors = {name: one.sources for name, one in by_step[step].items()}
            differences = tuple(found.differences)
            reports.append(
                StepReport(step.kind, step.source, step.target, tensors, differences, found.errors)
            )
        unexpected = tuple(name for name in new.whole if name not in carried.made)
        streaming.differences(streaming.unread(old, ()), streaming.unread(new, unexpected))
        same = not missing and not unexpected and not any(one.differences for one in reports)
        return ConversionReport(
            same,
            _file(old),
            _file(new),
            done.to,
            done.dtype,
            tuple(reports),
            missing,
            unexpected,
            tuple(notes),
            new.digests,
            {name: loss._asdict() for name, loss in losses.items()},
            versions(),
        )


def _file(file: File) -> dict[str, Any]:
    whole = file.whole
    return {
        "path": str(whole.path),
        "format": whole.format,
        "tensors": len(whole),
        "digest": manifest(whole.info, file.digests, (), DIGEST, whole.path),
    }


def _compare(
    step: Step,
    made: tuple[str, ...],
    done: Plan,
    old: File,
    new: File,
    pair: tuple[Block | None, Block | None],
    forward: bool,
) -> Outputs:
    """Compares one layer: weights, and outputs of attention if its weights are equal.

    `made`: the tensors that the step makes. `pair`: the attention blocks in source and destination,
    each None if absent. A destination that cannot be read is a difference.
    """
    here = [name for name in made if name in new.whole]
    block, target = pair
    if len(here) < len(made) or (block and not target):
        streaming.differences(streaming.unread(old, step.tensors), streaming.unread(new, here))
        absent = [f"no block of layout {done.to} is there"] if len(here) == len(made) else []
        return Outputs(absent, {}, [])
    try:
        if block and target:
            scaled_for = target.layout if done.fold_scale else None
            filled_for = target.layout if done.fill_bias else None
            a, count = streaming.attention(
                old, block, step.num_heads, step.tensors, scaled_for, filled_for
            )
            given = None if target.layout.stores_num_heads else count
            b, _ = streaming.attention(new, target, given, made)
            own = {name: new.whole.info[name].shape for name in target.keys.values()}
            head_count.find(target, own, count, new.whole.metadata)
        else:
            a, b = _other_layer(step, made, done, old, new)
    except ValueError as error:  # the destination is wrong: `resolve` has read the source
        streaming.differences(streaming.unread(old, step.tensors), streaming.unread(new, made))
        return Outputs([str(error)], {}, [])
    a = a._replace(dtype=done.dtype)
    differences = streaming.differences(a, b)
    if differences or not (block and forward):
        return Outputs(differences, {}, [])
    return head_groups.compare(a, b, step.source)


def _other_layer(
    step: Step, made: tuple[str, ...], done: Plan, old: File, new: File
) -> tuple[FileLayer, FileLayer]:
    """Reads a layer other than attention from both files, each by its own convention."""
    if step.kind == "other":
        return streaming.whole(old, step.tensors[0]), streaming.whole(new, made[0])
    if step.kind == "latent":
        return streaming.latent(old, step.source), streaming.latent(new, step.target)
    convention = layer_layouts.convention_of(done.to)
    assert convention is not None
    module = resolved.module_of(step, old.whole.info)
    becomes = replace(
        step,
        kind=step.becomes
        or plans.kind_in_target(module, attention_blocks.named(done.to), convention, step.target),
        layout=convention.name,
        source=step.target,
        tensors=made,
    )
    return streaming.other_layer(old, module), streaming.other_layer(
        new, resolved.module_of(becomes, new.whole.info)
    )


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that take part in a comparison."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
