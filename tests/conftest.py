"""Strict promotion and full precision for every test; how much compilers optimise."""

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

# Before any framework is imported.
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Small layers are fastest on one thread: torch's others wait by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No benchmark of this machine decides what a test runs.
os.environ.setdefault("JAXMHA_PREFERENCES", "0")
# Nothing is stored for a later process: the key of a program takes a millisecond.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "0")
# Property tests draw other examples in every run; workers inherit the seed.
os.environ.setdefault("JAXMHA_PROPERTY_SEED", str(random.SystemRandom().randrange(2**32)))

# A file of a test need not outlast a failure of the machine; waiting for the disk takes minutes.
os.fsync = os.fdatasync = os.fstat  # type: ignore[assignment]

# A million objects of frameworks and tests live to the end: the garbage collector need not visit them.
gc.disable()

import jax
import jaxtyping
import pytest
from jax._src import compiler
from jax._src.interpreters import mlir

from tests import jit_cache, variants
from tests.promotion import foreign


def has_shape(annotation: object) -> bool:
    """True for `Float[Array, "T N"]`, alone or within another type."""
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    parts = annotation if isinstance(annotation, list) else get_args(annotation)
    return any(map(has_shape, parts))


def checked(*, typechecker: Any, check: Any = jaxtyping.jaxtyped) -> Callable[[Any], Any]:
    """`jaxtyped` for what has shapes: functions within functions are decorated in every call."""

    def decorate(function: Any) -> Any:
        if not isinstance(function, type) and not has_shape([*function.__annotations__.values()]):
            return function
        return check(function, typechecker=typechecker)

    return decorate


# Shapes in signatures are checked in every call. Modules and functions without shapes are checked by
# mypy alone: their calls too would take more than half of a run.
ROOT = Path(__file__).parent.parent
SHAPED = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "jaxmha").rglob("*.py")
    if "from jaxtyping import" in path.read_text()
]
jaxtyping.jaxtyped = checked  # type: ignore[assignment]
jaxtyping.install_import_hook(SHAPED, "beartype.beartype")

jax.config.update("jax_numpy_dtype_promotion", "strict")  # type: ignore[no-untyped-call]
jax.config.update("jax_numpy_rank_promotion", "raise")  # type: ignore[no-untyped-call]
jax.config.update("jax_default_matmul_precision", "highest")  # type: ignore[no-untyped-call]
if not os.environ.get("JAXMHA_OPTIMISED"):
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # of processes that tests start


# Without parts for the threads that compile it, a program compiles in 13 % less time, and is the
# same; in less than half of it in XLA's older way to write loops, and nothing computed in advance.
WHOLE: dict[str, Any] = {"xla_cpu_parallel_codegen_split_count": 1}
QUICK: dict[str, Any] = WHOLE | {
    "xla_cpu_use_fusion_emitters": False,
    "xla_disable_hlo_passes": "constant_folding",  # XLA's interpreter takes seconds for large ones
}


@cache
def options_of(*, quick: bool) -> dict[str, Any]:
    """Options that compile quickly; none where this XLA does not know them any more."""
    options = QUICK if quick else WHOLE
    try:
        jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError:
        return {}
    return options


