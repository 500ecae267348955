"""Fills the arrays of a target model from a checkpoint, and writes them as a file."""

import importlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

from jaxmha import checkpoint
from jaxmha.checkpoint import hub
from jaxmha.checkpoint.formats import nnx_values
from jaxmha.cli.console import byte_bar, err, escape, out
from jaxmha.converters import matching
from jaxmha.converters.layout.arrays import framework_of
from jaxmha.converters.matching import loading, trees

_KERAS = ".weights.h5"


def built(target: str) -> Any:
    """The path of TARGET, or the return value of FUNCTION if TARGET is `MODULE:FUNCTION`."""
    if ":" not in target or Path(target).exists():
        if not Path(target).exists():
            raise ValueError(f"{target}: expected a file, or MODULE:FUNCTION that builds the model")
        return Path(target)
    return found(target)()


def found(target: str) -> Any:
    """The function that MODULE:FUNCTION names; the module may be a file, in any folder."""
    hub.refuse_url(target, "name a local file, or MODULE:FUNCTION that builds the model")
    module, _, function = target.rpartition(":")
    module = os.path.normpath(module)
    outside = os.path.isabs(module) or module.startswith(os.pardir)
    name = module.removesuffix(".py").replace(os.sep, ".")
    sys.path.insert(0, os.path.dirname(os.path.abspath(module)) if outside else os.getcwd())
    try:
        loaded = _of_file(module) if outside else importlib.import_module(name)
        made = getattr(loaded, function, None)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0] and error.name != name:
            raise
        raise ValueError(f"{target}: there is no module {name}") from error
    finally:
        sys.path.pop(0)
    if made is None:
        raise ValueError(f"{target}: {name} has no function {function}")
    return made


def _of_file(module: str) -> ModuleType:
    """Imports a file by its path; two files of the same name are two modules."""
    path = Path(os.path.abspath(f"{module.removesuffix('.py')}.py"))
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    name = str(path.with_suffix("")).replace(os.sep, "_")
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = made = module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(made)
    return made


def source_of(text: str) -> Any:
    """The checkpoint as a path, or for MODULE:FUNCTION the model that the function builds."""
    module, colon, _ = text.rpartition(":")
    if not colon or "://" in text or Path(text).exists() or not module:
        return Path(text)
    return built(text)


def show(proof: matching.Proof, quiet: bool) -> None:
    """Prints a proof; ends with exit code 1 unless everything is the same.

    `quiet`: prints only failures.
    """
    if not quiet or not proof.same:
        (out if proof.same else err).print(escape(str(proof), keep="\n"), highlight=False)
    if not proof.same:
        raise typer.Exit(1)


@contextmanager
def template(model: Any, destination: Path) -> Iterator[Any]:
    """Yields the target to fill: the model, or for .weights.h5 a file that Keras saves from it.

    Only Keras knows the HDF5 groups from which it loads the weights of a layer.
    """
    if not destination.name.endswith(_KERAS) or not hasattr(model, "save_weights"):
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(f"{folder}/model{_KERAS}")
        yield Path(folder) / f"model{_KERAS}"


@contextmanager
def prepared(
    model: Any, source: Any, plan: matching.Plan, **options: Any
) -> Iterator[checkpoint.Lazy]:
    """`loading.prepared`, but the error for arrays in no line of the plan advises an option of the
    command line."""
    try:
        with loading.prepared(model, source, plan, **options) as ready:
            yield ready
    except loading.RestError as error:
        raise ValueError(f"{error.fact}: add lines to the plan (jaxmha match --save)") from error


def write(
    source: Any,
    destination: Path,
    model: Any,
    plan: matching.Plan,
    *,
    quiet: bool,
    dtype: str | None = None,
    unused: bool = False,
    **options: Any,
) -> checkpoint.Written:
    """Fills and writes the arrays of the model; for a transformers model also config.json.

    Args:
      model: the target that `template` yields.
      quiet: True shows no progress bar.
      unused: True leaves out source arrays that the plan does not use.
      options: keyword arguments of `checkpoint.write`.
    """
    policy = "keep" if unused else "refuse"
    with (
        prepared(model, source, plan, dtype=dtype, unused=policy) as ready,
        byte_bar("writing and reading back", quiet, passes=2) as progress,
    ):
        about = _about(model, destination)
        read = source if isinstance(source, Path) else None
        done = checkpoint.write(
            destination,
            _as_restored(model, destination, ready),
            source=read,
            progress=progress,
            **about,
            **options,
        )
    save = getattr(getattr(model, "config", None), "save_pretrained", None)
    if save is not None and not (destination.parent / "config.json").exists():
        save(destination.parent)
    return done


def _as_restored(model: Any, destination: Path, ready: checkpoint.Lazy) -> checkpoint.Lazy:
    """The arrays by the names that the target's loader looks for.

    Orbax restores `nnx.state(model)` from trees whose leaves are named `value`.
    """
    if not trees.is_nnx(model) or destination.suffix != ".orbax":
        return ready
    info = nnx_values.boxed(ready.info)
    return checkpoint.Lazy(info, lambda name: ready[name.removesuffix(nnx_values.ENDING)])


def _about(model: Any, destination: Path) -> Mapping[str, Any]:
    """Metadata and layer names that the target's framework needs to load the file.

    They are keyword arguments of `checkpoint.write`.
    """
    if isinstance(model, Path) and destination.name.endswith(_KERAS):
        with checkpoint.open(model) as file:
            return {"names": dict(file.names)} if file.names else {}
    if framework_of(model) == "torch" and ".safetensors" in destination.name:
        return {"metadata": {"format": "pt"}}  # transformers requires it
    return {}
