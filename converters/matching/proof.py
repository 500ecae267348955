"""The result of comparing a filled model with its source."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jaxmha.checkpoint.errors import printable

_NEXT = (
    "next, if a mask may be the cause: jaxmha.converters.attribute compares two layers part by part, "
    "and jaxmha.converters.lint_masks finds masks with another meaning"
)

# If outputs differ by at most this fraction of their size, a layer may compute in half
# precision although it returns float64: the report says so.
HALF = 0.05
_INSIDE = (
    "a layer that casts to float32 or narrower inside, and back, returns float64 all the same: let it "
    "compute in float64, and compare again"
)
_WIDER = "let the layers that cast to it compute in float32, and compare again"


class Departure(NamedTuple):
    """A pair of layers, or of outputs, and their difference relative to their size.

    Attributes:
      source, target: the names of both.
      difference: for outputs, in the order `axes`; for layers, the least in any order of axes.
      axes: the axes of the source in the order that sizes show the target to have, without those of
        size 1; () if it is unchanged.
      exchanged: an order of axes of equal sizes in which the outputs would agree, though they
        depart in the order `axes`; None if there is none.
    """

    source: str
    target: str
    difference: float
    axes: tuple[int, ...] = ()
    exchanged: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Proof:
    """The result of comparing a filled model with its source; `str` gives the report.

    Attributes:
      equal: number of target arrays with exactly the values of the source.
      different: target arrays with other values. rounded: target arrays of another dtype, with the
        values of the source rounded to it.
      unused: source arrays that fill no target array, or only partly. missing: target arrays that
        the plan does not fill.
      difference: largest difference of a pair of outputs, relative to the largest value that the
        source returns there, not counting fills such as -1e9; for a feature whose values are all less
        than 1/100 of that, relative to 100 times its largest. None if the models were not run.
      tolerance: largest `difference` that counts as the same.
      outputs: the pairs of outputs that were compared, each with its difference. left: names of all
        other outputs: those in no pair, integers, Booleans, unchanged inputs, and equal outputs of numbers
        that an input has, or that are whole, such as masks and zeros.
      departure: the first pair of layers whose outputs differ by more than `tolerance`; None if there
        is no such pair. `same` does not depend on it: one model may compute in a layer what the other
        computes after it.
      compared: number of pairs of layers whose outputs were compared.
      dtype: narrowest dtype that a model or layer returned. narrow: the first layer that returned
        it; None if all returned float64.
      notes: as in the plan: remarks on reading, settings that only the source states, norms with
        another epsilon. Also a model that raised in float64 and ran in float32, outputs paired as the
        nearest of several, the layers that first returned NaN, and layers or gates of zeros, which
        hide those before them. They do not change `same`.
    """

    equal: int
    different: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    difference: float | None = None
    tolerance: float = 0.0
    outputs: tuple[Departure, ...] = ()
    left: tuple[str, ...] = ()
    departure: Departure | None = None
    compared: int = 0
    dtype: str = "float64"
    narrow: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """True if all arrays are equal or rounded, none is unused or missing, and outputs agree."""
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
            narrow = "" if self.narrow is None else f" by {self.narrow}"
            rows.append(
                f"outputs returned in {self.dtype}{narrow} {verdict}: {self.difference:.1e} of their size "
                f"(at most {self.tolerance:.0e}); {self.compared} layers compared"
            )
            rows += self._paired_outputs()
        largest = self.difference or 0.0
        if self.departure is not None:
            source, target, difference = self.departure[:3]
            agree = ", while the compared outputs agree" if largest <= self.tolerance else ""
            rows.append(
                f"first layer that departs: {target or 'the model'} from {source or 'the model'}, "
                f"by {difference:.1e}{agree}"
            )
        rows += [f"note: {note}" for note in self.notes]
        if largest > self.tolerance:
            if self.dtype in ("float16", "bfloat16"):
                rows.append(f"{self.dtype} rounds by more than that: {_WIDER}")
            elif self.narrow is None and largest <= HALF:
                rows.append(_INSIDE)
            rows.append(_NEXT)
        return "\n".join(map(printable, rows))

    def _paired_outputs(self) -> Iterator[str]:
        """Yields lines on the pairs of outputs, if there are several, some left out, or axes moved."""
        several = len(self.outputs) + len(self.left) > 1
        for source, target, difference, axes, exchanged in self.outputs:
            pair = f"{target} of the model against {source} of the source"
            if several or axes:
                yield f"{pair}: {difference:.1e}{_in_order(axes) if axes else ''}"
            if exchanged is not None:
                yield (
                    f"{pair} agrees{_in_order(exchanged)}, but axes of equal sizes do not show that it is "
                    "meant: draw inputs with which their sizes differ, or return both in one order"
                )
        if self.left:
            yield f"not compared: {', '.join(self.left)}"


def _in_order(axes: tuple[int, ...]) -> str:
    shown = f"the order {', '.join(map(str, axes))}" if axes else "their order"
    return f", with the axes of the source in {shown}"
