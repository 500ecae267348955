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
INTERFACE = 4
VERSION = "0.1.0"

COMMON = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wall"]
COMMON += ["-Wextra", "-Wno-unused-parameter"]
# In this order to the linker: see src/simd.h.
ISAS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx2", "-mfma", "-mf16c",
               "-Wno-maybe-uninitialized", "-Wno-uninitialized"],  # GCC 12, of its own headers
}  # fmt: skip
KERNELS = ["conditions", "keys", "scores", "forward", "few_rows"]
KERNELS += ["cache_item", "cache_few", "cache_many", "cache_step"]
KERNELS += ["gradient", "backward", "bias_gradient", "matmul"]
GENERIC = ["cells", "handlers", "library", "operands", "parallel", "scratch", "write_cache"]
# The static libgcc asks for a newer glibc than all else, and jaxlib needs the shared one as well.
# Sections that nothing uses would ask for a newer one too.
LINK = ["-shared", "-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-pthread"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1"]


def compiler() -> str | None:
    """The C++ compiler, or None."""
    names = os.environ.get("CXX"), "c++", "g++", "clang++"
    return next((found for name in names if name and (found := shutil.which(name))), None)


def include_dir() -> str:
    """The headers of XLA's FFI, without importing JAX: a build needs jaxlib alone."""
    import jaxlib

    return str(Path(jaxlib.__file__).parent / "include")


def digest() -> str:
    """Of everything that a library is built from."""
    found = hashlib.sha256(Path(__file__).read_bytes())
    for file in sorted(SOURCES.iterdir()):
        found.update(file.read_bytes())
    return found.hexdigest()


def build(output: Path = LIBRARY, *, sanitize: bool = False) -> None:
    """Compiles and links; raises CalledProcessError with the messages of the compiler on stderr."""
    cxx = compiler()
    if cxx is None:
        raise SystemExit("jaxmha-cpu: no C++ compiler: install g++ or clang++, or set CXX")
    flags = [*COMMON, f'-DJAXMHA_CPU_VERSION="{VERSION}"', f"-DJAXMHA_CPU_INTERFACE={INTERFACE}"]
    flags += ["-isystem", include_dir(), *SANITIZE * sanitize]
    # Headers name their files in messages: without the folder, builds in two of them are the same.
    flags += [f"-ffile-prefix-map={include_dir()}=include", f"-ffile-prefix-map={SOURCES}=src"]
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(name, flags, f"{folder}/{name}.o") for name in GENERIC]
        for isa, more in ISAS.items():
            jobs += [(name, [*flags, *more], f"{folder}/{name}.{isa}.o") for name in KERNELS]

        def compiled(job: tuple[str, list[str], str]) -> str:
            name, flags, to = job
            subprocess.run([cxx, *flags, "-c", f"{SOURCES}/{name}.cc", "-o", to], check=True)
            return to

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(compiled, jobs))
        made = f"{folder}/{output.name}"
        static = [x for x in LINK if not sanitize or not x.startswith("-static")]
        subprocess.run([cxx, *static, *SANITIZE * sanitize, "-o", made, *objects], check=True)
        if not sanitize and shutil.which("strip"):
            subprocess.run(["strip", made], check=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        digest_of_made = hashlib.sha256(Path(made).read_bytes()).hexdigest()
        output.with_suffix(".sha256").write_text(digest_of_made)
        shutil.copyfile(made, f"{output}.new")
        os.replace(f"{output}.new", output)  # a process may have the old one open


def up_to_date(output: Path = LIBRARY, *, sanitize: bool = False) -> None:
    """Builds, unless the library is there already, of the same sources."""
    stamp, now = output.with_suffix(".digest"), digest() + " sanitized" * sanitize
    if output.exists() and stamp.exists() and stamp.read_text() == now:
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
