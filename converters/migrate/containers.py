"""Copies checkpoints to another format: every tensor under its name, and the facts kept with it."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from jaxmha import __version__, checkpoint
from jaxmha.checkpoint import writer
from jaxmha.converters.discovery import hf_config
from jaxmha.converters.migrate import conversion, destination_metadata, lazy_tensors
from jaxmha.converters.migrate.conversion import Conversion
from jaxmha.converters.migrate.plans import DTYPES, Plan, Step
from jaxmha.converters.migrate.preconditions import naming, refuse_another_checkpoint
from jaxmha.converters.migrate.resolved import resolve


def copy(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    force: bool = False,
    shard_size: int | None = None,
    resume: bool = False,
    part: tuple[int, int] | None = None,
    digest: str | None = "fast",
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Writes every tensor of a checkpoint under its name; `pipeline.convert` explains the arguments.

    Raises:
      CheckpointError: a file cannot be read or written.
      ValueError: the source has no tensor; the dtype is unknown, or would round the state of an
        optimizer; or the destination is a .weights.h5 file and no Keras model has such names.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: known are {', '.join(DTYPES)}")
    target = Path(destination)
    with hf_config.read_once(), checkpoint.open(source, dequantise=True, unbox=True) as file:
        refuse_another_checkpoint(Path(source), file.path, target)
        text = f"{__version__} {file.digest()} copied {dtype}" if resume else None
        writer.check_destination(destination, force, file.files, shard_size, resume=text, part=part)
        _refuse_names(file, target)
        plan = Plan("", tuple(Step("other", "", x, x, (x,), "other") for x in file.info))
        plan = replace(plan, dtype=dtype)
        with naming(file.path):
            found = resolve(plan, file)
        settings, notes = destination_metadata.copied(target, plan, file)
        made = lazy_tensors.renamed(found.made, file.unboxed, target)
        written = checkpoint.write(
            destination,
            lazy_tensors.lazy(made),
            source=file.files,
            force=force,
            dtype=dtype,
            overflow="refuse",
            shard_size=shard_size,
            resume=text,
            part=part,
            digest=digest,
            progress=progress,
            **settings,
        )
        notes = [*file.notes, *found.notes, *notes, *written.notes]
    return replace(
        conversion.of(source, destination, plan, found, written, False), notes=tuple(notes)
    )


def _refuse_names(file: checkpoint.Checkpoint, destination: Path) -> None:
    """Raises ValueError if there is no tensor, or Keras could not load the names of the source."""
    if not file.info:
        raise ValueError(f"{file.path}: holds no tensors: there is nothing to write")
    if not str(destination).endswith(".weights.h5"):
        return
    wrong = next((name for name in file.info if not re.search(r"(^|/)vars/\d+$", name)), None)
    if wrong is not None:
        raise ValueError(
            f"{file.path}: no Keras model could load {wrong!r} from a .weights.h5 file, where names end "
            "in vars/NUMBER: name a layout (--to keras), fill the model (jaxmha match), or write "
            ".safetensors, .pt or .npz"
        )
