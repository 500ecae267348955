"""Where results go: asked before anything is measured."""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryFile


def check(folder: Path, files: Iterable[str] = ()) -> None:
    """Raises ValueError where such files cannot be put into a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{folder}: results cannot be stored there: {error.strerror}") from error
    for name in files:
        if (folder / name).exists() and not (folder / name).is_file():
            raise ValueError(f"{folder / name}: results cannot be stored there: it is no file")
