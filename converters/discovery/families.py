"""How each model type of transformers was converted, from the table families.tsv.

`python -m tests.zoo --write` writes the table from the results of its runs.
"""

from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("families.tsv")
# Verdict -> its meaning.
VERDICTS = {
    "right": "every block is converted, and equal to the model's own output, with its masks "
    "(`masks_of`) and its positions (`positions_of`)",
    "positions said": "every block is converted; a note says which positions are not computed",
    "masks said": "every block is converted; a note says which masks are not read",
    "parts said": "every block is converted; a note says which part around it is not",
    "carried, said": "attention of another form, or of no known layout, is carried over as it is; a note names it",
    "refused": "the conversion is refused, with the reason",
    "no attention": "the model has no softmax attention",
    "not run": "the model did not run; its blocks were not compared",
    "cannot be built": "no small model of the type could be built or run here",
}


class Checked(NamedTuple):
    """One row of the table: a model type, its verdict, and the layouts and positions of its blocks.

    `error` is the largest error relative to the largest logit or output; "" if no block was
    compared. `reason` explains the verdict.
    """

    model_type: str
    verdict: str
    layouts: str
    positions: str
    error: str
    reason: str


def checked() -> list[Checked]:
    """Every row of the table, sorted by model type.

    >>> next(one.verdict for one in checked() if one.model_type == "bert")
    'right'
    """
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return [Checked(*line.split("\t")) for line in lines]
