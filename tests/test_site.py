"""The documentation builds without a warning, and its examples run."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxmha
import jaxmha.flax
from jaxmha import checkpoint

ROOT = Path(__file__).parents[1]
SITE = ROOT / "docs"
TEXTS = {
    p.relative_to(SITE / "pages").as_posix(): p.read_text() for p in SITE.glob("pages/**/*.md")
}


def pages(language: str) -> list[str]:
    return sorted(page for page, text in TEXTS.items() if f"```{language}\n" in text)


def examples(page: str, language: str) -> str:
    return "\n".join(re.findall(rf"```{language}\n(.*?)```", TEXTS[page], flags=re.DOTALL))


@pytest.mark.slow
@pytest.mark.parametrize("page", pages("python"))
def test_python_examples_run(page: str) -> None:
    """With JAX's defaults; later examples of a page use what earlier ones made."""
    command = [sys.executable, "-c", examples(page, "python")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


ROADS = ("from_torch", "from_transformers", "from_keras", "to_transformers")


@pytest.mark.parametrize("road", ROADS)
def test_a_road_into_another_framework_is_short(road: str) -> None:
    """Models included, the code that a user writes has at most 40 lines."""
    code = examples(f"guide/{road}.md", "python")
    assert 10 < sum(bool(line.strip()) for line in code.splitlines()) <= 40


@pytest.mark.slow
@pytest.mark.parametrize("page", pages("console"))
def test_console_examples_run(page: str, tmp_path: Path) -> None:
    names = [f"attention.self.{name}" for name in ("query", "key", "value")]
    state: dict[str, Any] = {}
    for name in (*names, "attention.output.dense"):
        state[f"{name}.weight"] = np.eye(6, dtype="f")
        state[f"{name}.bias"] = np.ones(6, "f")
    checkpoint.write(tmp_path / "model.safetensors", state)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2}')
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for line in filter(None, examples(page, "console").splitlines()):
        command = line.removeprefix("$ ").split()
        done = subprocess.run(
            command, check=False, cwd=tmp_path, capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, (line, done.stderr)


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
    """What a package offers: `from a import b as b`."""
    return re.findall(r" as (\w+)$", Path(str(path)).read_text(), flags=re.MULTILINE)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    command += ["--config-file", str(SITE / "mkdocs.yml"), "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Documentation built" in done.stderr  # so that warnings would be there too
    assert [line for line in done.stderr.splitlines() if "WARNING" in line] == []
    html = "".join(path.read_text() for path in (tmp_path / "reference").glob("*.html"))
    for name in ("jaxmha.flax.attention_fn", "jaxmha.converters.torch.from_module"):
        assert f'id="{name}"' in html
    assert "Flax linen, nnx" in html  # a generated table
    assert "&gt;&gt;&gt;" not in re.sub(r"<pre.*?</pre>", "", html, flags=re.DOTALL)
    doctests = [sys.executable, "-m", "doctest", str(SITE / "hooks.py")]
    done = subprocess.run(doctests, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
