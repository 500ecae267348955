"""Figures that read well on light and dark pages, and are the same bytes for the same data."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from jaxmha.introspect.svg import INK, adaptive

SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "jaxmha",
    "savefig.transparent": True,
    "figure.constrained_layout.use": True,
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    ),
}


def style() -> Any:
    """The settings of every figure, as a context: `with style(): figure, axes = plt.subplots()`."""
    return plt.rc_context(SETTINGS)


def save(figure: Any, path: Path, *, about: str) -> None:
    """Writes an SVG or a PNG and closes the figure.

    Args:
        figure: of matplotlib, made under `style`. Lines and text of no colour of their own are
            drawn in `INK`. Or the text of an SVG.
        path: ends in .svg or .png.
        about: what one sees, for readers who do not see it.
    """
    if isinstance(figure, str):
        path.write_text(figure)
        return
    if path.suffix == ".png":
        figure.savefig(path, dpi=110)
        plt.close(figure)
        return
    with style():
        figure.savefig(path, metadata={"Date": None, "Title": about, "Creator": None})
    plt.close(figure)
    text = adaptive(path.read_text())
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
