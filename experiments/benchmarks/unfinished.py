"""Cases measured so far, kept so that a long run can go on another time."""

import hashlib
import json
from pathlib import Path
from typing import Any

from jaxmha.bench import machine
from jaxmha.bench.measure import NOTHING
from jaxmha.implementations.native import library

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "benchmarks"
MEASURED: dict[str, Any] = {name: type(empty) for name, empty in NOTHING.items()}
# Sources that affect the measured times.
TIMED = "jaxmha/**/*.py"


def identity(**options: Any) -> dict[str, Any]:
    """Facts that must agree before times may be in one table.

    These are the machine, versions, environment settings, the native kernels or the reason why
    they do not run, sources of library and peers, and options.
    """
    sources = hashlib.sha256()
    for path in sorted(ROOT.glob(TIMED)):
        sources.update(path.read_bytes())
    about = {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "settings": machine.settings(),
        "native": library.unavailable() or "used",
    }
    return {**about, "sources": sources.hexdigest(), **options}


def keep(path: Path, results: dict[str, Any]) -> None:
    """Stores results in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(path)


def resume(path: Path, key: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """The results of an unfinished run, and the seconds that it took; empty if there is none.

    Raises:
      ValueError: the run had another machine, or other versions, sources or options.
    """
    if not path.exists():
        return NOTHING, 0.0
    stored = _loaded("--resume", path, identity=dict, found=dict, seconds=int | float)
    _whole("--resume", path, stored["found"], **MEASURED)
    same("--resume", path, stored["identity"], key)
    return stored["found"], stored["seconds"]


def stored(path: Path, key: dict[str, Any]) -> dict[str, Any]:
    """Results as they are stored, of any sources and cases.

    Raises:
      ValueError: there are none, or it was another machine, or other versions or options.
    """
    if not path.exists():
        raise ValueError(f"--again: there is no {path}: leave --again out to make it")
    others: dict[str, Any] = {"seconds": int | float, "date": str, "command": str}
    results = _loaded("--again", path, peers=dict, **MEASURED, **others)
    for peer in results["peers"].values():
        _whole("--again", path, peer, absent=str | None)
    peers = {name: peer["absent"] for name, peer in results["peers"].items()}
    kept = {name: value for name, value in key.items() if name not in ("sources", "cases")}
    same("--again", path, results | {"peers": peers}, kept)
    return results


def _loaded(option: str, path: Path, /, **kinds: Any) -> dict[str, Any]:
    """Raises ValueError where it is not what a run has stored."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}: {path} is no JSON: {error}") from error
    _whole(option, path, found, **kinds)
    return found


def _whole(option: str, path: Path, found: Any, /, **kinds: Any) -> None:
    """Raises ValueError where something is not there, or of another kind."""
    has = found if isinstance(found, dict) else {}
    wrong = [x for x, kind in kinds.items() if x not in has or not isinstance(has[x], kind)]
    if wrong:
        raise ValueError(
            f"{option}: {path} has no {', '.join(wrong)} as a run stores them: leave {option} out"
        )
    for entry in has["cases"] if "cases" in kinds else ():
        _whole(option, path, entry, name=str, peers=dict)


def same(option: str, path: Path, found: dict[str, Any], key: dict[str, Any]) -> dict[str, Any]:
    """The results, if they agree with the key; otherwise raises ValueError."""
    other = [name for name, value in key.items() if found.get(name) != value]
    if other:
        raise ValueError(
            f"{option}: {path} was measured with other {', '.join(other)}: leave {option} out to "
            "start again"
        )
    return found
