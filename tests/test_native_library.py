"""Where the native kernels run: libraries, machines and calls that they do not take, and the reason."""

import ctypes
import hashlib
import inspect
import os
import pickle
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import serialize_executable

import jaxmha
from jaxmha import implementations
from jaxmha.implementations.native import attention, library
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
    assert explained() == ("blocked", f"jaxmha-cpu is not installed: {library.INSTALL}")


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
@pytest.mark.parametrize("damage", ["cut", "flipped", "seal"])
def test_a_damaged_library(installed: Path, damage: str) -> None:
    """Half of a file may end the process that loads it."""
    file = ROOT / "native" / "jaxmha_cpu" / installed.name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    installed.write_bytes(data[: len(data) // 2] if damage == "cut" else data)
    shutil.copy(file.with_suffix(".sha256"), installed.with_suffix(".sha256"))
    if damage == "seal":
        shutil.copy(file, installed)
        installed.with_suffix(".sha256").write_bytes(b"\xff" * 64)
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
        ("int jaxmha_cpu_interface() { return 99; }" + "EVERYTHING", library.UPGRADE),
    ],
)
def test_a_library_of_another_version(installed: Path, source: str, why: str) -> None:
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
def test_a_second_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA keeps the kernels of the first, which may differ."""
    assert explained() == ("native", None)
    folder = tmp_path / "jaxmha_cpu"
    shutil.copytree(ROOT / "native" / "jaxmha_cpu", folder)
    with monkeypatch.context() as patch:
        patch.setattr(library, "find_spec", lambda _: _spec(folder))
        chosen, reason = explained()
    assert chosen == "blocked"
    assert f"of another jaxmha-cpu than {folder}: restart Python" in str(reason)
    assert explained() == ("native", None)


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


def declined_request(name: str) -> tuple[Any, dict[str, Any]]:
    """Heads and options of a request that native kernels decline for the reason `name`."""
    struct: Any = jax.ShapeDtypeStruct
    (T,) = export.symbolic_shape("T")
    heads = {"sizes": struct((1, T, 8, 64), "float32"), "dtype": struct(X.shape, "float64")}
    ids = jnp.arange(1024).reshape(1, -1) * 2**40
    options: dict[str, dict[str, Any]] = {
        "platform": {"platform": "h200"},
        "return_weights": {"return_weights": True},
        "dropout": {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
        "score_mod": {"score_mod": lambda score, b, n, i, j: score * 2.0},
        "several": {
            "score_mod": lambda score, b, n, i, j: score + (j - i).astype("f"),
            "bias": np.zeros((1, 1, 1024, 1024), np.float32),
        },
        "softmax_dtype": {"softmax_dtype": jnp.bfloat16},
        "segments": {"mask": jaxmha.Mask.segments(query_ids=ids, key_value_ids=ids)},
    }
    return heads.get(name, X), options.get(name, {})


@built
@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize("name", attention.DECLINED)
def test_declined(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reason that the documents list is given."""
    if name in ("processes", "devices"):
        monkeypatch.setattr(jax, f"{name[: -2 if name == 'processes' else -1]}_count", lambda: 2)
    found: list[Any] = []
    with jax.enable_x64(True):
        heads, options = declined_request(name)

        def of(x: jax.Array) -> None:
            names = ["native", "reference"]
            found.append(jaxmha.explain(x, x, x, implementation=names, **options))

        jax.eval_shape(of, heads)
    assert found[0].chosen != "native"
    start = attention.DECLINED[name].partition("{}")[0]
    assert str(dict(found[0].reasons)["native"]).startswith(start)


def test_every_reason_stands_in_the_table() -> None:
    text = inspect.getsource(attention._declined) + inspect.getsource(attention.unavailable)
    given = re.findall(r"return (.*)", text)
    named = [re.match(r'DECLINED\["(\w+)"\]', x) for x in given]
    others = [x for x, match in zip(given, named, strict=True) if match is None]
    assert others == ["None", "library.unavailable()"]
    assert {x[1] for x in named if x} == set(attention.DECLINED)


@built
def test_importing_the_package_registers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(ROOT / "native" / "jaxmha_cpu" / "__init__.py")
    runpy.run_path(file)
    monkeypatch.setenv("JAXMHA_NATIVE", "0")
    with pytest.raises(ImportError, match="JAXMHA_NATIVE=0 switches it off"):
        runpy.run_path(file)


@built
@pytest.mark.slow
def test_a_compiled_program_of_another_process(tmp_path: Path) -> None:
    """It calls the kernels by name, and nothing else in the process registers them."""
    x = np.ones((1, 67, 2, 8), np.float32)
    of = jax.jit(lambda x: jaxmha.dot_product_attention(x, x, x, implementation="native"))
    stored = serialize_executable.serialize(of.lower(x).compile())
    (tmp_path / "program").write_bytes(pickle.dumps(stored))
    code = f"""if True:
        import pickle, sys, numpy as np, jaxmha_cpu
        from jax.experimental import serialize_executable
        stored = pickle.load(open({str(tmp_path / "program")!r}, "rb"))
        out = serialize_executable.deserialize_and_load(*stored)(np.ones({x.shape}, np.float32))
        assert (np.asarray(out) == 1).all()"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/native"}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, check=True)


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
