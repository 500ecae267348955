"""When the library of the native kernels is built again."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import build_library
import pytest

LIBRARY = b"a library"


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Brings a library in `tmp_path` up to date; returns how often it was built by then."""
    if build_library.compiler() is None:
        pytest.skip("there is no C++ compiler")
    output, built = tmp_path / "libjaxmha_cpu.so", []

    def build(output: Path, **_: Any) -> None:
        output.write_bytes(LIBRARY)
        output.with_suffix(".sha256").write_text(hashlib.sha256(LIBRARY).hexdigest())
        built.append(output)

    def number() -> int:
        build_library.up_to_date(output)
        assert output.read_bytes() == LIBRARY
        return len(built)

    monkeypatch.setattr(build_library, "build", build)
    monkeypatch.setattr(build_library, "machine", lambda: "x86_64")
    assert (number(), number()) == (1, 1)
    return number


@pytest.mark.parametrize("data", [LIBRARY[:4], None], ids=["cut", "gone"])
@pytest.mark.parametrize("name", ["libjaxmha_cpu.so", "libjaxmha_cpu.sha256"])
def test_a_library_that_is_not_whole(
    builds: Callable[[], int], tmp_path: Path, name: str, data: bytes | None
) -> None:
    if data is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(data)
    assert (builds(), builds()) == (2, 2)


def test_another_compiler(
    builds: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the same path: its version counts."""
    other = tmp_path / "c++"
    for number, version in ((2, "12.2.0"), (3, "14.1.0")):
        other.write_text(f"#!/bin/sh\necho {version}\n")
        other.chmod(0o755)
        monkeypatch.setenv("CXX", str(other))
        assert (builds(), builds()) == (number, number)


def test_other_headers(
    builds: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Path("xla") / "ffi" / "api"
    shutil.copytree(Path(build_library.include_dir()) / api, tmp_path / api)
    monkeypatch.setattr(build_library, "include_dir", lambda: str(tmp_path))
    assert builds() == 1
    with (tmp_path / api / "c_api.h").open("a") as file:
        file.write("// newer\n")
    assert (builds(), builds()) == (2, 2)
