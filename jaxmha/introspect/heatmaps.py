"""Heat maps of attention weights: one panel per head, with a shared colour scale."""

import io
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmha.converters.layout.arrays import AnyArray, NDArray
from jaxmha.introspect.head_statistics import as_weights, check_tokens
from jaxmha.introspect.svg import INK, adaptive

if TYPE_CHECKING:
    from types import ModuleType

    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

Labels = tuple[Sequence[str] | None, Sequence[str] | None]  # labels of queries, labels of keys
PICTURES = (".png", ".svg", ".pdf")
COLOURS = "cividis"  # perceptually uniform, also for colour-blind readers
FONT = 8.0  # points: the smallest font size
LINE = FONT * 1.25 / 72  # inches per label, across the direction of its text
SMALLEST, LARGEST = 1.3, 5.0  # inches: bounds of the longer edge of a map
SHOWN = 24  # characters of a token shown


def plot_attention(
    weights: AnyArray,
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    *,
    heads: Sequence[int] | None = None,
    batch: int | None = None,
    titles: Sequence[str] | None = None,
    title: str = "",
    columns: int | None = None,
) -> "Figure":
    """Draws a heat map of every head: rows are queries, columns are keys. Needs matplotlib.

    Args:
      weights: `(N, T, S)`; `(T, S)`, one head or a mean over heads; or `(B, N, T, S)` with `batch`.
        NaN (a fully masked row, under some policies) is hatched.
      tokens: T labels of the queries; default their numbers.
      key_tokens: S labels of the keys; default `tokens` if T equals S.
      heads: indices of the heads to draw, in this order; default all.
      batch: index of the batch row.
      titles: one title for each head drawn; default its number.
      title: title of the whole figure.
      columns: number of maps in a row; by default, the figure is about square.

    Returns:
      A `matplotlib.figure.Figure` with one axes per head and one for the colour scale, which is
      shared: 0 to the largest weight drawn. `picture` converts it to bytes.

    Raises:
      ImportError: matplotlib is missing.
      ValueError: a shape, a head, or a number of labels does not fit; names the expected axes.

    >>> import numpy as np
    >>> figure = plot_attention(np.eye(3)[None], ["a", "b", "c"])
    >>> [axes.get_title() for axes in figure.axes[:1]]
    ['head 0']
    """
    array = as_weights(weights, batch)
    N, T, S = array.shape
    key_tokens = tokens if key_tokens is None and tokens is not None and T == S else key_tokens
    check_tokens("tokens", tokens, T, "T")
    check_tokens("key_tokens", key_tokens, S, "S")
    chosen = _chosen(heads, N)
    names = _titles(titles, chosen)
    if columns is not None and columns < 1:
        raise ValueError(f"columns must be at least 1, got {columns}")
    matplotlib = import_matplotlib()
    with matplotlib.rc_context(_settings()):
        labels = tokens, key_tokens
        figure, grid, size = _grid(len(chosen), (T, S), labels, columns, bool(title))
        image = _draw(grid, array[chosen], names)
        _label_axes(grid, len(chosen), size, (T, S), labels)
        shrink = min(1.0, 2.5 / (len(grid) * size[0]))
        bar = figure.colorbar(image, ax=list(grid.flat)[: len(chosen)], shrink=shrink)
        bar.set_label("weight of the key")
        figure.supylabel("query", fontsize=FONT + 1)
        figure.supxlabel("key", fontsize=FONT + 1)
        if title:
            figure.suptitle("\n".join(textwrap.wrap(title, 100)), fontsize=FONT + 2)
    return figure


def _chosen(heads: Sequence[int] | None, N: int) -> list[int]:
    chosen = list(range(N)) if heads is None else list(heads)
    if not chosen or any(type(n) is not int or not 0 <= n < N for n in chosen):
        raise ValueError(f"heads: expected numbers from 0 to {N - 1}, got {chosen}")
    return chosen


def _titles(titles: Sequence[str] | None, heads: Sequence[int]) -> list[str]:
    names = [f"head {n}" for n in heads] if titles is None else list(titles)
    if len(names) != len(heads):
        raise ValueError(f"titles: expected {len(heads)}, one for each head, got {len(names)}")
    return names


def _grid(
    count: int,
    lengths: tuple[int, int],
    labels: Labels,
    columns: int | None,
    titled: bool,
) -> "tuple[Figure, np.ndarray, tuple[float, float]]":
    """A figure, its grid of axes, and the height and width of a map in inches."""
    from matplotlib.figure import Figure

    height, width = _sides(*lengths)
    across = min(columns or _columns(count, height, width), count)
    down = math.ceil(count / across)
    left, below = (_margin(names, n) for names, n in zip(labels, lengths, strict=True))
    top = 0.35 + 0.3 * titled
    size = left + across * (width + 0.25) + 1.0, below + down * (height + 0.35) + top
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    return figure, grid, (height, width)


