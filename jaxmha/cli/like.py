"""Fills the arrays of a target model from a checkpoint, and writes them as a file."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import typer

from jaxmha import checkpoint
from jaxmha.checkpoint.formats import nnx_values
from jaxmha.cli.console import byte_bar, err, escape, out
from jaxmha.converters import matching
from jaxmha.converters.layout.arrays import NDArray, framework_of, is_float
from jaxmha.converters.matching import loading, trees
from jaxmha.converters.matching.layers import is_buffer

_KERAS = ".weights.h5"


def show(proof: matching.Proof, quiet: bool) -> None:
    """Prints a proof; ends with exit code 1 unless everything is the same. The plan has the notes.

    `quiet`: prints only failures.
    """
    proof = replace(proof, notes=())
    if not quiet or not proof.same:
        (out if proof.same else err).print(escape(str(proof), keep="\n"), highlight=False)
    if not proof.same:
        raise typer.Exit(1)


def policies(unused: bool, missing: bool) -> dict[str, Any]:
    """The arguments `unused` and `missing` of `load_into` and `prove`."""
    return {"unused": "keep" if unused else "refuse", "missing": "keep" if missing else "refuse"}


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
        raise ValueError(error.for_command) from error


@contextmanager
def _with_own(model: Any, ready: checkpoint.Lazy, dtype: str | None) -> Iterator[checkpoint.Lazy]:
    """Yields the arrays to load, and the model's own ones for parameters that are not among them.

    Raises ValueError if the model has only shapes.
    """
    own = trees.read(model, "model")
    try:
        info = dict(ready.info)
        for name, array in own.arrays.items():
            if name not in info and not is_buffer(array):
                kind = (
                    dtype if dtype is not None and is_float(np.dtype(array.dtype)) else array.dtype
                )
                info[name] = checkpoint.TensorInfo(array.shape, np.dtype(kind))

        def load(name: str) -> NDArray:
            return ready[name] if name in ready.info else own.load(name).astype(info[name].dtype)

        yield checkpoint.Lazy(info, load)
    finally:
        own.close()


def write(
    source: Any,
    destination: Path,
    model: Any,
    plan: matching.Plan,
    *,
    quiet: bool,
    dtype: str | None = None,
    unused: bool = False,
    missing: bool = False,
    **options: Any,
) -> checkpoint.Written:
    """Fills and writes the arrays of the model; for a transformers model also config.json.

    Args:
      model: the target that `template` yields.
      quiet: True shows no progress bar.
      unused: True leaves out source arrays that the plan does not use.
      missing: True writes the model's own values of arrays that the plan does not fill.
      options: keyword arguments of `checkpoint.write`.
    """
    rest = policies(unused, missing)
    with (
        prepared(model, source, plan, dtype=dtype, **rest) as filled,
        _with_own(model, filled, dtype) if missing else nullcontext(filled) as ready,
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
