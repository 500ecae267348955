"""The examples in docstrings run, with JAX's defaults instead of the tests' strict promotion."""

import doctest
import importlib
import linecache
import pkgutil

import pytest

import jaxmha
from jaxmha import converters
from tests.promotion import foreign


def modules() -> list[str]:
    # The converters need not be inside the folder of jaxmha.
    packages = {"jaxmha": jaxmha.__path__, "jaxmha.converters": converters.__path__}
    found = {
        m.name for name, path in packages.items() for m in pkgutil.walk_packages(path, f"{name}.")
    }
    return sorted({*packages, *(name for name in found if not name.endswith("__main__"))})


@pytest.mark.parametrize("name", modules())
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    linecache.clearcache()  # doctest would look for changes of every file in it
    with foreign():
        result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_converters_are_among_them() -> None:
    assert {"jaxmha.attention", "jaxmha.converters.layout.base"} <= set(modules())


def test_a_wrong_example_is_noticed() -> None:
    example = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    runner = doctest.DocTestRunner(verbose=False)
    assert runner.run(example, out=lambda text: None).failed == 1
