"""Hostile tensors of torch files, and what such a file holds."""

import pickle
from io import BytesIO
from pathlib import Path

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import case
from tests.checkpoint.hostile.torch_files import (
    FLOATS,
    ORDERED,
    V2,
    number,
    numbers,
    one_tensor,
    state,
    storage,
    tensor,
    text,
    torch_file,
    torch_members,
    zip_file,
)


@case(".pt", ck.MalformedFile)
def torch_beyond_storage() -> bytes:
    return one_tensor(offset=1)


@case(".pt", ck.MalformedFile)
def torch_huge_stride() -> bytes:
    return one_tensor(strides=(2**62, 1))


@case(".pt", ck.MalformedFile)
def torch_negative_offset() -> bytes:
    return one_tensor(offset=-1)


@case(".pt", ck.MalformedFile)
def torch_negative_stride() -> bytes:
    return one_tensor(strides=(-3, 1))


@case(".pt", ck.MalformedFile)
def torch_negative_size() -> bytes:
    return one_tensor(shape=(-2, 3))


@case(".pt", ck.MalformedFile)
def torch_rank_mismatch() -> bytes:
    return one_tensor(strides=(1,))


@case(".pt", ck.BudgetExceeded)
def torch_expansion_bomb() -> bytes:
    return one_tensor(shape=(2**20, 2**20), strides=(0, 0))


@case(".pt", ck.BudgetExceeded)
def torch_expands_to_more_than_the_watch() -> bytes:
    return one_tensor(shape=(15, 2**20), strides=(0, 0))


@case(".pt", ck.BudgetExceeded)
def torch_rank_bomb() -> bytes:
    return one_tensor(shape=(1,) * 65, strides=(0,) * 65)


@case(".pt", ck.BudgetExceeded)
def torch_zero_size_bomb() -> bytes:
    return one_tensor(shape=(0, 2**62), strides=(1, 1))


@case(".pt", ck.MalformedFile)
def torch_short_storage() -> bytes:
    return torch_file(data=FLOATS[:-4])


@case(".pt", ck.AmbiguousFile)
def torch_storage_of_two_dtypes() -> bytes:
    ints = storage("torch\nIntStorage")
    return torch_file(state(text("w"), tensor(), text("v"), tensor(ints)))


@case(".pt", ck.ForbiddenContent)
def torch_conjugate() -> bytes:
    return one_tensor(after=b"}" + text("conj") + b"\x88s")


@case(".pt", ck.ForbiddenContent)
def torch_backward_hooks() -> bytes:
    hooks = ORDERED + text("a") + b"Ns"
    body = storage() + number(0) + numbers(2, 3) + numbers(3, 1) + b"\x89" + hooks
    return torch_file(state(text("w"), V2 + b"(" + body + b"tR"))


@case(".pt", ck.MalformedFile)
def torch_byteorder_junk() -> bytes:
    return torch_file(byteorder=b"middle")


@case(".pt", ck.ForbiddenContent)
def torch_sparse() -> bytes:
    return torch_file(state(text("w"), b"ctorch._utils\n_rebuild_sparse_tensor\n"))


@case(".pt", ck.ForbiddenContent)
def torch_quantised() -> bytes:
    return torch_file(state(text("w"), b"ctorch._utils\n_rebuild_qtensor\n"))


@case(".pt", ck.ForbiddenContent)
def torch_meta() -> bytes:
    return torch_file(state(text("w"), b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n"))


@case(".pt", ck.ForbiddenContent)
def torch_bare_storage() -> bytes:
    return torch_file(state(text("w"), storage()))


@case(".pt", ck.MalformedFile)
def torch_storage_key_path() -> bytes:
    return one_tensor(storage(key="../data.pkl"))


@case(".pt", ck.IncompleteCheckpoint)
def torch_storage_missing() -> bytes:
    return one_tensor(storage(key="7"))


@case(".pt", ck.MalformedFile)
def torch_storage_unused() -> bytes:
    return zip_file([*torch_members(), ("m/data/1", b"abc")])


@case(".pt", ck.MalformedFile)
def torch_storage_malformed() -> bytes:
    return one_tensor(text("storage") + b"Q")


@case(".pt", ck.MalformedFile)
def torch_storage_negative() -> bytes:
    return one_tensor(storage(count=-6))


@case(".pt", ck.MalformedFile)
def torch_boolean_bytes() -> bytes:
    flags = tensor(storage("torch\nBoolStorage"))
    return torch_file(state(text("w"), flags), b"\0\1\2\3\0\1")


@case(".pt", ck.IncompleteCheckpoint)
def torch_without_version() -> bytes:
    return zip_file(torch_members()[:-1])


@case(".pt", ck.MalformedFile)
def torch_stray_member() -> bytes:
    return torch_file(**{"evil.py": b"import os"})


@case(".pt", ck.UnsupportedFormat)
def torch_script() -> bytes:
    return torch_file(**{"constants.pkl": b"\x80\x02).", "code/m.py": b""})


@case(".pt", ck.UnsupportedFormat)
def torch_legacy() -> bytes:
    return b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19." + b"\x80\x02M\xe9\x03."


@case(".pt", ck.UnsupportedFormat)
def torch_tar(path: Path) -> None:
    import tarfile

    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("pickle"), BytesIO())


@case(".pt", ck.UnsupportedFormat)
def torch_bare_pickle() -> bytes:
    return pickle.dumps({"w": 1}, 4)
