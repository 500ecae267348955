"""Entry point of the command line; if a library is missing, it prints what to install."""

import errno
import io
import os
import signal
import sys
import traceback
from typing import Any, NoReturn, TextIO

CLOSED_PIPE = 128 + 13  # the exit code of a Unix tool that SIGPIPE ends, as shells show it
_CLOSED = (errno.EPIPE, errno.EINVAL) if os.name == "nt" else (errno.EPIPE,)


class _Pipe(io.FileIO):
    """A standard stream; once its reader has closed it, the next write ends the command silently.

    Unlike the default action of SIGPIPE, this removes temporary files, and does not affect other
    pipes and sockets. Any other failure, such as a full disk, raises once; later writes are lost.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            with open(os.devnull, "wb") as nothing:  # receives the rest of the buffers
                os.dup2(nothing.fileno(), self.fileno())
            if error.errno in _CLOSED:
                sys.exit(CLOSED_PIPE)
            # of standard error too, where nobody would read it
            raise OSError(f"standard output: {error.strerror}") from error


def _piped(stream: TextIO | None) -> TextIO:
    """Wraps a stream in `_Pipe`; a terminal stays as it is, and a closed stream becomes /dev/null."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper) or stream.isatty():
        return stream
    raw = _Pipe(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
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
        try:
            app()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # else Python reports a closed pipe at exit
    except OSError as error:  # of a standard stream: the app reports all others
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
