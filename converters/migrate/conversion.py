"""What a conversion did, as data."""

import os
from dataclasses import dataclass, fields
from typing import Any

from jaxmha import checkpoint
from jaxmha.checkpoint import Loss
from jaxmha.converters.migrate.plans import Move, Plan
from jaxmha.converters.migrate.resolved import Resolved


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
      blocks: (prefix in the source, layout there, prefix in the destination, layout there).
      beside: (kind, prefix in the source, prefix in the destination) of the layers beside them.
      carried: names of tensors that are neither, taken over as they are.
      files: what was written. digests: tensor name -> digest, of what was read back.
      losses: tensor name -> what the cast to `dtype` did to it, for every tensor that it changed.
      heads: (prefix in the source, head count, where it is from) of every block.
      unchecked: what no comparison of the two files can show, in words.
      notes: what to know of single blocks, and of norms. plan: what was done, tensor by tensor.
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
        """Plain data for machines."""
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
    """The conversion by a plan that was carried out; `given`: the plan was, and not made for it."""
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
