"""Which claims of the three documents are true?

Every claim is checked by a small function that returns numbers, and whether it holds under which
condition. All run in one process, Keras on TensorFlow.
"""

import importlib
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any, cast

from experiments import frame
from experiments.claims import elsewhere
from experiments.claims.claims import CLAIMS, DOCUMENTS, MODULES, Found

EXAMPLES = """examples:
  python -m experiments.claims                     table, half a minute
  python -m experiments.claims --only one_head     of one document
  python -m experiments.claims --write             and results.json next to it
"""
SEED = 42


def check(chosen: Namespace) -> dict[str, Any]:
    """Document -> check -> whether and when it holds, and numbers."""
    if chosen.write and chosen.only:
        raise ValueError("--write stores all of it: leave --only out")
    os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    import keras

    documents = [chosen.only] if chosen.only else list(DOCUMENTS)
    claims = [
        (name, claim)
        for name in documents
        for claim in CLAIMS[name]
        if not hasattr(elsewhere, claim.check)
    ]
    found: dict[str, Any] = {name: {} for name in documents}
    with frame.bars(claims=len(claims)) as tick:
        for name, claim in claims:
            keras.utils.set_random_seed(SEED)
            result = check_of(name, claim.check)()
            claim.evidence.format(**result.numbers)  # raises where a number is missing
            found[name][claim.check] = result._asdict()
            tick("claims")
    return {"documents": found}


def check_of(document: str, name: str) -> Callable[[], Found]:
    """The function, from the modules of a document."""
    modules = [importlib.import_module(f"experiments.claims.{m}") for m in MODULES[document]]
    (check,) = {getattr(module, name) for module in modules if hasattr(module, name)}
    return cast("Callable[[], Found]", check)


EXPERIMENT = frame.of(
    check,
    EXAMPLES,
    options={"--only": {"choices": list(DOCUMENTS), "help": "one document"}},
    seed=SEED,
)

if __name__ == "__main__":
    frame.main(EXPERIMENT)
