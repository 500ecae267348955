"""The experiments that the page shows, in its order, and what is known of each."""

import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import UndefinedError

from experiments import records
from experiments.pages import Page

FIGURE = re.compile(r"\]\(([^()\s]+\.(?:svg|png))\)")
HERE = Path(__file__).parents[1]


class Entry(NamedTuple):
    """One experiment on the page, as `experiments.toml` has it."""

    name: str
    seconds: float | None = None
    result: str = ""
    shown: str = ""
    helpers: str = ""

    @property
    def results(self) -> Path:
        """The file of its results."""
        return HERE / (self.result or f"{self.name}/results.json")

    @property
    def folder(self) -> Path:
        """Where its page looks for figures."""
        return self.page.path.parent

    @property
    def page(self) -> Page:
        """The page with the question, command, conclusion and text."""
        return Page(self.shown or f"{self.name}/page.md", self.helpers)


GROUPS = {
    title: tuple(Entry(**one) for one in group)
    for title, group in tomllib.loads(
        Path(__file__).with_name("experiments.toml").read_text(encoding="utf-8")
    ).items()
}
EXPERIMENTS = tuple(experiment for group in GROUPS.values() for experiment in group)


def found(experiment: Entry) -> dict[str, Any] | None:
    """Its stored results."""
    if not experiment.results.is_file():
        return None
    return records.load(experiment.results)


def stale(experiment: Entry) -> str | None:
    """Why it has to run again before the page is made, or None."""
    if experiment.seconds is None:
        return None
    return records.stale(experiment.results) or lost(experiment)


def outgrown(experiment: Entry) -> str | None:
    """A message if results that are never made again here may be outdated; or None."""
    if experiment.seconds is not None:
        return None
    stored = found(experiment)
    if stored is None:
        return None
    if "sources" not in stored:
        return "The results name no sources: changes of the code since are not known."
    reason = records.stale(experiment.results)
    return f"Older than the code: {reason}." if reason else None


def damaged(experiment: Entry) -> str | None:
    """The reason why the page of an experiment cannot be made; None if it can."""
    try:
        stored = found(experiment)
        if stored is not None:
            experiment.page.text(stored)
    except records.UnreadableError as error:
        return str(error)
    except (KeyError, UndefinedError) as error:
        return f"{records.shown(experiment.results)} has no part that its page shows ({error}): other code made it"
    return lost(experiment)


def lost(experiment: Entry) -> str | None:
    """The figures of its page that are not there, or None."""
    page = experiment.folder / "README.md"
    names = FIGURE.findall(page.read_text()) if page.is_file() else []
    missing = [name for name in names if not (experiment.folder / name).is_file()]
    return f"{', '.join(missing)} missing" if missing else None
