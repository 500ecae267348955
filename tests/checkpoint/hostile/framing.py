"""Files that are of no format or of two, and paths that are no files."""

import os
from pathlib import Path

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import Bad, Gone, No, Two, case, raw_case, raw_cases
from tests.checkpoint.hostile.safetensors_files import entry, safetensors
from tests.checkpoint.hostile.torch_files import torch_file

raw_cases(
    "", ".safetensors",
    ("empty_file", Bad, b""),
    ("polyglot_safetensors_then_zip", Bad, safetensors({"w": entry()}) + torch_file()),
    ("directory", Gone, Path.mkdir),
)  # fmt: skip
raw_cases(
    "", ".pt",
    ("safetensors_named_torch", Two, safetensors({"w": entry()})),
    ("bytes_appended", Bad, torch_file() + b"\0" * 10),
    ("bytes_prepended", No, b"\0" * 16 + torch_file()),
    ("polyglot_pickle_then_zip", No, b"\x80\x02}." + torch_file()),
    ("fifo", ck.UnreadableFile, lambda path: os.mkfifo(path)),
    ("device", ck.UnreadableFile, lambda path: path.symlink_to("/dev/zero")),
    ("missing", ck.UnreadableFile, lambda path: None),
    ("dangling_link", ck.UnreadableFile, lambda path: path.symlink_to(path.with_name("nowhere"))),
    ("link_loop", ck.UnreadableFile, lambda path: path.symlink_to(path)),
)  # fmt: skip
raw_case("suffix_contradicts_content", ".npz", Two, torch_file())
raw_case("flax_msgpack", ".msgpack", No, b"\x81\xa1w\xc7\x05\x01abcde")


@case("", No)
def saved_model(path: Path) -> None:
    path.mkdir()
    (path / "saved_model.pb").touch()
