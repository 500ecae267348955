"""Which claims of the three documents are true?

Every claim is checked by a small function that returns numbers, and whether it holds under which
condition. All run in one process, Keras on TensorFlow.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from experiments import command
from experiments.claims import elsewhere
from experiments.claims.claims import CLAIMS, DOCUMENTS, MODULES
from experiments.claims.found import Found

EXAMPLES = """examples:
  python -m experiments.claims                     table, half a minute
  python -m experiments.claims --only one_head     of one document
  python -m experiments.claims --write             and results.json beside it
"""
SEED = 42
HERE = Path(__file__).parent


def main(arguments: list[str] | None = None) -> int:
    """Checks, prints, and writes where asked."""
    names = tuple(DOCUMENTS)
    parser = command.parser("claims", __doc__, EXAMPLES)
    parser.add_argument("--only", choices=names, help="one document")
    options = parser.parse_args(arguments)
    if options.write and options.only:
        parser.error("--write stores all of it: leave --only out")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    found = check((options.only,) if options.only else names)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)
    if options.write:
        from experiments import records
        from experiments.claims import page

        records.save(HERE / "results.json", found, command=page.COMMAND, seed=SEED)
    return 0


def check(documents: tuple[str, ...]) -> dict[str, Any]:
    """Document -> check -> whether and when it holds, and numbers."""
    import keras
    from rich.console import Console
    from rich.progress import track

    claims = [
        (name, claim)
        for name in documents
        for claim in CLAIMS[name]
        if not hasattr(elsewhere, claim.check)
    ]
    console = Console(stderr=True)
    found: dict[str, Any] = {name: {} for name in documents}
    for name, claim in track(claims, "claims", console=console, transient=True):
        keras.utils.set_random_seed(SEED)
        result = check_of(name, claim.check)()
        claim.evidence.format(**result.numbers)  # raises where a number is missing
        found[name][claim.check] = result._asdict()
    return {"documents": found}


def check_of(document: str, name: str) -> Callable[[], Found]:
    """The function, from the modules of a document."""
    modules = [importlib.import_module(f"experiments.claims.{m}") for m in MODULES[document]]
    (check,) = {getattr(module, name) for module in modules if hasattr(module, name)}
    return cast("Callable[[], Found]", check)


def show(found: dict[str, Any]) -> None:
    """One table per document."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from experiments.claims import page

    for name, rows in page.tables(found).items():
        table = Table("claim", "verdict", "evidence", title=name, title_justify="left")
        for row in rows:
            table.add_row(*map(escape, row))
        Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
