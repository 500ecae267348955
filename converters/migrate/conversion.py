"""The result of a conversion, as data."""

import os
from dataclasses import dataclass, fields
from typing import Any

from jaxmha import checkpoint
from jaxmha.checkpoint import Loss
from jaxmha.converters.migrate.plans import Plan, Step
from jaxmha.converters.migrate.resolved import Resolved


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion.

    Attributes:
      blocks: (source prefix, source layout, destination prefix, destination layout) of each block.
      other_layers: (kind, source prefix, destination prefix) of each other layer.
      carried: names of all other tensors, which are copied unchanged.
      files: paths of the files written. digests: tensor name -> digest of the data read back.
      kept: those of `files` that an earlier run had written, and this run has checked.
      losses: tensor name -> effect of the cast to the plan's dtype, if it changed the tensor.
      heads: (source prefix, head count, where the count was found) of every block.
      unchecked: descriptions of facts that a comparison of the two files cannot check.
      notes: remarks on single blocks and on norms. plan: the plan that was carried out.
    """

    source: str
    destination: str
    blocks: tuple[tuple[str, str, str, str], ...]
    other_layers: tuple[tuple[str, str, str], ...]
    carried: tuple[str, ...]
    files: tuple[str, ...]
    digests: dict[str, str]
    losses: dict[str, Loss]
    notes: tuple[str, ...] = ()
    plan: Plan | None = None
    heads: tuple[tuple[str, int, str], ...] = ()
    unchecked: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON-compatible data."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        del data["plan"]
        return data | {"losses": {name: loss._asdict() for name, loss in self.losses.items()}}


def of(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    plan: Plan,
    found: Resolved,
    written: checkpoint.Written,
    given: bool,
) -> Conversion:
    """Builds the result of carrying out a plan; `given` is True if the caller passed the plan."""
    kinds: dict[bool, list[Step]] = {True: [], False: []}
    for step in plan.steps:
        if step.kind != "other":
            kinds[step.kind == "attention"].append(step)
    return Conversion(
        str(source),
        str(destination),
        tuple((step.source, step.layout, step.target, plan.to) for step in kinds[True]),
        tuple((step.kind, step.source, step.target) for step in kinds[False]),
        tuple(step.target for step in plan.steps if step.kind == "other"),
        tuple(map(str, written.files)),
        dict(written.digests),
        dict(written.losses),
        plan=plan,
        heads=tuple(
            (step.source, found.counts[step.target], step.heads_from or _heads_from(step, given))
            for step in found.blocks
        ),
        kept=tuple(map(str, written.kept)),
    )


def _heads_from(step: Step, given: bool) -> str:
    return "plan" if given and step.num_heads is not None else "shape"
