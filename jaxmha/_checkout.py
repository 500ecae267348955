"""Finds the converters of a checkout whose link to them is missing.

An install has `converters` inside `jaxmha`. A checkout has it next to `jaxmha`, and a link inside, which
an archive or a system without links may have turned into a text file.
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
    """Lets `jaxmha.converters` be imported from a checkout without the link; else does nothing."""
    is_checkout = (_PACKAGE.parent / "pyproject.toml").is_file()
    if is_checkout and not (_PACKAGE / "converters").is_dir():
        sys.meta_path.insert(0, _Finder)  # before the finder of another editable install
