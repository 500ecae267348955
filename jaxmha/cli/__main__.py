"""Entry point of the command line; if a library is missing, it prints what to install."""

import io
import os
import signal
import sys
import traceback
from typing import Any, NoReturn, TextIO

CLOSED_PIPE = 128 + 13  # the exit code of a Unix tool that SIGPIPE ends, as shells show it


class _Pipe(io.FileIO):
    """A standard stream; once its reader has closed it, the next write ends the command silently.

    Unlike SIGPIPE, that removes temporary files, and leaves other pipes and sockets alone.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as nothing:  # takes what buffers still hold
                os.dup2(nothing.fileno(), self.fileno())
            sys.exit(CLOSED_PIPE)


def _piped(stream: TextIO) -> TextIO:
    """The stream as one whose reader may close it; a terminal, or no stream at all, as it is."""
    if stream is None or stream.isatty():
        return stream
    raw = _Pipe(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        stream.encoding,
        stream.errors,
        line_buffering=bool(stream.line_buffering),
    )


def _terminated(*_: Any) -> NoReturn:
    """Makes SIGTERM raise SystemExit, so that temporary files are removed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second SIGTERM must not interrupt the cleanup
    sys.exit(128 + signal.SIGTERM)


def main() -> None:
    """Runs `jaxmha`."""
    signal.signal(signal.SIGTERM, _terminated)
    sys.stdout, sys.stderr = _piped(sys.stdout), _piped(sys.stderr)
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
    try:
        app()
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()  # at exit, Python would complain of a closed pipe


if __name__ == "__main__":
    main()
