"""Fills the arrays of a target model from a checkpoint, and writes them as a file."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from jaxmha import checkpoint
from jaxmha.checkpoint.formats import nnx_values
from jaxmha.cli.console import byte_bar, err, escape, out
from jaxmha.converters import matching
from jaxmha.converters.layout.arrays import framework_of
from jaxmha.converters.matching import loading, trees

_KERAS = ".weights.h5"


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
