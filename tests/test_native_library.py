"""Where the native kernels run: libraries, machines and calls that they do not take, and the reason."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmha
from jaxmha import implementations
from jaxmha.implementations.native import library
from tests import conformance

ROOT = Path(__file__).parents[1]
built = conformance.native_built
X: Any = jax.ShapeDtypeStruct((1, 1024, 8, 64), "float32")  # type: ignore[no-untyped-call]


def explained() -> tuple[str | None, str | None]:
    """The implementation that runs, and the reason against the native kernels."""
    found = jaxmha.explain(X, X, X, implementation=["native", "blocked"])
    return found.chosen, dict(found.reasons)["native"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is found as the distribution; nothing in it may be registered."""
    folder = tmp_path / "jaxmha_cpu"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.setattr(library, "find_spec", lambda _: _spec(folder))

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("registered")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", never)
    return folder / "libjaxmha_cpu.so"


def _spec(folder: Path) -> Any:
    from importlib.util import spec_from_file_location

    return spec_from_file_location(
        "jaxmha_cpu", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )


def seal(file: Path) -> None:
    file.with_suffix(".sha256").write_text(hashlib.sha256(file.read_bytes()).hexdigest())


def test_without_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_spec", lambda _: None)
    assert explained() == ("blocked", "jaxmha-cpu is not installed: pip install 'jaxmha[cpu]'")


def test_without_the_library(installed: Path) -> None:
    chosen, reason = explained()
    assert chosen == "blocked"
    assert "lacks its library: No such file" in str(reason)


def test_what_is_no_library(installed: Path) -> None:
    installed.write_text("not a library")
    seal(installed)
    chosen, reason = explained()
    assert chosen == "blocked"
    assert "cannot be loaded" in str(reason)


@built
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_library(installed: Path, damage: str) -> None:
    """Half of a file may end the process that loads it."""
    file = ROOT / "native" / "jaxmha_cpu" / installed.name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    installed.write_bytes(data[: len(data) // 2] if damage == "cut" else data)
    shutil.copy(file.with_suffix(".sha256"), installed.with_suffix(".sha256"))
    chosen, reason = explained()
    assert chosen == "blocked"
    assert "is damaged" in str(reason)


@built
@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("", "of another version"),
        ("int jaxmha_cpu_interface() { return 0; }", "of another version"),
        ("int jaxmha_cpu_interface() { return 0; }" + "EVERYTHING", "has interface 0"),
    ],
)
def test_an_old_library(installed: Path, source: str, why: str) -> None:
    names = [*library.HANDLERS.values(), *(f"jaxmha_cpu_{x}" for x in ("ffi_major", "ffi_minor"))]
    everything = "".join(f"int {name}() {{ return 0; }}" for name in (*names, "jaxmha_cpu_isa"))
    compiler = next(x for x in ("c++", "g++", "clang++") if shutil.which(x))
    text = f'extern "C" {{ {source.replace("EVERYTHING", everything)} }}'
    command = [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(installed)]
    subprocess.run(command, input=text, text=True, check=True)
    seal(installed)
    chosen, reason = explained()
    assert chosen == "blocked"
    assert why in str(reason)


@built
@pytest.mark.parametrize("version", [(0, 0), (1, 3), None])
def test_an_older_jaxlib(
    installed: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int] | None
) -> None:
    """Registering it would not fail the call: XLA would have no CPU backend any more."""
    file = ROOT / "native" / "jaxmha_cpu" / installed.name
    shutil.copy(file, installed)
    seal(installed)
    monkeypatch.setattr(library, "ffi_version", lambda: version)
    chosen, reason = explained()
    assert chosen == "blocked"
    assert "FFI version" in str(reason)


def test_the_version_of_the_headers_is_read() -> None:
    assert library.ffi_version() is not None


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXMHA_NATIVE", "0")
    assert explained() == ("blocked", "JAXMHA_NATIVE=0 switches it off")
    monkeypatch.setenv("JAXMHA_NATIVE", "off")
    with pytest.raises(ValueError, match=r"JAXMHA_NATIVE must be among .*, got 'off'"):
        explained()


@built
def test_a_cpu_without_avx2() -> None:
    code = "import tests.test_native_library as t; print(*t.explained(), sep='|')"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "JAXMHA_NATIVE": "none", "PYTHONPATH": f"{ROOT}:{ROOT}/native"}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "blocked|this CPU has neither AVX2 with FMA and F16C nor NEON"


@built
@pytest.mark.slow
@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_kernels_of_narrower_sets(isa: str) -> None:
    """The conformance suite, and matmuls, on narrower instruction sets."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["tests/test_conformance.py", "tests/test_not_finite.py"]
    command += ["tests/test_native_matmul.py", "-k", "native"]
    environment = {**os.environ, "JAXMHA_NATIVE": isa}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]


@built
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "no dropout"),
        ({"return_weights": True}, "never materialised"),
        ({"softmax_dtype": jnp.bfloat16}, "softmax_dtype"),
    ],
)
def test_declined(options: dict[str, Any], why: str) -> None:
    found = jaxmha.explain(X, X, X, implementation=["native", "reference"], **options)
    assert found.chosen == "reference"
    assert why in str(dict(found.reasons)["native"])


@built
def test_other_platforms_never_run_it() -> None:
    assert "runs on CPU, not on h200" in str(
        dict(jaxmha.explain(X, X, X, platform="h200", implementation=["native", "blocked"]).reasons)
    )
    assert "native" not in implementations.ORDER["cuda"]


def test_handlers_are_those_of_the_build() -> None:
    """The number of the interface stands in two files."""
    build = (ROOT / "native" / "build_library.py").read_text()
    assert f"\nINTERFACE = {library.INTERFACE}\n" in build
    if not conformance.ABSENT:
        found = ctypes.CDLL(str(ROOT / "native" / "jaxmha_cpu" / "libjaxmha_cpu.so"))
        assert all(hasattr(found, name) for name in library.HANDLERS.values())