@contextmanager
def compiling(*, optimised: bool) -> Iterator[None]:
    """As users do if `optimised`, else in less than half of the time; tests of a kind share programs."""
    as_users = bool(os.environ.get("JAXMHA_OPTIMISED"))
    optimised = optimised or as_users
    jax.config.update("jax_disable_most_optimizations", not optimised)  # type: ignore[no-untyped-call]
    jit_cache.share("optimised" if optimised else "quick")
    with pytest.MonkeyPatch.context() as patch:
        if not as_users:
            made = partial(quickly, compiler.get_compile_options, options_of(quick=not optimised))
            patch.setattr(compiler, "get_compile_options", made)
            # One for the programs of a module: making one takes as long as lowering a small program.
            context = mlir.make_ir_context()
            patch.setattr(mlir, "make_ir_context", lambda: context)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules make arrays while they are collected."""
    with compiling(optimised=False):
        return (yield)


@pytest.fixture(autouse=True, scope="module")
def optimised(request: pytest.FixtureRequest) -> Iterator[None]:
    """Modules that measure rounding set OPTIMISED: they compile as users do.

    With JAXMHA_OPTIMISED=1 every module does, as `make test-slow` has it.
    """
    with compiling(optimised=hasattr(request.module, "OPTIMISED")):
        yield


def quickly(
    make: Callable[..., Any], options: dict[str, Any], *arguments: Any, **given: Any
) -> Any:
    """The options of a program, with those of all: JAX has no setting for them."""
    own = given.pop("env_options_overrides", None) or {}
    return make(*arguments, env_options_overrides=options | own, **given)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How to draw the same examples again, and the kernels that this machine cannot run."""
    terminalreporter.write_line(f"JAXMHA_PROPERTY_SEED={os.environ['JAXMHA_PROPERTY_SEED']}")
    from jaxmha.implementations import KERNELS
    from jaxmha.implementations.native import library

    device = jax.devices()[0]
    here = {"gpu": "cuda"}.get(device.platform, device.platform)
    absent = [f"{name} (needs {needed})" for name, needed in KERNELS.items() if needed != here]
    native = library.unavailable()
    if native is not None:
        terminalreporter.write_line(f"the native CPU kernels are not tested: {native}")
    terminalreporter.write_line(
        f"{len(absent)} kernels are not run on {device.platform} themselves: {', '.join(absent)}"
    )


def pytest_make_parametrize_id(val: object) -> str | None:
    name = variants.name_of(val)
    return name if isinstance(name, str) and name is not val else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    jit_cache.restore()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """Marks slow variants, and puts long tests first. A whole run raises where a mark names none."""
    slow, unused = variants.slow_and_unused(items)
    for item in slow:
        item.add_marker("slow")
    if config.args == config.getini("testpaths") and unused:
        raise pytest.UsageError("\n".join(unused))
    # pytest would do it after it has ordered all of them, which takes as long as finding them.
    if config.option.markexpr == "not slow":
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        left_out = set(slow)
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Few collections visit jaxprs that a trace still needs, or that caches hold; commands are kept."""
    gc.freeze()
    gc.set_threshold(200_000, 10, 100)
    gc.enable()
    # The command of an app takes longer to make than most commands to run.
    typer: Any = sys.modules.get("typer.testing")
    if typer is not None:
        typer._get_command = cache(typer._get_command)
    # Keras on JAX would import TensorFlow, for 4 seconds, to look for its types and to seed it.
    lazy: Any = sys.modules.get("keras.src.utils.module_utils")
    if lazy is not None and os.environ["KERAS_BACKEND"] != "tensorflow":
        vars(lazy.tensorflow)["_available"] = False


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """At the end pytest collects what was forgotten, such as an open file: in `make test-slow` alone."""
    if not os.environ.get("JAXMHA_OPTIMISED"):
        gc.freeze()


@pytest.fixture
def implicit_promotion() -> Iterator[None]:
    """JAX as users have it: layers and models of others promote as they like."""
    with foreign():
        yield


@pytest.fixture
def x64() -> Iterator[None]:
    """float64 is float64 within the test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def torch_as_it_was() -> Iterator[None]:
    """A peer of benchmarks chooses torch's path for its whole process, which other tests share."""
    import torch

    before = torch.backends.mha.get_fastpath_enabled()
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Implementations take sizes that they are not made for, where they must be right too."""
    from jaxmha.implementations import small_query

    monkeypatch.setattr(small_query, "MOST_ROWS", 10**6)
    monkeypatch.setattr(small_query, "LEAST_KEYS", 0)


@pytest.fixture
def no_shape_hook() -> Iterator[None]:
    """Lets wrong shapes reach our own checks, as they do outside the tests."""
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The calls of cuDNN on a machine that takes itself for one with a GPU."""
    from tests import simulated_gpu

    yield from simulated_gpu.installed(monkeypatch)


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run without a probe, which tests of other things need not wait for."""
    monkeypatch.setenv("JAXMHA_PROBE", "trust")
