"""Writes what a run of the zoo found: the table of the package, its page, and expected classes."""

import json
import re
from collections import Counter
from collections.abc import Iterator
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
        reason(model_type, result),
    )


def reason(model_type: str, result: dict[str, Any]) -> str:
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
        return _short("; ".join(_carried(result)))
    if label == "refused" and result.get("refused"):
        return _short(result["refused"][-1].partition(": ")[2])
    if label in ("positions said", "parts said"):
        return _short("; ".join(_not_computed(result)))
    told = [
        b.get("why") or b.get("scheme", "")
        for b in result.get("blocks", [])
        if b.get("class") in ("masks said", "refused")
    ]
    return _short(told[0]) if told else ""


def _carried(result: dict[str, Any]) -> Iterator[str]:
    """The form of carried attention that the notes tell, with its places."""
    forms: dict[str, dict[str, None]] = {}
    for note in result["notes"]:
        if found := re.search(r"attention of no known layout, \d+ x (.*), carried", note):
            _, *more = note[found.end() :].split("; ")
            forms.setdefault(more[-1] if more else "no known layout", {})[found[1]] = None
    for form, places in forms.items():
        yield f"{form} ({', '.join(places)})"


def _not_computed(result: dict[str, Any]) -> Iterator[str]:
    """The parts of a model that, by the notes on its types, the caller computes."""
    places = {b["scheme"] for b in result["blocks"] if b.get("scheme", "").startswith("unknown")}
    yield from sorted(place.partition(" ")[2] for place in places)
    for note in () if places else result.get("notes_converted", ()):
        if found := re.match(r"not converted: (.*?), by (.*); ", note):
            yield found[1]


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
