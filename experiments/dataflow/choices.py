"""Options of one layer, each as a pair of programs that compute the same function."""

from statistics import median, quantiles
from typing import Any, NamedTuple

THREADS = 2
N, D = 8, 512
ROUNDS = 5


class Shape(NamedTuple):
    """Batch and length; self-attention of N heads on D features, float32."""

    B: int
    T: int

    @property
    def name(self) -> str:
        """For results and figures."""
        return f"B={self.B}, T={self.T}"


SHAPES = (Shape(8, 128), Shape(1, 1024))


class Choice(NamedTuple):
    """One option.

    Attributes:
      name: of the choice.
      dear, cheap: names of programs in `programs`; the ratio is dear to cheap.
      says: what the document says of it.
    """

    name: str
    dear: str
    cheap: str
    says: str


_SLOW = "need_weights=True forces a much slower computation"
_FAST = "a faster implementation under some conditions"
CHOICES = (
    Choice("weights returned / not", "weights", "no weights", _SLOW),
    Choice("the same, forward and backward", "weights, trained", "no weights, trained", _SLOW),
    Choice("weights averaged over heads / per head", "weights", "weights per head",
           "average_attn_weights averages them"),
    Choice("(T, B, D) / (B, T, D)", "sequence first", "no weights",
           "no convincing answer why batch_first is False"),
    Choice("three projections / one packed", "separate", "packed",
           "one concatenated weight where the widths agree"),
    Choice("fast path off / on, no weights", "no weights", "fast", _FAST),
    Choice("fast path off / on, weights", "weights", "fast, weights", _FAST),
)  # fmt: skip


class Ratio(NamedTuple):
    """Of two times in the same round: quartiles over the rounds."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio(found: dict[str, Any], framework: str, shape: str, choice: Choice) -> Ratio | None:
    """From a result file; None where the framework has no such choice."""
    seconds = found["seconds"][framework][shape]
    if choice.dear not in seconds or choice.cheap not in seconds:
        return None
    pairs = zip(seconds[choice.dear], seconds[choice.cheap], strict=True)
    ratios = [dear / cheap for dear, cheap in pairs]
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return Ratio(low, median(ratios), high)
