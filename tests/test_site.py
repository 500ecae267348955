"""The examples of the documentation run, each alone, and the reference has every public name."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from inspect import isclass, isfunction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.converters.layout import api
from jaxmha.converters.matching import load_into
from tests.test_imports import FACES

ROOT = Path(__file__).parents[1]
SETTINGS = ("JAXMHA_", "KERAS_", "OMP_", "XLA_")  # which the tests have, and readers have not
# A block of code, and what it prints: a block without a language right after it.
FENCE = r"^```{}\n(.*?)^```$(?:\n\n```\n(.*?)^```$)?"
SITE = ROOT / "docs"
TEXTS = {
    p.relative_to(SITE / "pages").as_posix(): p.read_text() for p in SITE.glob("pages/**/*.md")
}


class Example(NamedTuple):
    """A block of code: its page and number, the code, and what the page says that it prints."""

    name: str
    code: str
    output: str


def examples(language: str, pages: str = "") -> list[Example]:
    """All blocks in a language, of pages whose names begin so."""
    return [
        Example(f"{page.removesuffix('.md')}-{number}", *found)
        for page, text in sorted(TEXTS.items())
        if page.startswith(pages)
        for number, found in enumerate(
            re.findall(FENCE.format(language), text, re.DOTALL | re.MULTILINE)
        )
    ]


@pytest.mark.everyday(example=["start-1"])
@pytest.mark.parametrize("example", examples("python"))
def test_python_examples_run_alone(example: Example, tmp_path: Path) -> None:
    """As a reader copies it: a new interpreter, an empty folder, no settings, and no TensorFlow."""
    command = [sys.executable, "-c", example.code]
    (tmp_path / "tensorflow.py").write_text("raise ModuleNotFoundError('no module tensorflow')")
    environment = {name: x for name, x in os.environ.items() if not name.startswith(SETTINGS)}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert example.output in done.stdout


ROADS = ("from_torch", "from_transformers", "from_keras", "to_transformers")


@pytest.mark.parametrize("road", ROADS)
def test_a_road_into_another_framework_is_short(road: str) -> None:
    """Models included, the code that a user writes has at most 40 lines."""
    code = "".join(example.code for example in examples("python", f"how_to/{road}.md"))
    assert 10 < sum(bool(line.strip()) for line in code.splitlines()) <= 40


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that commands name: a layer, a folder of transformers, and modules of a user."""
    folder = tmp_path_factory.mktemp("files")
    names = [f"attention.self.{name}" for name in ("query", "key", "value")]
    state: dict[str, Any] = {}
    for name in (*names, "attention.output.dense"):
        state[f"{name}.weight"] = np.eye(6, dtype="f")
        state[f"{name}.bias"] = np.ones(6, "f")
    checkpoint.write(folder / "model.safetensors", state)
    (folder / "config.json").write_text('{"num_attention_heads": 2}')
    (page,) = examples("python", "how_to/from_transformers")
    code, _, _ = page.code.partition("source.save_pretrained")
    build = "\ndef build():\n    return {}\n"
    inputs = "\ndef inputs(rng):\n    return (rng.integers(0, 99, (2, 7)),)\n"
    (folder / "theirs.py").write_text(code + build.format("source"))
    (folder / "my_model.py").write_text(code + build.format("Encoder(nnx.Rngs(0))") + inputs)
    save = [sys.executable, "-c", "import theirs; theirs.build().save_pretrained('bert')"]
    subprocess.run(save, check=True, cwd=folder, capture_output=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("example", examples("console"))
def test_console_examples_run_alone(example: Example, files: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(files, tmp_path / "here")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for line in filter(None, example.code.splitlines()):
        command = line.removeprefix("$ ").split()
        done = subprocess.run(
            command, check=False, cwd=folder, capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)


def test_commands_are_examples() -> None:
    """Blocks that no test runs take minutes, or the network."""
    others = [
        line
        for page, text in TEXTS.items()
        if page != "reference/commands.md"  # made from the program
        for language, block in re.findall(r"^```(.*)\n((?s:.*?))^```$", text, re.MULTILINE)
        for line in block.splitlines()
        if re.match(r"(\$ )?jaxmha ", line) and language != "console"
        if not re.search("jaxmha bench|hf://", line)
    ]
    assert others == []


# Modules that users import, those of `test_imports` among them.
MODULES = (*FACES, "matching", "migrate", "sharded", "verify")
ROOMS = "checkpoint converters equinox flax haiku keras latent mods sharding"
PUBLIC = (
    "jaxmha",
    *(f"jaxmha.{x}" for x in (*ROOMS.split(), *(f"converters.{y}" for y in MODULES))),
)
# One function makes these for all modules; their protocol has the text.
MADE = {"import_params": api.Import, "export_params": api.Export, "load_into": load_into.LoadInto}
ENTRY = re.compile(r"^::: ([\w.]+)\n(?:    options: .*members: \[(.*?)\])?", re.MULTILINE)


def shown() -> Iterator[Any]:
    """Objects of the reference: of a module the members that are named, or else all of `__all__`."""
    for page, text in TEXTS.items():
        for entry in ENTRY.finditer(text) if page.startswith("reference/") else ():
            package, _, name = entry[1].rpartition(".")
            one = getattr(import_module(package), name, None) or import_module(entry[1])
            yield one
            everything = getattr(one, "__all__", []) if entry[2] is None else entry[2].split(", ")
            yield from (getattr(one, name) for name in filter(None, everything))


def test_every_public_name_is_in_the_reference() -> None:
    names = {
        f"{face}.{name}": getattr(import_module(face), name)
        for face in PUBLIC
        for name in import_module(face).__all__
    }
    asked = {name: x for name, x in names.items() if isfunction(x) or isclass(x)}
    assert len(asked) > 100
    known = set(map(id, shown()))
    missing = [name for name, x in asked.items() if id(x) not in known]
    assert [name for name in missing if "<locals>" not in asked[name].__qualname__] == []
    assert {name.rpartition(".")[2] for name in missing} == MADE.keys()
    for protocol in MADE.values():
        assert id(protocol) in known
        assert all(x in str(protocol.__call__.__doc__) for x in ("Args:", "Raises:"))