def _draw(grid: np.ndarray, maps: NDArray, names: Sequence[str]) -> "AxesImage":
    """Draws the maps with one colour scale; returns the last one."""
    shades = import_matplotlib().colormaps[COLOURS].with_extremes(bad=(0, 0, 0, 0))
    largest = float(np.max(maps, initial=0.0, where=np.isfinite(maps))) or 1.0
    for axes, map_, name in zip(grid.flat, maps, names, strict=False):
        axes.set_facecolor("none")
        axes.patch.set(hatch="////", edgecolor="#7f7f7f", linewidth=0)
        image: AxesImage = axes.imshow(
            map_, cmap=shades, vmin=0.0, vmax=largest, interpolation="nearest", aspect="equal"
        )
        axes.set_title(name, fontsize=FONT + 1)
    return image


def _label_axes(
    grid: np.ndarray,
    count: int,
    size: tuple[float, float],
    lengths: tuple[int, int],
    labels: Labels,
) -> None:
    """Labels the outer axes, and removes the panels without a map."""
    flat, across = list(grid.flat), grid.shape[1]
    _label(flat[0].yaxis, labels[0], lengths[0], size[0])
    _label(flat[0].xaxis, labels[1], lengths[1], size[1])
    for axes in flat[count:]:
        axes.remove()
    upright = labels[1] is not None or lengths[1] > 99
    for index, axes in enumerate(flat[:count]):
        axes.tick_params(labelbottom=index + across >= count, labelleft=index % across == 0)
        axes.tick_params(axis="x", rotation=90 if upright else 0)


def picture(figure: "Figure", suffix: str) -> bytes:
    """Renders a figure as `.svg` (which adapts to light and dark pages), `.png` or `.pdf`.

    Raises:
      ValueError: another suffix.
    """
    if suffix.lower() not in PICTURES:
        raise ValueError(f"pictures are {', '.join(PICTURES)}, got {suffix!r}")
    matplotlib = import_matplotlib()
    stream = io.BytesIO()
    plain = suffix.lower() != ".svg"
    with matplotlib.rc_context({**_settings(), "svg.fonttype": "none", "svg.hashsalt": "jaxmha"}):
        figure.savefig(
            stream,
            format=suffix.lower().removeprefix("."),
            dpi=150,
            transparent=not plain,
            facecolor="white" if plain else "none",
            metadata={"Date": None} if suffix.lower() == ".svg" else None,
        )
    return stream.getvalue() if plain else adaptive(stream.getvalue().decode()).encode()


def import_matplotlib() -> "ModuleType":
    """Returns the package, or raises ImportError that says how to install it."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError(
            "drawing needs matplotlib: pip install 'jaxmha[plot]' (or pip install matplotlib)"
        ) from None
    return matplotlib


def _settings() -> dict[str, Any]:
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    return {
        "font.size": FONT,
        "font.family": "sans-serif",
        "hatch.color": "#7f7f7f",
        **dict.fromkeys(inked, INK),
    }


def _columns(count: int, height: float, width: float) -> int:
    """Number of columns that makes the figure about square; at most four."""
    return max(1, min(4, round(math.sqrt(count * height / width))))


def _sides(T: int, S: int) -> tuple[float, float]:
    """Height and width of a map in inches: one line per label, unless the map gets too large."""
    step = min(max(LINE, SMALLEST / max(T, S)), LARGEST / max(T, S))
    return T * step, S * step


def _margin(labels: Sequence[str] | None, size: int) -> float:
    longest = len(str(size)) if labels is None else max(len(_shown(label)) for label in labels)
    return 0.3 + 0.6 * FONT / 72 * longest


def _shown(token: str) -> str:
    """The token on one line, with `$` escaped because matplotlib reads it as a formula."""
    text = " ".join(token.split()) or repr(token)
    text = text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
    return text.replace("$", r"\$")


def _label(axis: "Axis", labels: Sequence[str] | None, size: int, inches: float) -> None:
    """Adds every label, or every k-th if they would overlap."""
    step = math.ceil(size * LINE / inches - 1e-9)
    shown = range(0, size, step)
    axis.set_ticks(shown, [str(i) if labels is None else _shown(labels[i]) for i in shown])
