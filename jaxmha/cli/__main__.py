"""Entry point of the command line; if a library is missing, it prints what to install."""

import os
import signal
import sys
import traceback
from typing import Any, NoReturn


def _terminated(*_: Any) -> NoReturn:
    """Makes SIGTERM raise SystemExit, so that temporary files are removed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second SIGTERM must not interrupt the cleanup
    sys.exit(128 + signal.SIGTERM)


def main() -> None:
    """Runs `jaxmha`."""
    signal.signal(signal.SIGTERM, _terminated)
    # End silently if the reader closes the pipe, as other Unix tools do.
    if (closed_pipe := getattr(signal, "SIGPIPE", None)) is not None:
        signal.signal(closed_pipe, signal.SIG_DFL)
    try:
        from jaxmha.cli.app import app
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # noqa: BLE001 (no traceback for users)
        if os.environ.get("JAXMHA_DEBUG"):
            traceback.print_exc()
        text = f"error: the command line does not start: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name in ("typer", "rich"):
            text = f"the command line needs {error.name}: pip install 'jaxmha[cli]'"
        print(" ".join(text.split()), file=sys.stderr)
        sys.exit(2)
    app()


if __name__ == "__main__":
    main()
