"""Errors of every implementation, one panel per dtype."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from jaxmha.introspect.svg import INK

ALIKE = 0.15  # errors that differ by no more than this are drawn as one line
COLOURS = ("C3", "C0", "C1", "C2", "C4", "C5", "C6", "C8", "C9")
MARKERS = "os^Dv<>pX"
AXES = {"lengths": "keys S", "scales": "standard deviation of logits"}


def groups(rows: dict[str, Any], kind: str) -> dict[str, dict[str, list[Any]]]:
    """Errors by the names of all that have about the same."""
    found: dict[str, dict[str, list[Any]]] = {}
    for name, row in rows.items():
        for names, errors in found.items():
            if alike(errors, row[kind]):
                found[f"{names} = {name}"] = found.pop(names)
                break
        else:
            found[name] = row[kind]
    return found


def alike(a: dict[str, list[Any]], b: dict[str, list[Any]]) -> bool:
    """True if the errors of two implementations are about equal wherever both have numbers."""
    pairs = [(x, y) for dtype in a for x, y in zip(a[dtype], b[dtype], strict=True)]
    known = [(x, y) for x, y in pairs if not isinstance(x, str) and not isinstance(y, str)]
    return all(abs(x - y) <= ALIKE * max(x, y) for x, y in known)


def curves(kind: str, found: dict[str, Any]) -> Any:
    """One panel per dtype; a line ends where the output is not finite or was not computed."""
    lines, xs = groups(found["implementations"], kind), found["settings"][kind]
    dtypes = list(next(iter(lines.values())))
    figure, panels = plt.subplots(1, len(dtypes), figsize=(8, 4.6), sharey=True)
    for panel, dtype in zip(panels, dtypes, strict=True):
        looks = zip(lines.items(), COLOURS, MARKERS, strict=False)
        for (names, errors), colour, marker in looks:
            pairs = zip(xs, errors[dtype], strict=True)
            points = zip(*((x, y) for x, y in pairs if not isinstance(y, str)), strict=True)
            look: Any = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.3}
            panel.plot(*points, label=names, **look)
        panel.set(title=dtype, xscale="log", yscale="log", xlabel=AXES[kind])
        panel.xaxis.set_major_locator(FixedLocator(xs))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(FuncFormatter(short))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        panel.axhline(1, color=INK, linewidth=0.6)
        panel.grid(axis="y")
    panels[0].set_ylabel("error, rounding floors of the output")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=2, fontsize=8.5)
    return figure


def lengths(found: dict[str, Any]) -> Any:
    """RMS error against float64 over the number of keys, in rounding floors."""
    return curves("lengths", found)


def scales(found: dict[str, Any]) -> Any:
    """RMS error against float64 over the size of logits, in rounding floors."""
    return curves("scales", found)


FIGURES = {"lengths.svg": lengths, "scales.svg": scales}


def short(value: float, _: Any) -> str:
    """1024 as 1k.

    >>> short(16384, None), short(256, None)
    ('16k', '256')
    """
    return f"{value / 1024:.0f}k" if value >= 1024 else f"{value:.0f}"
