"""Stored results as one HTML page, as a page of Markdown each, and as a table of all."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from experiments.report import markup, registry
from experiments.report.registry import Entry

TEMPLATE = Path(__file__).with_name("template.html")
NOT_RUN = "Not run yet."
HEAD = """# Experiments

Questions, each with the command that answers it, its result file and, where it helps, figures.
Results carry versions and machine, and the seed where anything is drawn from one; every number in a
conclusion is taken from them. `make report` runs again what the code has
outgrown, writes these pages, and puts everything on one page: `build/report/index.html`.
Experiments that take long or need another machine are not run again by it: their results stay as
stored, and that page says below each whether the code has changed since, as does
`python -m experiments.report --json` (`remade` is false for them).
"""
Groups = Mapping[str, Sequence[Entry]]


def page(groups: Groups = registry.GROUPS) -> str:
    """The HTML page; needs nothing but itself."""
    anchors = {experiment.name for group in groups.values() for experiment in group}
    sections = {
        title: [section(experiment, anchors) for experiment in group]
        for title, group in groups.items()
    }
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    template = environment.from_string(TEMPLATE.read_text())
    return template.render(
        groups=[{"title": title, "sections": group} for title, group in sections.items()],
        date=max((s["date"] for group in sections.values() for s in group), default=""),
    )


def section(experiment: Entry, anchors: set[str]) -> dict[str, str]:
    """One experiment, in HTML."""
    found, shown = registry.found(experiment), experiment.page
    made = {
        "name": experiment.name,
        "label": "GPU"
        if experiment.name == "gpu"
        else experiment.name.replace("_", " ").capitalize(),
        "question": markup.inline(shown.question),
        "command": html.escape(shown.command),
        "answer": NOT_RUN,
        "body": "",
        "date": "",
        "made": "",
    }
    if found is not None:
        conclusion, _, text = shown.text(found).partition("\n\n")
        made["answer"] = markup.inline(conclusion)
        made["body"] = markup.body(text, experiment.folder, experiment.name, anchors)
        made["date"] = date(found)
        made["made"] = html.escape(origin(found))
        if (reason := registry.outgrown(experiment)) is not None:
            made["made"] += f"<br>{html.escape(reason)}"
    return made


def readme(experiment: Entry, found: dict[str, Any]) -> str:
    """One experiment, in Markdown, for its folder."""
    shown = experiment.page
    conclusion, _, text = shown.text(found).partition("\n\n")
    return (
        f"# {shown.question}\n\n**{conclusion}**\n\n{text}\n\n---\n\n"
        f"`{shown.command}` · {origin(found)}\n"
    )


def table(groups: Groups = registry.GROUPS) -> str:
    """One row for every experiment."""
    parts = [HEAD]
    for title, group in groups.items():
        rows = "\n".join(row(experiment) for experiment in group)
        head = "| question | command | date | result | conclusion |\n|---|---|---|---|---|"
        parts.append(f"## {title}\n\n{head}\n{rows}\n")
    return "\n".join(parts)


def row(experiment: Entry) -> str:
    """Question, command, date, result, conclusion."""
    found, shown = registry.found(experiment), experiment.page
    place = experiment.results.relative_to(registry.HERE)
    if found is None:
        return f"| {shown.question} | `{shown.command}` | – | `{place}`: none yet | {NOT_RUN} |"
    pages = place.with_suffix(".md") if experiment.shown else f"{experiment.name}/"
    question = f"[{shown.question}]({pages})"
    result = f"[{place.name}]({place})"
    conclusion = shown.conclusion(found).replace("|", "\\|")
    return f"| {question} | `{shown.command}` | {date(found)} | {result} | {conclusion} |"


def files(groups: Groups = registry.GROUPS) -> dict[Path, str]:
    """Every Markdown file that is made from results, with its text."""
    made = {registry.HERE / "README.md": table(groups)}
    for group in groups.values():
        for experiment in group:
            found = registry.found(experiment)
            if found is not None and not experiment.shown:
                made[experiment.folder / "README.md"] = readme(experiment, found)
    return made


def about(found: dict[str, Any]) -> dict[str, Any]:
    """Date, versions and machine: next to the results, or under `about`."""
    kept: dict[str, Any] = found.get("about", found)
    return kept


def date(found: dict[str, Any]) -> str:
    """Of the results."""
    return str(about(found)["date"])


def origin(found: dict[str, Any]) -> str:
    """When, from which seed, on what and with which versions."""
    kept = about(found)
    machine, versions = kept.get("machine", ""), kept["versions"]
    if isinstance(machine, dict):
        features = ", ".join([f"{machine['cores']} cores", *machine["instructions"]])
        machine = f"{machine['processor']} ({features}), {machine['memory_gib']} GiB"
        machine += f", {kept['machine']['system']}"
    parts = [kept["date"], machine, ", ".join(f"{name} {v}" for name, v in versions.items())]
    if found.get("seed") is not None:
        parts.insert(1, f"seed {found['seed']}")
    return " · ".join(part for part in parts if part)
