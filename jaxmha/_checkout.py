"""Lets a checkout import folders that the wheel has inside `jaxmha`, and the checkout elsewhere.

`jaxmha/converters` is a symbolic link, which an archive, or a system without symbolic links, may
replace by a text file. `jaxmha/recipes` has no link: recipes are experiments, which users copy.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).parent
_ROOMS = {"converters": "converters", "recipes": "experiments/recipes"}


class _Finder:
    @staticmethod
    def find_spec(
        name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        room = name.removeprefix("jaxmha.")
        if name != f"jaxmha.{room}" or room not in _ROOMS or (_PACKAGE / room).is_dir():
            return None
        folder = _PACKAGE.parent / _ROOMS[room]
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def find_rooms() -> None:
    """Makes `jaxmha.converters` and `jaxmha.recipes` importable in a checkout."""
    if (_PACKAGE.parent / "pyproject.toml").is_file():
        sys.meta_path.insert(0, _Finder)  # first: another editable install has a finder too
