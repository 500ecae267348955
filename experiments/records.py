"""Result files of experiments: what was found, by which sources, where and when."""

import ast
import hashlib
import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jaxmha.bench import machine
from jaxmha.checkpoint.atomic import replace_by

ROOT = Path(__file__).parents[1]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
STORING = (
    *(f"experiments/{name}.py" for name in ("records", "frame", "machine", "pages")),
    *(f"jaxmha/checkpoint/{name}.py" for name in ("atomic", "settling", "temporaries")),
)


def save(
    path: Path,
    found: dict[str, Any],
    *,
    command: str,
    seed: int | str | None = None,
    sources: Mapping[str, str] | None = None,
) -> None:
    """Puts a result in place in one step.

    Args:
        path: of the JSON file.
        found: what was measured; numbers, strings, lists and dicts. Not-a-number is refused.
        command: that makes the file again.
        seed: what the draws started from, or a rule for it; None where nothing is drawn.
        sources: of all processes that took part, if not those of this one.
    """
    record = {
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "seed": seed,
        "machine": machine.describe(),
        "versions": machine.versions(),
        **found,
        "sources": loaded() if sources is None else dict(sources),
    }
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    replace_by(path, text.encode(), force=True, mode=0o644)


class UnreadableError(ValueError):
    """A file of results, or of a page, that is damaged or missing."""


def load(path: Path) -> dict[str, Any]:
    """A result file as it was saved.

    Raises:
        UnreadableError: it is no JSON object.
    """
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise UnreadableError(f"{shown(path)} is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise UnreadableError(f"{shown(path)} is no JSON object")
    return record


def shown(path: Path) -> str:
    """For messages: from the root of the repository, where it is in there."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def loaded() -> dict[str, str]:
    """Digests of all modules of this repository that the process has loaded, and of their data.

    But for pages, and what only stores: what is said of results does not make them others.
    """
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    paths = (Path(file).resolve() for file in files if file)
    inside = {path.relative_to(ROOT) for path in paths if path.is_relative_to(ROOT)}
    data = {
        path.relative_to(ROOT)
        for folder in {ROOT / path.parent for path in inside}
        for path in folder.glob("*.toml")
        if folder != ROOT
    }
    return {
        str(path): digest(ROOT / path)
        for path in sorted(inside | data)
        if path.parts[0] in ("jaxmha", "converters", "experiments", "tests")
        and path.name != "page.py"
        and str(path) not in STORING
    }


def digest(path: Path) -> str:
    """Of a module's meaning: comments, docstrings and layout do not count."""
    stat = path.stat()
    return _digest(path, stat.st_mtime_ns, stat.st_size)


@cache  # many results are of the same sources
def _digest(path: Path, *_: int) -> str:
    source = path.read_bytes()
    return digest_of(source) if path.suffix == ".py" else hashlib.sha256(source).hexdigest()[:16]


def digest_of(source: bytes) -> str:
    """Of the text of a module.

    >>> digest_of(b"x = 1  # one") == digest_of(b"'About x.'\\nx = 1")
    True
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def stale(path: Path) -> str | None:
    """Why a result must be made again, or None."""
    if not path.is_file():
        return "there is none"
    try:
        sources = load(path).get("sources")
    except UnreadableError as error:
        return str(error)
    if not isinstance(sources, dict):
        return f"{shown(path)} names no sources"
    changed = [
        name
        for name, was in sources.items()
        if not (ROOT / name).is_file() or digest(ROOT / name) != was
    ]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"{', '.join(changed[:3])}{more} changed" if changed else None
