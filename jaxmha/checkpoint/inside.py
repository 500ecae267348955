"""Opens files that jaxmha itself finds in a folder: shards, a config.json, the file of a model.

A link in a downloaded folder could lead to any file of the user, and a conversion would copy that
file. Therefore links are refused, except links of a Hugging Face cache to its own blobs. A path
that the user gives may be a link.
"""

import os
import re
from pathlib import Path

from jaxmha.checkpoint.errors import PathEscape, UnreadableFile
from jaxmha.checkpoint.source import Source
from jaxmha.checkpoint.system import Directory

_BLOB = re.compile(r"\.\./\.\./blobs/[0-9a-f]{40,64}")


def open_folder(path: Path) -> Directory:
    """Opens a folder; raises UnreadableFile if that fails."""
    try:
        return Directory(path)
    except OSError as e:
        problem = f"the folder cannot be opened ({e.strerror or e})"
        raise UnreadableFile(path, problem, "check the path and its permissions") from e


def open_inside(
    folder: Directory,
    file: str,
    *,
    mapped: bool = False,
    held: bool = True,
    of: Path | None = None,
) -> Source:
    """Opens a file of an open folder; error messages about a link name the path `of`.

    Raises:
        PathEscape: the file is a link.  UnreadableFile: it is missing, or cannot be opened.
    """
    name, path = file, folder.path / file
    if os.path.islink(path):
        name = _blob(folder, file, of or folder.path)
    return Source(path, mapped=mapped, within=(folder, name), held=held)


def refuse_link(path: Path) -> None:
    """Raises PathEscape if a folder that was found in another folder is a link."""
    if path.is_symlink():
        raise _escape(path.parent, path.name)


def _blob(folder: Directory, file: str, of: Path) -> str:
    """The target of a link in the cache of Hugging Face; other links are refused."""
    target = folder.readlink(file).replace(os.sep, "/")
    parents = Path(os.path.realpath(folder.path)).parts[-3:]
    cached = len(parents) == 3 and parents[0].startswith("models--") and parents[1] == "snapshots"
    if not cached or not _BLOB.fullmatch(target):
        raise _escape(of, file)
    return target


def _escape(path: Path, file: str) -> PathEscape:
    return PathEscape(path, "the file is a link", "copy the file itself here", file)
