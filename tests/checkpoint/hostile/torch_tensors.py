"""Hostile tensors of torch files, and what such a file holds."""

import pickle
from io import BytesIO
from pathlib import Path

from tests.checkpoint.hostile.cases import Bad, Big, Code, Gone, No, Two, case, raw_cases
from tests.checkpoint.hostile.torch_files import (
    FLOATS,
    ORDERED,
    one_tensor,
    state,
    storage,
    tensor,
    text,
    torch_file,
    torch_members,
    zip_file,
)

raw_cases(
    "torch_", ".pt",
    ("beyond_storage", Bad, one_tensor(offset=1)),
    ("huge_stride", Bad, one_tensor(strides=(2**62, 1))),
    ("negative_offset", Bad, one_tensor(offset=-1)),
    ("negative_stride", Bad, one_tensor(strides=(-3, 1))),
    ("negative_size", Bad, one_tensor(shape=(-2, 3))),
    ("rank_mismatch", Bad, one_tensor(strides=(1,))),
    ("expansion_bomb", Big, one_tensor(shape=(2**20, 2**20), strides=(0, 0))),
    ("expands_to_more_than_the_watch", Big, one_tensor(shape=(15, 2**20), strides=(0, 0))),
    ("rank_bomb", Big, one_tensor(shape=(1,) * 65, strides=(0,) * 65)),
    ("zero_size_bomb", Big, one_tensor(shape=(0, 2**62), strides=(1, 1))),
    ("short_storage", Bad, torch_file(data=FLOATS[:-4])),
    ("storage_of_two_dtypes", Two, torch_file(
        state(text("w"), tensor(), text("v"), tensor(storage("torch\nIntStorage"))))),
    ("conjugate", Code, one_tensor(after=b"}" + text("conj") + b"\x88s")),
    ("backward_hooks", Code, one_tensor(hooks=ORDERED + text("a") + b"Ns")),
    ("byteorder_junk", Bad, torch_file(byteorder=b"middle")),
    ("sparse", Code, torch_file(state(text("w"), b"ctorch._utils\n_rebuild_sparse_tensor\n"))),
    ("quantised", Code, torch_file(state(text("w"), b"ctorch._utils\n_rebuild_qtensor\n"))),
    ("meta", Code,
     torch_file(state(text("w"), b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n"))),
    ("bare_storage", Code, torch_file(state(text("w"), storage()))),
    ("storage_key_path", Bad, one_tensor(storage(key="../data.pkl"))),
    ("storage_missing", Gone, one_tensor(storage(key="7"))),
    ("storage_unused", Bad, zip_file([*torch_members(), ("m/data/1", b"abc")])),
    ("storage_malformed", Bad, one_tensor(text("storage") + b"Q")),
    ("storage_negative", Bad, one_tensor(storage(count=-6))),
    ("boolean_bytes", Bad, torch_file(
        state(text("w"), tensor(storage("torch\nBoolStorage"))), b"\0\1\2\3\0\1")),
    ("without_version", Gone, zip_file(torch_members()[:-1])),
    ("stray_member", Bad, torch_file(**{"evil.py": b"import os"})),
    ("script", No, torch_file(**{"constants.pkl": b"\x80\x02).", "code/m.py": b""})),
    ("legacy", No, bytes.fromhex("80028a0a6cfc9c46f9206aa850192e80024de9032e")),
    ("bare_pickle", No, pickle.dumps({"w": 1}, 4)),
)  # fmt: skip


@case(".pt", No)
def torch_tar(path: Path) -> None:
    import tarfile

    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("pickle"), BytesIO())
