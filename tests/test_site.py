"""The examples of the documentation run, each alone, and the reference has every public name."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import jaxmha
import jaxmha.flax
from jaxmha import checkpoint

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


@pytest.mark.everyday(example=["index-0", "start-1", "start-2"])
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


def test_every_public_name_is_in_the_reference() -> None:
    asked = {
        name
        for page, text in TEXTS.items()
        if page.startswith("reference/")
        for name in re.findall(r"^::: ([\w.]+)$", text, flags=re.MULTILINE)
    }
    names = {f"jaxmha.{name}" for name in vars(jaxmha) if name in imported(jaxmha.__file__)}
    names -= {name for name in names if name.startswith("jaxmha._")}
    names |= {f"jaxmha.flax.{name}" for name in imported(jaxmha.flax.__file__)}
    assert len(names) > 15
    missing = {
        name
        for name in names
        if not any(other == name or other.startswith(f"{name}.") for other in asked)
    }
    assert missing == set()


def imported(path: str | None) -> list[str]:
    """Names that a package offers: `from a import b as b`."""
    return re.findall(r" as (\w+)$", Path(str(path)).read_text(), flags=re.MULTILINE)
