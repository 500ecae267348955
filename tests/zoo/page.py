"""Writes what a run of the zoo found: the table of the package, its page, and expected classes."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from jaxmha.converters.discovery import families
from jaxmha.converters.discovery.families import VERDICTS, Checked
from tests.zoo.overrides import UNBUILT

EXPECTED = Path(__file__).with_name("expected.json")
PAGE = Path(__file__).parents[2] / "docs" / "pages" / "reference" / "families.md"
_LONGEST = 160


def write(found: dict[str, Any]) -> None:
    """Writes the three files; types that were not run keep what the files say."""
    known = {row.model_type: row for row in families.checked()}
    known |= {model_type: _row(model_type, found[model_type]) for model_type in found}
    rows = [known[model_type] for model_type in sorted(known)]
    families.FILE.write_text("".join("\t".join(row) + "\n" for row in rows))
    EXPECTED.write_text(json.dumps({row.model_type: row.verdict for row in rows}, indent=1) + "\n")
    PAGE.write_text(text(rows))


def _row(model_type: str, result: dict[str, Any]) -> Checked:
    blocks = result.get("blocks", [])
    layouts = ", ".join(dict.fromkeys(b["layout"] for b in blocks))
    schemes = dict.fromkeys(
        b["scheme"].split(" ")[0] for b in blocks if b.get("scheme") and b["ran"]
    )
    errors = [b["error"] for b in blocks if b.get("class") == "right"]
    return Checked(
        model_type,
        result["class"],
        layouts,
        ", ".join(schemes),
        f"{max(errors):.0e}" if errors else "",
        _reason(model_type, result),
    )


def _reason(model_type: str, result: dict[str, Any]) -> str:
    """Why a type is not right, from the messages of the conversion."""
    label = result["class"]
    called = sum(bool(b.get("alone")) for b in result.get("blocks", []))
    if label == "right" and called:
        return f"{called} of {len(result['blocks'])} blocks were run alone, on drawn inputs"
    if label == "not run":
        return _not_run(result)
    if label in ("right", "no attention"):
        return ""
    if label == "cannot be built":
        return UNBUILT.get(model_type, _short(result.get("why", "")))
    if label == "carried, said" and result.get("carried"):
        return f"attention of no known layout: {re.sub('[0-9]+', '{i}', result['carried'][0])}"
    if label == "refused" and result.get("refused"):
        return _short(result["refused"][-1].partition(": ")[2])
    told = [
        b.get("why") or b.get("scheme", "")
        for b in result.get("blocks", [])
        if b.get("class") in ("positions said", "masks said", "parts said", "refused")
    ]
    return _short(told[0]) if told else ""


def _not_run(result: dict[str, Any]) -> str:
    """Names the blocks that did not run, and the error of the part that has them."""
    left = [b["prefix"] for b in result["blocks"] if b["class"] == "not run"]
    places = dict.fromkeys(re.sub(r"[0-9]+", "{i}", prefix) for prefix in left)
    errors = result.get("ran", {})
    inner = [k for k in errors if any(p.startswith(f"{k}.") for p in left)]
    why = errors.get(max(inner, key=len) if inner else "(top)", "")
    return _short(f"{len(left)} blocks did not run ({', '.join(places)}); {why}".rstrip("; "))


def _short(text: str) -> str:
    """One line without paths of temporary files."""
    line = re.sub(r"/\S*/(?=config\.json)", "", " ".join(text.split()))
    line = line.removeprefix("model.safetensors, ").removeprefix("model.safetensors: ")
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3].rpartition(" ")[0] + " ..."


def text(rows: list[Checked]) -> str:
    """The page of all types."""
    counts = Counter(row.verdict for row in rows)
    lines = [
        "# Families",
        "",
        (
            "Every model type of transformers was built with small random weights and run; every "
            "attention block that jaxmha converts was compared with the module's own output, in float64 "
            "where the model computes in it. `python -m tests.zoo --write` makes this page; `jaxmha "
            "layouts` prints it."
        ),
        "",
        "| verdict | types | meaning |",
        "|---|---|---|",
        *(
            f"| {name} | {counts[name]} | {about} |"
            for name, about in VERDICTS.items()
            if counts[name]
        ),
        "",
        (
            "The error is the largest difference of logits, relative to the largest logit. Rows without an "
            "error keep the verdict of an earlier run."
        ),
        "",
        "| model type | verdict | layouts | positions | error | reason |",
        "|---|---|---|---|---|---|",
        *("| " + " | ".join((f"`{row.model_type}`", *map(_cell, row[1:]))) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _cell(value: str) -> str:
    return value.replace("|", "\\|").replace("<", "&lt;")
