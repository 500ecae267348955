"""Builds jaxmha_cpu/libjaxmha_cpu.so with a C++17 compiler and the FFI headers of jaxlib.

    python build_library.py [--sanitize] [--optional] [--output FILE]

The compiler is that of CXX, else c++, g++ or clang++.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
LIBRARY = HERE / "jaxmha_cpu" / "libjaxmha_cpu.so"
# Of the handlers: raise it when their operands, results or attributes change, here and in
# jaxmha/implementations/native/library.py.
INTERFACE = 8
VERSION = "0.1.0"

COMMON = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wall"]
COMMON += ["-Wextra", "-Wno-unused-parameter"]
# By the machine that the compiler makes code for; in this order to the linker: see src/simd.h.
ISAS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "avx512": ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx2", "-mfma",
                   "-mf16c", "-Wno-maybe-uninitialized", "-Wno-uninitialized"],  # GCC 12, of its own headers
    },
    "aarch64": {"neon": []},
}  # fmt: skip
# Kernels include these headers, whose parsing takes longer than that of a kernel: once for each ISA.
HEADERS = ["algorithm", "cmath", "cstring", "functional", "memory", "vector"]
HEADERS_OF = {"x86_64": ["immintrin.h"], "aarch64": ["arm_neon.h"]}
# Beside the flags of AVX-512, where the compiler takes them: GCC from 11 and Clang from 12 on.
AMX = ["-mamx-tile", "-mamx-bf16", "-mavx512bf16"]
KERNELS = ["conditions", "keys", "scores", "forward", "few_rows"]
KERNELS += ["cache_item", "cache_few", "cache_many", "cache_step"]
KERNELS += ["gradient", "backward", "bias_gradient", "matmul", "matmul_bf16"]
AMX_KERNELS = ["amx_backward", "amx_forward", "amx_matmul", "amx_bf16"]
GENERIC = ["cells", "handlers", "library", "operands", "parallel", "scratch", "write_cache"]
# The static libgcc asks for a newer glibc than all else, and jaxlib needs the shared one as well.
# Sections that nothing uses would ask for a newer one too.
LINK = ["-shared", "-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-pthread"]
LINK += ["-s"]  # without symbols
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1"]


def compiler() -> str | None:
    """The C++ compiler, or None."""
    names = os.environ.get("CXX"), "c++", "g++", "clang++"
    return next((found for name in names if name and (found := shutil.which(name))), None)


def machine() -> str:
    """The first word of the compiler's target, such as x86_64; SystemExit without kernels for it."""
    cxx = compiler()
    if cxx is None:
        raise SystemExit("jaxmha-cpu: no C++ compiler: install g++ or clang++, or set CXX")
    done = subprocess.run([cxx, "-dumpmachine"], check=True, capture_output=True, text=True)
    target = done.stdout.strip()
    name = target.partition("-")[0]
    if name not in ISAS or "linux" not in target:
        expected = " or ".join(ISAS)
        raise SystemExit(f"jaxmha-cpu: {cxx} makes code for {target}, not Linux on {expected}")
    return name


def include_dir() -> str:
    """The headers of XLA's FFI, without importing JAX: a build needs jaxlib alone."""
    import jaxlib

    return str(Path(jaxlib.__file__).parent / "include")


def digest() -> str:
    """A digest of all that determines a library: its sources, XLA's headers and the compiler."""
    found = hashlib.sha256(Path(__file__).read_bytes())
    headers = sorted((Path(include_dir()) / "xla" / "ffi" / "api").iterdir())
    for file in (*sorted(SOURCES.iterdir()), *headers):
        found.update(file.read_bytes())
    done = subprocess.run([str(compiler()), "--version"], check=True, capture_output=True)
    found.update(done.stdout)
    return found.hexdigest()


def makes_amx(cxx: str) -> bool:
    """True if the compiler and its assembler know AMX."""
    text = b"#include <immintrin.h>\nvoid f() { _tile_dpbf16ps(0, 1, 2); }"
    command = [cxx, *AMX, "-c", "-x", "c++", "-", "-o", os.devnull]
    return subprocess.run(command, input=text, capture_output=True, check=False).returncode == 0


