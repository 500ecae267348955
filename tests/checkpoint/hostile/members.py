"""Hostile files of torch and .keras archives whose zip is sound."""

import gzip
from pathlib import Path

from tests.checkpoint.hostile.cases import Bad, Big, Code, Gone, No, Two, case, raw_case, raw_cases
from tests.checkpoint.hostile.keras_archives import of
from tests.checkpoint.hostile.torch_files import (
    FLOATS,
    PROGRAM,
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

# --- torch ---------------------------------------------------------------------------------------------


def rebuilt(arguments: bytes) -> bytes:
    """A tensor made of any arguments."""
    return torch_file(state(text("w"), V2 + b"(" + arguments + b"tR"))


FULL = storage() + number(0) + numbers(2, 3) + numbers(3, 1)
raw_cases(
    "torch_tensor_", ".pt",
    ("of_four_arguments", Code, rebuilt(FULL)),
    ("of_twenty_arguments", Code, rebuilt(FULL + b"\x89" + b"N" * 15)),
    ("of_no_storage", Code, rebuilt(b"N" + number(0) + numbers(2, 3) + numbers(3, 1) + b"\x89}")),
    ("of_a_tensor_as_storage", Code, one_tensor(of=tensor())),
    ("of_a_shape_of_text", Code, rebuilt(storage() + number(0) + text("23") + numbers(3, 1) + b"\x89}")),
    ("of_a_shape_of_truth", Code, rebuilt(storage() + number(0) + b"\x88K\6\x86" + numbers(3, 1) + b"\x89}")),
    ("of_an_offset_of_text", Code, rebuilt(storage() + text("0") + numbers(2, 3) + numbers(3, 1) + b"\x89}")),
    ("of_an_offset_that_overflows", Bad, one_tensor(offset=2**63 - 1)),
    ("of_strides_that_overflow", Bad, one_tensor(shape=(2, 2), strides=(2**63 - 1, 2**63 - 1))),
    ("of_a_storage_of_2_62", Bad, one_tensor(of=storage(count=2**62))),
    ("of_a_storage_of_one_element_more", Bad, one_tensor(of=storage(count=7))),
    ("of_a_key_with_a_sign", Bad, one_tensor(of=storage(key="+0"))),
    ("of_a_key_of_arabic_digits", Bad, one_tensor(of=storage(key="\u0660"))),
    ("of_an_empty_key", Bad, one_tensor(of=storage(key=""))),
    ("of_a_key_with_a_zero_in_front", Gone, one_tensor(of=storage(key="00"))),
    ("of_an_unknown_storage", Code, one_tensor(of=storage("torch\nQUInt8Storage"))),
    ("of_a_storage_of_another_module", Code, one_tensor(of=storage("os\nFloatStorage"))),
    ("of_a_global_with_spaces", Code, one_tensor(of=storage("torch \nFloatStorage"))),
    ("on_a_device_of_a_program", Code, torch_file(state(text("w"), b"ctorch\ndevice\n" + text("x") + b"\x85R"))),
    ("as_a_subclass", Code, torch_file(state(text("w"), b"ctorch._tensor\n_rebuild_from_type_v2\n"))),
    ("as_a_numpy_array", Code, torch_file(state(text("w"), b"cnumpy.core.multiarray\n_reconstruct\n"))),
    ("as_a_dtensor", Code, torch_file(state(text("w"), b"ctorch.distributed.tensor\nDTensor\n"))),
    ("as_a_nested_tensor", Code, torch_file(state(text("w"), b"ctorch._utils\n_rebuild_nested_tensor\n"))),
    ("as_a_device_tensor", Code, torch_file(state(text("w"), b"ctorch._utils\n_rebuild_device_tensor_from_numpy\n"))),
    ("as_a_wrapper", Code, torch_file(state(text("w"), b"ctorch._utils\n_rebuild_wrapper_subclass\n"))),
    ("of_a_lambda_module", Code, torch_file(state(text("w"), b"ctorch.nn\nModule\n)R"))),
)  # fmt: skip

raw_cases(
    "torch_file_", ".pt",
    ("in_three_folders", Two, zip_file([*torch_members(), ("n/a", b""), ("o/a", b"")])),
    ("without_a_folder", No, zip_file([("data.pkl", PROGRAM), ("data/0", FLOATS), ("version", b"3\n")])),
    ("version_is_text", Bad, zip_file([*torch_members()[:-1], ("m/version", b"three")])),
    ("version_is_empty", Bad, zip_file([*torch_members()[:-1], ("m/version", b"")])),
    ("version_is_long", Bad, zip_file([*torch_members()[:-1], ("m/version", b"3" * 65)])),
    ("byteorder_is_long", Bad, torch_file(byteorder=b"little" * 20)),
    ("byteorder_in_capitals", Bad, torch_file(byteorder=b"LITTLE")),
    ("program_is_empty", Bad, torch_file(b"")),
    ("program_alone", Gone, zip_file([("m/data.pkl", PROGRAM)])),
    ("program_twice", Two, zip_file([*torch_members(), ("m/DATA.PKL", PROGRAM)])),
    ("storage_in_a_folder", Bad, zip_file([*torch_members(), ("m/data/0/0", b"")])),
    ("storage_with_a_suffix", Bad, zip_file([*torch_members(), ("m/data/0.npy", b"")])),
    ("storage_is_hidden", Bad, zip_file([*torch_members(), ("m/data/.0", b"")])),
    ("code_of_python", No, zip_file([*torch_members(), ("m/code/__torch__.py", b"import os")])),
    ("package", No, zip_file([("m/.data/version", b"6"), ("m/.data/extern_modules", b"os")])),
    ("pickle_in_the_extra_program", Bad, torch_file(**{"extra.pkl": b"cos\nsystem\n."})),
)  # fmt: skip


@case(".pt", No)
def torch_tar_with_links(path: Path) -> None:
    import tarfile

    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("storages")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)


