"""The table of formats: how a file is recognised, read, written, or refused."""

import os
import re
import stat
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from jaxmha.checkpoint import hub, shards_read
from jaxmha.checkpoint.errors import (
    AmbiguousFile,
    BudgetExceeded,
    IncompleteCheckpoint,
    MalformedFile,
    UnsupportedFormat,
    listed,
)
from jaxmha.checkpoint.formats import gguf, keras_archive, keras_h5, npz, orbax, safetensors
from jaxmha.checkpoint.formats import zip as zip_directory
from jaxmha.checkpoint.formats.torch import zip as torch_zip
from jaxmha.checkpoint.limits import Budget, Limits
from jaxmha.checkpoint.plan import Contents, Overhead, WriteJob
from jaxmha.checkpoint.source import Source

_LISTED, _SEARCHED = 10, 100  # most names in a message; most folder entries to search
_DEFAULT = Limits()


@dataclass(frozen=True)
class Format:
    """One format. The first suffix is the usual one."""

    name: str
    suffixes: tuple[str, ...]
    read: Callable[[Any, Limits], Contents]
    write: Callable[[BinaryIO, WriteJob], None] | None
    check: Callable[
        [WriteJob], None
    ]  # raises before anything is written if the format cannot hold a plan
    holds_metadata: bool = False
    holds_names: bool = False
    sharded: bool = False
    folder: bool = False
    overhead: Callable[[WriteJob], Overhead] | None = None  # of formats that shards have


def _check_shards(plan: WriteJob) -> None:
    """Raises if the format of the shards cannot hold the tensors or the metadata of a plan."""
    ending = shards_read.suffix(plan.path)
    if plan.metadata and not BY_SUFFIX[ending].holds_metadata:
        problem = f"{ending} has no place for metadata"
        raise UnsupportedFormat(plan.path, problem, "leave it out, or write .safetensors")
    if shards_read.TOTAL in plan.metadata:
        problem = f"the key {shards_read.TOTAL!r} of an index is reserved"
        raise UnsupportedFormat(plan.path, problem, "leave it out")
    BY_SUFFIX[ending].check(plan)


def _check_nothing(plan: WriteJob) -> None:
    pass


FORMATS: tuple[Format, ...] = (
    Format(
        "safetensors",
        (".safetensors",),
        safetensors.read,
        safetensors.write,
        safetensors.check,
        holds_metadata=True,
        overhead=safetensors.overhead,
    ),
    Format(
        "torch",
        (".pt", ".pth", ".bin"),
        torch_zip.read,
        torch_zip.write,
        torch_zip.check,
        holds_metadata=True,
        overhead=torch_zip.overhead,
    ),
    Format(
        "keras_h5",
        (".weights.h5",),
        keras_h5.read,
        keras_h5.write,
        keras_h5.check,
        holds_names=True,
    ),
    Format("npz", (".npz",), npz.read, npz.write, npz.check, holds_metadata=True),
    Format("gguf", (".gguf",), gguf.read, None, _check_nothing),
    Format("keras", (".keras",), keras_archive.read, None, _check_nothing),
    Format(
        "orbax",
        (orbax.SUFFIX,),
        orbax.read,
        None,
        orbax.check,
        holds_metadata=True,
        folder=True,
    ),
    Format(
        "sharded",
        (".safetensors.index.json", ".bin.index.json"),
        shards_read.read,
        None,
        _check_shards,
        holds_metadata=True,
        sharded=True,
    ),
)
_BY_NAME = {format.name: format for format in FORMATS}
BY_SUFFIX = {suffix: format for format in FORMATS for suffix in format.suffixes}
SHARDED, ORBAX = _BY_NAME["sharded"], _BY_NAME["orbax"]

_ITEMS = "_CHECKPOINT_METADATA"  # a file next to the items of an orbax checkpoint
# Unsupported folders: a file that identifies each, its description, and the remedy.
_DIRECTORIES: tuple[tuple[str, str, str], ...] = (
    (
        "saved_model.pb",
        "a TensorFlow SavedModel, which is not read here",
        "load the model with keras and call model.save_weights('new.weights.h5')",
    ),
    (
        "checkpoint",
        "an orbax checkpoint of before 2023",
        "orbax.checkpoint.PyTreeCheckpointer().restore(path), flatten, checkpoint.write(...)",
    ),
)
_LEGACY_TORCH = (
    "convert it: python -c \"import torch; torch.save(torch.load('OLD', weights_only=True), "
    "'NEW.pt')\""
)
_MAGIC: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46", "a torch file from before version 1.6", _LEGACY_TORCH),
    (257, b"ustar", "a tar file, such as very old torch made", _LEGACY_TORCH),
    (0, b"\x80\x02", "a bare pickle, which is a program", _LEGACY_TORCH),
    (0, b"\x80\x03", "a bare pickle, which is a program", _LEGACY_TORCH),
    (0, b"\x80\x04", "a bare pickle, which is a program", _LEGACY_TORCH),
    (0, b"\x80\x05", "a bare pickle, which is a program", _LEGACY_TORCH),
    (0, npz.MAGIC, "a single .npy array, without names", "numpy.savez('NEW.npz', name=array)"),
    (0, b"version https://git-lfs", "a pointer of Git LFS", "fetch the file itself: git lfs pull"),
    (0, b"\x1f\x8b", "compressed with gzip", "decompress it with gunzip"),
)
_KERAS_SHARDS = "load the model with keras and call model.save_weights('new.weights.h5')"
_FLAX = (
    "convert it: safetensors.numpy.save_file(flax.traverse_util.flatten_dict("
    "flax.serialization.msgpack_restore(pathlib.Path('OLD').read_bytes()), sep='/'), "
    "'NEW.safetensors')"
)


