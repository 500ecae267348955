"""Experiments: `python -m experiments.<name>`."""

import sys
from typing import Any


def _end(kind: type[BaseException], error: Any, trace: Any) -> None:
    """One message where a package is missing (exit code 2), and after Ctrl-C (130)."""
    stopped = isinstance(error, KeyboardInterrupt)
    if not stopped and not isinstance(error, ModuleNotFoundError):
        return sys.__excepthook__(kind, error, trace)
    print("stopped" if stopped else f"{error.name} is not installed", file=sys.stderr)
    sys.exit(130 if stopped else 2)


if sys.argv[0] == "-m":  # a command, whose module is not imported yet
    sys.excepthook = _end