raw_case("torch_in_gzip", ".pt", No, gzip.compress(torch_file(), mtime=0))
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 24\n" % (b"0" * 64)
raw_case("pointer_of_git_lfs", ".bin", No, LFS)

# --- .keras ----------------------------------------------------------------------------------------------


raw_cases(
    "keras_archive_", ".keras",
    ("without_metadata", Gone, of({"metadata.json": None})),
    ("metadata_is_a_list", Bad, of({"metadata.json": b"[]"})),
    ("metadata_is_empty", Bad, of({"metadata.json": b""})),
    ("metadata_key_twice", Two, of({"metadata.json": b'{"a": 1, "a": 2}'})),
    ("metadata_is_a_bomb", Big, of({"metadata.json": b'{"a":[' + b"[]," * 900_000 + b"0]}"})),
    ("config_has_a_nan", Bad, of({"config.json": b'{"a": NaN}'})),
    ("config_has_a_number_beyond_all", Bad, of({"config.json": b'{"a": -1e999}'})),
    ("config_of_many_digits", Bad, of({"config.json": b'{"a": ' + b"9" * 5000 + b"}"})),
    ("config_is_not_utf8", Bad, of({"config.json": b'{"a": "\xff"}'})),
    ("config_is_utf16", Bad, of({"config.json": '{"a": 1}'.encode("utf-16")})),
    ("config_is_17_megabytes", Big, of({"config.json": b"{" + b" " * (17 << 20) + b"}"})),
    ("program_in_its_folder", Bad, of({"src/layer.py": b"import os"})),
    ("weights_in_a_folder", Bad, of({"x/model.weights.h5": b"\x89HDF\r\n\x1a\n"})),
    ("weights_are_empty", Bad, of({"model.weights.h5": b""})),
    ("weights_are_a_zip", Bad, of({"model.weights.h5": torch_file()})),
    ("weights_are_text", Bad, of({"model.weights.h5": b"HDF" * 400})),
    ("weights_in_npz_too", Bad, of({"model.weights.npz": b"PK"})),
    ("weights_index", Bad, of({"model.weights.json": b"{}"})),
)  # fmt: skip
