"""The native kernels without JAX, against loops in float64: on this CPU, and for AArch64 under an
emulator. `native_kernels/` has the C++ program, which prints the error of every array."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import build_library
import ml_dtypes
import pytest

from tests import tolerance

SOURCES = Path(__file__).parent / "native_kernels"
# Compiler (none: that of a build), instruction set as JAXMHA_NATIVE names it, emulator.
TARGETS = {
    "widest": (None, "", None),
    "avx2": (None, "avx2", None),
    "neon": ("aarch64-linux-gnu-g++", "neon", "qemu-aarch64-static"),
}
NAME = re.compile(r"^(?:inline [\w ]+?|using |constexpr int )(\w+)(?:\(| = )", re.MULTILINE)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The programs that were built, by machine."""
    return {}


def program(made: dict[str, Path], folder: Path) -> Path:
    """The program for the machine of the compiler."""
    machine = build_library.machine()
    if machine not in made:
        made[machine] = folder / machine
        command = [str(build_library.compiler()), "-std=c++17", "-O2", "-Wall", "-Wextra"]
        command += ["-isystem", build_library.include_dir(), "-static", "-pthread"]
        command += [*map(str, sorted(SOURCES.glob("*.cc"))), *build_library.objects(str(folder))]
        subprocess.run([*command, "-o", str(made[machine])], check=True)
    return made[machine]


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_every_array(
    name: str, programs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, isa, emulator = TARGETS[name]
    if compiler is not None:
        monkeypatch.setenv("CXX", compiler)
    for needed in (compiler, emulator):
        if needed is not None and shutil.which(needed) is None:
            pytest.skip(f"{needed} is not installed")
    if build_library.compiler() is None:
        pytest.skip("there is no C++ compiler")
    made = program(programs, tmp_path)
    done = subprocess.run(
        [str(made)] if emulator is None else [emulator, str(made)],
        env={**os.environ, "JAXMHA_NATIVE": isa},
        capture_output=True,
        text=True,
        check=True,
    )
    ran, *lines = done.stdout.splitlines()
    assert ran == isa or not isa
    assert len(lines) > 60
    for line in lines:
        array, dtype, error = line.split()
        floors = float(error) / (float(ml_dtypes.finfo(dtype).eps) / 2)  # type: ignore[no-untyped-call]
        gradient = tolerance.BACKWARD if "/d_" in array else 1.0
        assert floors <= tolerance.FLOORS[dtype] * gradient, line


def test_every_instruction_set_has_the_same_names() -> None:
    """The headers of the thin layer define the same names, apart from helpers of x86 or NEON alone."""
    of = {
        file.stem: set(NAME.findall(file.read_text()))
        for file in build_library.SOURCES.glob("simd_*.h")
    }
    assert of["simd_avx2"] == of["simd_avx512"]
    assert of["simd_avx2"] | of["simd_x86"] <= of["simd_neon"]
