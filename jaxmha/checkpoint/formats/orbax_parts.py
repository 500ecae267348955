"""Recognises the files that orbax writes; replacing a checkpoint removes no other files."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

from jaxmha.checkpoint.errors import CheckpointError
from jaxmha.checkpoint.folder import Folder
from jaxmha.checkpoint.formats import orbax
from jaxmha.checkpoint.limits import UNLIMITED

_LOCK = r"(\.__lock)?"  # suffix of a file that tensorstore was writing
_STORE = rf"manifest\.ocdbt{_LOCK}|d|d/[0-9a-f]{{32}}{_LOCK}"
_FILES = (orbax.TREE, orbax.MARK, orbax.SIDECAR, orbax.ABOUT, "_sharding")
_OWN = re.compile(
    rf"{'|'.join(map(re.escape, _FILES))}|array_metadatas(/process_[0-9]+)?"
    rf"|{_STORE}|ocdbt\.process_[0-9]+(/({_STORE}))?"
)
# Paths inside the folder of an array of the tree: zarr 2 or 3 metadata and chunks.
_ARRAY = re.compile(
    rf"(\.zarray|\.zattrs|zarr\.json|[0-9]+([./][0-9]+)*|c(/[0-9]+)*){_LOCK}", re.ASCII
)


def of(path: Path) -> Callable[[str], bool]:
    """A predicate of paths inside the folder `path`: True for files and folders of orbax."""
    arrays: dict[str, str] = {}
    # If the tree metadata is unreadable, only files that orbax always writes match.
    with contextlib.suppress(CheckpointError):
        arrays = orbax.places(Folder(path, UNLIMITED), UNLIMITED)

    def is_part(inside: str) -> bool:
        array, _, rest = inside.partition("/")
        of_array = array in arrays and (not rest or _ARRAY.fullmatch(rest) is not None)
        return of_array or _OWN.fullmatch(inside) is not None

    return is_part
