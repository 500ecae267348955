"""Expected classes of models of other libraries, and their counts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.zoo.other_models import BY_TITLE, UNLIKE

EXPECTED = Path(__file__).with_name("others.json")
WITHOUT = ("no attention", "cannot be built")


def expected() -> dict[str, str]:
    """Model -> its class in the last run of all of them."""
    found: dict[str, str] = json.loads(EXPECTED.read_text())
    return found


def write(found: Mapping[str, Any]) -> None:
    """Writes the classes of a run; models that were not built keep theirs."""
    known = expected() if EXPECTED.exists() else {}
    made = {t: one["class"] for t, one in found.items() if t in BY_TITLE}
    known = {t: c for t, c in known.items() if t in BY_TITLE}
    known |= {t: c for t, c in made.items() if c != "cannot be built" or t not in known}
    EXPECTED.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def counts(classes: Mapping[str, str]) -> str:
    """How many models are right: of those with attention, and with those that are rightly refused.

    A model of which any block has another form than softmax over keys (`UNLIKE`) is rightly refused
    if it is not right, and nothing of it is wrong.
    """
    whole = {t: c for t, c in classes.items() if c not in WITHOUT}
    right = sum(c == "right" for c in whole.values())
    said = ("refused", "carried, said", "parts said", "positions said")
    refused = sum(t in UNLIKE and c in said for t, c in whole.items())
    share = 100 * (right + refused) / len(whole) if whole else 0.0
    return (
        f"{right} of {len(whole)} right, {refused} of another form and refused: {share:.0f} %; "
        f"{len(whole) - refused} have softmax attention alone"
    )