def suffixes() -> tuple[str, ...]:
    """The suffixes of all supported formats.

    Example:
        >>> ".safetensors" in suffixes()
        True
    """
    return tuple(suffix for format in FORMATS for suffix in format.suffixes)


def by_suffix(path: Path) -> Format | None:
    """The format with the suffix of a file name; None if the suffix is unknown."""
    name = path.name.lower()
    return next((f for f in FORMATS if name.endswith(f.suffixes)), None)


def for_writing(path: Path) -> Format:
    """The format with the suffix of a path; raises UnsupportedFormat if it cannot be written."""
    hub.refuse_url(path, "write a file on this machine, and copy that")
    found = by_suffix(path)
    if found is None:
        known = ", ".join(suffix for one in FORMATS if _is_written(one) for suffix in one.suffixes)
        raise UnsupportedFormat(path, "the suffix names no format", f"use one of {known}")
    if not _is_written(found):
        problem = f"{found.name} is read only"
        remedy = "write .safetensors"
        if found.name == "keras":
            remedy = "write NAME.weights.h5, and load it into the model"
        raise UnsupportedFormat(path, problem, remedy)
    return found


def _is_written(format: Format) -> bool:
    return format.write is not None or format.sharded or format.folder


def is_folder(path: Path) -> bool:
    """True if a path is a folder that orbax wrote.

    Raises:
        UnsupportedFormat: a folder that another framework wrote; the message has the remedy.
        IncompleteCheckpoint: an orbax folder without its tree of names.
    """
    try:
        if not stat.S_ISDIR(os.stat(path).st_mode):
            return False
    except (OSError, ValueError):
        return False  # opening the path later raises the precise error
    if os.path.lexists(path / orbax.TREE):
        return True
    if os.path.lexists(path / orbax.MANIFEST):
        problem = "is an orbax checkpoint without its tree of names"
        raise IncompleteCheckpoint(path, problem, "copy the whole folder again", orbax.TREE)
    if os.path.lexists(path / _ITEMS) and (items := _items(path, _DEFAULT)):
        problem = f"is an orbax checkpoint of items: {', '.join(items[:_LISTED])}"
        raise UnsupportedFormat(path, problem, f"name one of them, such as {path / items[0]}")
    for mark, what, remedy in _DIRECTORIES:
        if os.path.lexists(path / mark):
            raise UnsupportedFormat(path, f"is {what}", remedy)
    return False


def _items(path: Path, limits: Limits) -> list[str]:
    """The folders in a folder that orbax wrote, sorted: items of a step, such as `default`."""
    try:
        names = _names(path, limits)
    except (OSError, BudgetExceeded):
        return []
    return [name for name in names[:_SEARCHED] if os.path.lexists(path / name / orbax.TREE)]


def _names(path: Path, limits: Limits) -> list[str]:
    """The sorted names in a folder, counted while they are listed."""
    budget, names = Budget(path, 0, limits), list[str]()
    with os.scandir(path) as entries:
        for entry in entries:
            names.append(entry.name)
            budget.spend("the number of files", len(names), limits.files)
    return sorted(names)


# The files that Hugging Face's save_pretrained writes, in the order in which its loader tries them.
_USUAL = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
# Training state in such a folder: files in torch formats that are not models.
_OF_TRAINING = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state\w*)\.(bin|pt|pth)")


