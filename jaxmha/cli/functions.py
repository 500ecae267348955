"""Functions that a user names as MODULE:FUNCTION, and the models that they build."""

import importlib
import os
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxmha.checkpoint import hub
from jaxmha.converters.layout.base import guess

_EXPECTED = "expected a file, or MODULE:FUNCTION that builds the model"
_folders: list[str] = []  # of the modules imported so far


def built(target: str) -> Any:
    """The path of TARGET, or the return value of FUNCTION if TARGET is `MODULE:FUNCTION`."""
    path = Path(target)
    if path.suffix == ".py" and path.is_file():
        raise ValueError(f"{target}: name the function that builds the model, as in {target}:build")
    if path.exists():
        return path
    if ":" not in target:
        raise ValueError(f"{target}: {_EXPECTED}")
    function = found(target)
    try:
        made = function()
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{target}: the function, called without arguments, raised {type(error).__name__}: {error}"
        ) from error
    if made is None:
        raise ValueError(f"{target}: the function returned None: return the model that it builds")
    return made


def source_of(text: str) -> Any:
    """The checkpoint as a path, or for MODULE:FUNCTION the model that the function builds."""
    is_code = text.endswith(".py") and Path(text).is_file()
    module, colon, _ = text.rpartition(":")
    if not is_code and (not colon or "://" in text or Path(text).exists() or not module):
        return Path(text)
    return built(text)


def found(target: str) -> Callable[..., Any]:
    """The function that MODULE:FUNCTION names; the module may be a file, in any folder.

    The folder of the module stays on `sys.path`, for imports while the function or its model runs.
    """
    hub.refuse_url(target, "name a local file, or MODULE:FUNCTION that builds the model")
    module, _, function = target.rpartition(":")
    if not module or not function:
        raise ValueError(f"{target}: {_EXPECTED}, as in my_model.py:build")
    try:
        loaded = _imported(target, module)
    except (Exception, SystemExit) as error:
        if isinstance(error, _MissingError):
            raise
        raise ValueError(
            f"{target}: the import of {module} raised {type(error).__name__}: {error}"
        ) from error
    made = getattr(loaded, function, None)
    if made is None:
        names = [name for name, value in vars(loaded).items() if callable(value)]
        hint = guess(function, names).rstrip()
        raise ValueError(f"{target}: {module} has no function {function}{hint and f': {hint}'}")
    if not callable(made):
        raise TypeError(f"{target}: {function} is {type(made).__name__}, expected a function")
    return made  # type: ignore[no-any-return]


class _MissingError(ValueError):
    """There is no such module."""


def _imported(target: str, module: str) -> ModuleType:
    module = os.path.normpath(module)
    path = Path(os.path.abspath(f"{module.removesuffix('.py')}.py"))
    is_file = module.endswith(".py") or os.sep in module
    if is_file and not path.is_file():
        raise _MissingError(f"{target}: there is no file {path}")
    _put_on_path(os.getcwd())
    name = module
    if path.is_file():
        folder, name = path.parent, path.stem
        while (folder / "__init__.py").exists():  # a package imports its own modules by its name
            folder, name = folder.parent, f"{folder.name}.{name}"
        _put_on_path(str(folder))
        from_here = os.path.relpath(path.with_suffix("")).replace(os.sep, ".")
        known = [one for one in (from_here, name) if _origin(one) == str(path)]
        if not known:  # both names import another module, or none
            return _of_file(path)
        name = known[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise _MissingError(f"{target}: there is no module {name}") from error


def _origin(name: str) -> str | None:
    """The file of the module that a name imports, or None."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec else None


def _put_on_path(folder: str) -> None:
    """Puts a folder first on `sys.path`, before those of other functions.

    Modules of the same names from those folders are imported anew: two models may each have a
    `layers.py` next to them.
    """
    for name in {path.stem for path in Path(folder).glob("*.py")} & sys.modules.keys():
        file = getattr(sys.modules[name], "__file__", None) or ""
        if os.path.dirname(file) in _folders and os.path.dirname(file) != folder:
            del sys.modules[name]
    if folder not in _folders:
        _folders.append(folder)
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)


def _of_file(path: Path) -> ModuleType:
    """Imports a file by its path; two files of the same name are two modules."""
    name = re.sub(r"\W", "_", str(path.with_suffix("")))
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = made = module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(made)
    return made
