"""The result of the comparison of a filled model with its source."""

from dataclasses import dataclass
from typing import NamedTuple

from jaxmha.checkpoint.errors import printable

_NEXT = (
    "next, if a mask may be the cause: jaxmha.converters.attribute compares two layers part by part, "
    "and jaxmha.converters.lint_masks finds masks with another meaning"
)


class Departure(NamedTuple):
    """A layer of both models, and the difference of its outputs relative to the largest."""

    source: str
    target: str
    difference: float


@dataclass(frozen=True)
class Proof:
    """The result of a comparison.

    Attributes:
      equal: number of target arrays whose values are those of the source, bit by bit.
      different: target arrays with other values. rounded: those that another dtype rounded.
      unused: source arrays, or the part of one, that is in no target array. missing: target arrays
        that the plan does not fill.
      difference: of the outputs in float64, relative to the largest; None if nothing was run.
      tolerance: for `difference`.
      departure: if the outputs depart, the first layer whose outputs do; None if no layer's do, or
        no layer is comparable.
      compared: number of layers that were compared.
    """

    equal: int
    different: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    difference: float | None = None
    tolerance: float = 0.0
    departure: Departure | None = None
    compared: int = 0

    @property
    def same(self) -> bool:
        """True if all arrays are equal or rounded, none is left over, and outputs, if run, agree."""
        whole = not (self.different or self.unused or self.missing)
        return whole and (self.difference is None or self.difference <= self.tolerance)

    def __str__(self) -> str:
        rows = [f"{self.equal} arrays are those of the source, bit by bit"]
        for word in ("different", "rounded", "unused", "missing"):
            rows += [f"{word}: {name}" for name in getattr(self, word)]
        if self.unused:
            many = len(self.unused)
            rows.append(
                f"not the same: {many} {'array' if many == 1 else 'arrays'} of the source "
                f"{'is' if many == 1 else 'are'} unused (unused='keep' leaves them out)"
            )
        if self.difference is not None:
            verdict = "agree" if self.difference <= self.tolerance else "depart"
            rows.append(
                f"outputs in float64 {verdict}: {self.difference:.1e} of the largest "
                f"(at most {self.tolerance:.0e}); {self.compared} layers compared"
            )
        if self.departure is not None:
            source, target, difference = self.departure
            rows.append(
                f"first layer that departs: {target or 'the model'} from {source or 'the model'}, "
                f"by {difference:.1e}"
            )
        if self.difference is not None and self.difference > self.tolerance:
            rows.append(_NEXT)
        return "\n".join(map(printable, rows))
