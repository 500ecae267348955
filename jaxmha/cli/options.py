"""Options that several commands share, and parsers of their values."""

import re
from enum import Enum
from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
import numpy as np
import typer
from typer.models import OptionInfo

from jaxmha import checkpoint
from jaxmha.checkpoint import hub
from jaxmha.converters.layout import registry
from jaxmha.converters.layout.base import guess, known
from jaxmha.converters.layout.by_hand import of_names
from jaxmha.converters.migrate import pipeline

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
}  # fmt: skip


def option(
    names: str, about: str, *, min: int | None = None, show_default: bool = True
) -> OptionInfo:
    """Makes an option from its names, separated by spaces, and its help text."""
    made: OptionInfo = typer.Option(*names.split(), help=about, min=min, show_default=show_default)
    return made


def suffixes(*, to_write: bool = False) -> str:
    """The suffixes of all formats, or only of formats that can be written, for help texts."""
    names = []
    for format in checkpoint.FORMATS:
        is_written = format.write is not None or format.folder or format.sharded
        kind = {format.folder: " (a folder)", format.sharded: " (shards)"}.get(True, "")
        kind = kind if is_written else " (read only)"
        if is_written or not to_write:
            names.append(format.suffixes[0] + kind)
    return ", ".join(names)


Json = Annotated[bool, option("--json", "Print JSON for scripts.")]
NumHeads = Annotated[
    int | None,
    option(
        "--num-heads",
        "Number of heads, for layouts that do not store it (torch, bert). "
        "Default: from the config.json next to the file.",
        min=1,
    ),
]
Block = Annotated[
    str | None,
    option("--block", "Prefix of the block, as `jaxmha inspect` lists it.  [default: first]"),
]


def _local(source: Path) -> Path:
    """Fetches an address such as hf://org/model and returns its cache folder; returns other paths
    unchanged."""
    try:
        return hub.fetch(source).folder if hub.is_address(source) else source
    except checkpoint.CheckpointError as error:
        raise typer.BadParameter(str(error)) from error


Source = Annotated[
    Path,
    typer.Argument(
        help="The checkpoint to read: a file, the index of a sharded one, the folder of either (as "
        "Hugging Face saves models), an orbax folder, or hf://ORGANISATION/MODEL@REVISION.",
        show_default=False,
        callback=_local,
    ),
]
DtypeName = Enum("DtypeName", {x: x for x in pipeline.DTYPES}, type=str)  # type: ignore[misc]


def layout_name(value: str | None) -> str | None:
    """Option callback: checks the name of a layout, and suggests one if the name is unknown."""
    names = [*(layout.name for layout in registry.LAYOUTS), *registry.ALONE]
    if value is not None and value not in names and of_names(value) is None:
        raise typer.BadParameter(f"{value!r} is no layout: {guess(value, names)}{known(names)}")
    return value


def parse_dtype(name: str) -> np.dtype:
    """Parses the value of --dtype.

    Raises:
        ValueError: there is no such dtype.
    """
    try:
        return jnp.dtype(name)
    except TypeError:
        raise ValueError(f"--dtype must be a dtype such as bfloat16, got {name!r}") from None


def parse_integers(text: str, name: str) -> tuple[int, ...]:
    """Parses integers that are separated by commas.

    Raises:
        ValueError: the text has another form; the message names the option.

    >>> parse_integers("1,8,512", "--bias")
    (1, 8, 512)
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} must be integers joined by commas, got {text!r}") from None


def parse_bytes(text: str) -> int:
    """Parses a size in bytes, such as 5GB.

    Raises:
        ValueError: the text is not a size, or the size is zero.

    >>> parse_bytes("5GB"), parse_bytes("1.5 MiB"), parse_bytes("700")
    (5000000000, 1572864, 700)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]i?)?b?", text.strip().lower())
    if found is None or not (size := int(float(found[1]) * _UNITS[found[2] or ""])):
        raise ValueError(f"--shard-size: {text!r} is no size: give bytes, or such as 5GB or 500MiB")
    return size
