"""The result of a conversion, as data."""

import os
from dataclasses import dataclass, fields
from typing import Any

from jaxmha import checkpoint
from jaxmha.checkpoint import Loss
from jaxmha.converters.migrate.plans import Move, Plan
from jaxmha.converters.migrate.resolved import Resolved


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion.

    Attributes:
      blocks: (source prefix, source layout, destination prefix, destination layout) of each block.
      beside: (kind, source prefix, destination prefix) of each other layer.
      carried: names of all other tensors, which are copied unchanged.
      files: the files written. digests: tensor name -> digest of the data read back.
      losses: tensor name -> effect of the cast to `dtype`, for every tensor that it changed.
      heads: (source prefix, head count, where it is from) of every block.
      unchecked: facts that no comparison of the two files can show, in words.
      notes: remarks on single blocks and on norms. plan: the plan that was carried out.
    """

    source: str
    destination: str
    blocks: tuple[tuple[str, str, str, str], ...]
    beside: tuple[tuple[str, str, str], ...]
    carried: tuple[str, ...]
    files: tuple[str, ...]
    digests: dict[str, str]
    losses: dict[str, Loss]
    notes: tuple[str, ...] = ()
    plan: Plan | None = None
    heads: tuple[tuple[str, int, str], ...] = ()
    unchecked: tuple[str, ...] = ()

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
    """The result of carrying out a plan; `given` is True if the caller passed the plan."""
    kinds: dict[bool, list[Move]] = {True: [], False: []}
    for move in plan.moves:
        if move.kind != "other":
            kinds[move.kind == "attention"].append(move)
    return Conversion(
        str(source),
        str(destination),
        tuple((move.source, move.layout, move.target, plan.to) for move in kinds[True]),
        tuple((move.kind, move.source, move.target) for move in kinds[False]),
        tuple(move.target for move in plan.moves if move.kind == "other"),
        tuple(map(str, written.files)),
        dict(written.digests),
        dict(written.losses),
        plan=plan,
        heads=tuple(
            (move.source, found.counts[move.target], move.heads_from or _heads_from(move, given))
            for move in found.blocks
        ),
    )


def _heads_from(move: Move, given: bool) -> str:
    return "plan" if given and move.num_heads is not None else "shape"
