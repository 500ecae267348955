"""Finds `jaxmha.converters` in a checkout whose symbolic link to it is missing.

In an installed package, `converters` is a folder inside `jaxmha`. In a checkout it is next to
`jaxmha`, with a symbolic link inside; an archive, or a system without symbolic links, may replace
the link by a text file.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).parent
_NEXT_TO_IT = _PACKAGE.parent / "converters"


class _Finder:
    @staticmethod
    def find_spec(
        name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "jaxmha.converters":
            return None
        folders = [str(_NEXT_TO_IT)]
        return importlib.util.spec_from_file_location(
            name, _NEXT_TO_IT / "__init__.py", submodule_search_locations=folders
        )


def find_converters() -> None:
    """Makes `jaxmha.converters` importable in a checkout without the link; else does nothing."""
    is_checkout = (_PACKAGE.parent / "pyproject.toml").is_file()
    if is_checkout and not (_PACKAGE / "converters").is_dir():
        sys.meta_path.insert(0, _Finder)  # before the finder of another editable install
