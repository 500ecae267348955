"""The result of an attribution: the contribution of every differing factor, as data and text."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """The contribution of one factor.

    Attributes:
      name: name of the factor, such as `mask polarity`; the remainder is named `rounding`,
        `compute dtype` or `unexplained`.
      sentence: description of the difference.
      share: signed fraction of the difference; the shares sum to 1.
      size: `share` times the total, in units of the output; the sizes sum to the total.
      rms: RMS of the factor's contribution; larger than `size` if other factors partly cancel it.
      not_finite: number of output elements that the factor turns to NaN or infinity, minus the
        number that it makes finite.
    """

    name: str
    sentence: str
    share: float
    size: float
    rms: float
    not_finite: float = 0.0

    def __str__(self) -> str:
        return f"{self.name}: {self.text}; {percent(self.share)} of the difference"

    @property
    def text(self) -> str:
        """The description, with the number of NaN elements that the factor causes in a or b."""
        if not self.not_finite:
            return self.sentence
        comparand = "b" if self.not_finite > 0 else "a"
        return f"{self.sentence}; {abs(self.not_finite):.4g} elements are NaN in {comparand} for it"


@dataclass(frozen=True)
class Attribution:
    """The difference between two layers, in parts that sum to it.

    The difference is the vector `b - a` of all outputs. The part of a factor is the mean change of
    the output when this factor changes from a to b, over all orders of changing the factors; these
    vectors sum to `b - a`. The size of a part is its projection onto `b - a`, divided by the square
    root of the number of elements. Sizes are therefore signed, and sum to the RMS of `b - a`.

    Attributes:
      a, b: names of the layers.
      total: RMS of `b - a` over the elements that are finite in both outputs and in every mixture
        of the two layers; NaN if there are no such elements.
      relative: `total` over the RMS of the larger output.
      floor: RMS error of rounding a's output to its dtype.
      compared: number of elements in `total`; `Part.not_finite` counts the others.
      elements: number of elements of the output.
      parts: contributions of the factors, the largest first.
      idle: factors that differ but have no effect on these inputs, alone or together.
      outside: descriptions of tensors outside the block that differ or were not compared; only from
        `attribute`.
      idle_weights: descriptions of weights that differ without effect on the output; only if both
        sources are files, arrays or parameters.
    """

    a: str
    b: str
    total: float
    relative: float
    floor: float
    compared: int
    elements: int
    parts: tuple[Part, ...]
    idle: tuple[str, ...]
    outside: tuple[str, ...] = ()
    idle_weights: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """True if only rounding differs: in the output, outside the block and in the weights."""
        return not (self.outside or self.idle_weights or self.changes_output)

    @property
    def changes_output(self) -> bool:
        """True if a factor other than rounding changes the output."""
        return any(part.name != "rounding" for part in self.parts)

    @property
    def headline(self) -> str:
        """One line of text: the total difference, and the number of elements left out of it."""
        where = "in one of the two, or in a mixture of them"
        if not self.compared:
            return f"nothing can be compared: every element is NaN or infinite {where}"
        text = f"RMS difference {self.total:.3g}, {percent(self.relative)} of the output"
        if bad := self.elements - self.compared:
            return (
                f"{bad} of {self.elements} elements are not finite {where}; "
                f"over the other {self.compared}: {text}"
            )
        return text

    def __str__(self) -> str:
        lines = [f"{self.a} and {self.b}: {self.headline}"]
        lines += [f"  {part}" for part in self.parts]
        lines += [f"  without effect here: {sentence}" for sentence in self.idle]
        lines += [f"  kept otherwise: {sentence}" for sentence in self.idle_weights]
        lines += [f"  outside the block: {sentence}" for sentence in self.outside]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON-compatible data."""
        return {"same": self.same, **asdict(self)}


def percent(share: float) -> str:
    """Formats a share as a percentage.

    >>> percent(0.934), percent(3e-7), percent(0.0)
    ('93 %', '3e-05 %', '0 %')
    """
    return f"{100 * share:.0f} %" if abs(share) >= 0.005 or not share else f"{100 * share:.1g} %"