def objects(folder: str, *, sanitize: bool = False) -> list[str]:
    """Compiles every source, kernels once per ISA; raises CalledProcessError with the messages of
    the compiler on stderr. The objects, in the order of the linker."""
    isas, cxx = ISAS[machine()], str(compiler())
    flags = [*COMMON, f'-DJAXMHA_CPU_VERSION="{VERSION}"', f"-DJAXMHA_CPU_INTERFACE={INTERFACE}"]
    flags += ["-isystem", include_dir(), *SANITIZE * sanitize]
    # Headers name their files in messages: without the folder, builds in two of them are the same.
    flags += [f"-ffile-prefix-map={include_dir()}=include", f"-ffile-prefix-map={SOURCES}=src"]
    amx = "avx512" in isas and makes_amx(cxx)
    flags += ["-DJAXMHA_AMX"] * amx
    jobs = [(name, flags, f"{folder}/{name}.o") for name in GENERIC]
    for isa, more in isas.items():
        own = [*flags, *more, "-include", f"{folder}/{isa}.h"]
        jobs += [(name, own, f"{folder}/{name}.{isa}.o") for name in KERNELS]
    if amx:
        own = [*flags, *isas["avx512"], *AMX]
        jobs += [(name, own, f"{folder}/{name}.o") for name in AMX_KERNELS]

    def compiled(job: tuple[str, list[str], str]) -> str:
        name, flags, to = job
        subprocess.run([cxx, *flags, "-c", f"{SOURCES}/{name}.cc", "-o", to], check=True)
        return to

    def precompiled(isa: str) -> None:
        header = Path(folder, f"{isa}.h")
        names = [*HEADERS, *HEADERS_OF[machine()]]
        header.write_text("".join(f"#include <{name}>\n" for name in names))
        command = [cxx, *flags, *isas[isa], "-x", "c++-header", str(header), "-o", f"{header}.gch"]
        subprocess.run(command, check=True)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(precompiled, isas))
        return list(threads.map(compiled, jobs))


def build(output: Path = LIBRARY, *, sanitize: bool = False) -> None:
    """Compiles and links; raises CalledProcessError with the messages of the compiler on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        made = f"{folder}/{output.name}"
        parts = objects(folder, sanitize=sanitize)
        link = [x for x in LINK if not sanitize or x not in ("-static-libstdc++", "-s")]
        link += SANITIZE * sanitize
        subprocess.run([str(compiler()), *link, "-o", made, *parts], check=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        digest_of_made = hashlib.sha256(Path(made).read_bytes()).hexdigest()
        output.with_suffix(".sha256").write_text(digest_of_made)
        shutil.copyfile(made, f"{output}.new")
        os.replace(f"{output}.new", output)  # a process may have the old one open


def is_whole(library: Path) -> bool:
    """True if the library is there as it was built."""
    seal = library.with_suffix(".sha256")
    if not library.exists() or not seal.exists():
        return False
    return seal.read_bytes() == hashlib.sha256(library.read_bytes()).hexdigest().encode()


def up_to_date(output: Path = LIBRARY, *, sanitize: bool = False) -> None:
    """Builds, unless the library is there already, whole and of the same sources."""
    target = machine()  # SystemExit without a compiler
    stamp, now = output.with_suffix(".digest"), f"{digest()} {target}" + " sanitized" * sanitize
    if is_whole(output) and stamp.exists() and stamp.read_bytes() == now.encode():
        return
    build(output, sanitize=sanitize)
    stamp.write_text(now)
    print(f"jaxmha-cpu: built {output}", file=sys.stderr)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Build the native CPU kernels of jaxmha.")
    parser.add_argument("--sanitize", action="store_true", help="with ASan and UBSan")
    parser.add_argument(
        "--optional", action="store_true", help="without a compiler, say so and go on"
    )
    parser.add_argument("--output", type=Path, default=LIBRARY)
    given = parser.parse_args()
    if given.optional and compiler() is None:
        print("jaxmha-cpu: skipped, there is no C++ compiler", file=sys.stderr)
        return
    up_to_date(given.output, sanitize=given.sanitize)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"jaxmha-cpu: {error.cmd[0]} failed, see above") from None