def file_in(path: Path, limits: Limits = _DEFAULT, added: str | None = None) -> Path:
    """The checkpoint file in a folder; a path that is not a folder is returned unchanged.

    An index of shards or a usual Hugging Face name takes precedence over other names, and
    safetensors over torch. Otherwise the folder must hold exactly one checkpoint. `added`: the name
    of a file that the caller will write there; it counts as present.

    Raises:
        AmbiguousFile: several checkpoints; the message lists them.
        IncompleteCheckpoint: no checkpoint; the message lists the files.
        BudgetExceeded: more files than `limits` allow.
    """
    try:
        names = _names(path, limits) if os.path.isdir(path) else None
    except OSError:
        names = None  # opening the path later raises the precise error
    if names is None:
        return path
    names = names if added is None else sorted({*names, added})
    indexes = [[n for n in names if n.lower().endswith(suffix)] for suffix in SHARDED.suffixes]
    usual = [[name for name in pair if name in names] for pair in _USUAL]
    sets = [list(dict.fromkeys(a + b)) for a, b in zip(usual, indexes, strict=True)]
    shards = re.compile(r"-\d{5}-of-\d{5}\.")
    single = [
        name
        for name in names
        if by_suffix(path / name) not in (None, SHARDED)
        and not name.startswith(".")
        and not _OF_TRAINING.fullmatch(name)
        and not shards.search(name)
    ]
    found = next((one for one in sets if one), single)
    if len(found) == 1:
        return path / found[0]
    if found:
        problem = f"holds several checkpoints ({listed(found, _LISTED)})"
        raise AmbiguousFile(path, problem, "name one of them")
    folders = [name for name in names[:_SEARCHED] if os.path.isdir(path / name)]
    inside = [one for name in folders for one in _holding(path, name, limits)]
    first = ", ".join(inside[:_LISTED] or names[:_LISTED])
    holding = "its folders " + first if inside else (f"only {first}" if names else "nothing")
    raise IncompleteCheckpoint(
        path,
        f"is a directory without a checkpoint: it holds {holding}",
        f"name one of them, such as {path / inside[0]}" if inside else "name one checkpoint file",
    )


def unused(path: Path, used: Collection[str], limits: Limits) -> tuple[str, ...]:
    """Names of the checkpoint files in a folder that are not among the files `used`, sorted."""
    return tuple(
        name
        for name in _names(path, limits)
        if by_suffix(path / name) is not None
        and name not in used
        and not name.startswith(".")
        and not _OF_TRAINING.fullmatch(name)
    )


def _holding(path: Path, name: str, limits: Limits) -> list[str]:
    """The orbax items in the folder `name`, such as `100/default`.

    Without items: [name] if the folder has a checkpoint file, else [].
    """
    if items := _items(path / name, limits):
        return [f"{name}/{item}" for item in items]
    try:
        names = _names(path / name, limits)
    except (OSError, BudgetExceeded):
        return []
    return [name] if any(by_suffix(path / name / one) is not None for one in names) else []


def recognise(source: Source, limits: Limits) -> Format:
    """Determines the format from the content, which must agree with a known suffix.

    Raises:
        UnsupportedFormat, MalformedFile, AmbiguousFile.
    """
    found = _by_content(source, limits)
    promised = by_suffix(source.path)
    if promised is not None and promised is not found:
        raise AmbiguousFile(
            source.path,
            f"the suffix says {promised.name}, the content {found.name}",
            "give the file the suffix of its content",
        )
    return found


def _by_content(source: Source, limits: Limits) -> Format:
    path = source.path
    if source.size == 0:
        raise MalformedFile(path, "the file is empty", "copy or write it again")
    head = source.read(0, min(source.size, 512))
    if head.startswith(keras_h5.MAGIC):
        return _BY_NAME["keras_h5"]
    # As the length of a safetensors header, this magic number would mean more than a GiB.
    if head.startswith(gguf.MAGIC):
        return _BY_NAME["gguf"]
    if head.startswith((b"PK\3\4", b"PK\5\6")):
        return _zip_format(source, limits)
    # Before the magic numbers, since the length of a safetensors header can equal any of them.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= source.size - 8:
        return _BY_NAME["safetensors"]
    for at, magic, what, remedy in _MAGIC:
        if head[at:].startswith(magic):
            raise UnsupportedFormat(path, f"is {what}, which is not read here", remedy)
    if path.name.endswith(".weights.json"):
        problem = "is the index of sharded Keras weights, which are not read here"
        raise UnsupportedFormat(path, problem, _KERAS_SHARDS)
    if head[:1] == b"{":
        return SHARDED
    if path.suffix == ".msgpack" or path.name == "checkpoint":
        raise UnsupportedFormat(path, "is flax msgpack, which is not read here", _FLAX)
    if head[8:9] == b"{" or path.suffix == ".safetensors":
        return _BY_NAME["safetensors"]
    raise UnsupportedFormat(
        path,
        f"begins with {head[:8].hex(' ')}, which is no known checkpoint",
        f"convert it to one of {', '.join(suffixes())}",
    )


def _zip_format(source: Source, limits: Limits) -> Format:
    budget = Budget(source.path, source.size, limits)
    names = zip_directory.members(source, budget)
    if "config.json" in names or "model.weights.h5" in names:
        return _BY_NAME["keras"]
    if any(name.partition("/")[2] == torch_zip.PROGRAM for name in names):
        return _BY_NAME["torch"]
    if all(name.endswith(".npy") for name in names):
        return _BY_NAME["npz"]
    raise UnsupportedFormat(
        source.path, "is a zip of neither torch nor NumPy", "save it again with either"
    )
