"""Files that are of no format or of two, and paths that are no files."""

import os
from pathlib import Path

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import case
from tests.checkpoint.hostile.safetensors_files import entry, safetensors
from tests.checkpoint.hostile.torch_files import torch_file


@case(".safetensors", ck.MalformedFile)
def empty_file() -> bytes:
    return b""


@case(".npz", ck.AmbiguousFile)
def suffix_contradicts_content() -> bytes:
    return torch_file()


@case(".pt", ck.AmbiguousFile)
def safetensors_named_torch() -> bytes:
    return safetensors({"w": entry()})


@case(".pt", ck.MalformedFile)
def bytes_appended() -> bytes:
    return torch_file() + b"\0" * 10


@case(".pt", ck.UnsupportedFormat)
def bytes_prepended() -> bytes:
    return b"\0" * 16 + torch_file()


@case(".safetensors", ck.MalformedFile)
def polyglot_safetensors_then_zip() -> bytes:
    return safetensors({"w": entry()}) + torch_file()


@case(".pt", ck.UnsupportedFormat)
def polyglot_pickle_then_zip() -> bytes:
    return b"\x80\x02}." + torch_file()


@case(".msgpack", ck.UnsupportedFormat)
def flax_msgpack() -> bytes:
    return b"\x81\xa1w\xc7\x05\x01abcde"


@case(".safetensors", ck.IncompleteCheckpoint)
def directory(path: Path) -> None:
    path.mkdir()


@case(".pt", ck.UnreadableFile)
def fifo(path: Path) -> None:
    os.mkfifo(path)


@case(".pt", ck.UnreadableFile)
def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@case(".pt", ck.UnreadableFile)
def missing(path: Path) -> None:
    pass


@case(".pt", ck.UnreadableFile)
def dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


@case(".pt", ck.UnreadableFile)
def link_loop(path: Path) -> None:
    path.symlink_to(path)


@case("", ck.UnsupportedFormat)
def saved_model(path: Path) -> None:
    path.mkdir()
    (path / "saved_model.pb").touch()
