"""The examples in docstrings run, with JAX's defaults instead of the tests' strict promotion."""

import doctest
import importlib.util
import linecache
import pkgutil
from pathlib import Path

import pytest

import jaxmha
from jaxmha import converters
from tests.promotion import foreign

# Their examples compile steps and layers, which tests of their own compile too.
DEAR = (
    "jaxmha.decoding", "jaxmha.equinox", "jaxmha.extend_heads", "jaxmha.flax.*", "!jaxmha.flax.settings",
    "jaxmha.haiku", "jaxmha.latent.*", "jaxmha.converters.discovery.axial",
    "jaxmha.converters.discovery.live_model", "jaxmha.converters.equinox",
    "jaxmha.converters.layout.latent", "jaxmha.keras.switch", "jaxmha.matmul",
)  # fmt: skip


def modules() -> list[str]:
    # The converters need not be inside the folder of jaxmha.
    packages = {"jaxmha": jaxmha.__path__, "jaxmha.converters": converters.__path__}
    found = {
        m.name for name, path in packages.items() for m in pkgutil.walk_packages(path, f"{name}.")
    }
    return sorted({*packages, *(name for name in found if not name.endswith("__main__"))})


def has_examples(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and ">>> " in Path(str(spec.origin)).read_text()


@pytest.mark.slow_variants(*DEAR)
@pytest.mark.parametrize("name", [*filter(has_examples, modules())])
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
