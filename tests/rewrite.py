"""Writes a file again, as another file of the same name."""

from pathlib import Path


def rewrite(path: Path, data: bytes | bytearray | str) -> None:
    """A file that is cut to nothing first waits for the disk when it is opened again."""
    path.unlink(missing_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
