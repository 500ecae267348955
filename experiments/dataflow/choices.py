"""Options of one layer, each as a pair of programs that compute the same function."""

import tomllib
from pathlib import Path
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
    """One option, as `document.toml` has it."""

    name: str
    dear: str
    cheap: str
    says: str


DOCUMENT = tomllib.loads(Path(__file__).with_name("document.toml").read_text())
CHOICES = tuple(Choice(**choice) for choice in DOCUMENT["choices"])


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
