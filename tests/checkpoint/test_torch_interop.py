"""Files of torch are exchanged with torch itself."""

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import ml_dtypes
import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.checkpoint.formats.torch import pickle
from jaxmha.checkpoint.limits import Budget
from tests.checkpoint.hostile import torch_files
from tests.checkpoint.test_checkpoint_interop import _arrays, _assert_equal, _bits

torch = pytest.importorskip("torch")


def test_torch_reads_ours(tmp_path: Path) -> None:
    arrays = _arrays() | {"bf16": np.arange(4).astype(ml_dtypes.bfloat16)}
    checkpoint.write(tmp_path / "m.pt", arrays)
    for mmap in (False, True):
        state = torch.load(tmp_path / "m.pt", weights_only=True, mmap=mmap)
        assert list(state) == list(arrays)
        for name, array in arrays.items():
            assert str(state[name].dtype) == f"torch.{array.dtype}"
            assert tuple(state[name].shape) == array.shape
            assert _bits(state[name]) == array.tobytes()


def test_torch_reads_ours_with_metadata(tmp_path: Path) -> None:
    import torch

    checkpoint.write(tmp_path / "m.pt", {"w": np.ones(3, np.float32)}, metadata={"note": "ü"})
    assert list(torch.load(tmp_path / "m.pt", weights_only=True)) == ["w"]


def test_torch_reads_our_rare_dtypes(tmp_path: Path) -> None:
    arrays = {
        name: np.arange(6).astype(getattr(ml_dtypes, name, name)).reshape(2, 3)
        for name in ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
    }
    checkpoint.write(tmp_path / "m.pt", arrays)
    state = torch.load(tmp_path / "m.pt", weights_only=True)
    for name, array in arrays.items():
        assert str(state[name].dtype) == f"torch.{name}"
        assert _bits(state[name]) == array.tobytes()


def test_our_torch_storages_are_aligned(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "m.pt", _arrays())
    raw = (tmp_path / "m.pt").read_bytes()
    with ZipFile(tmp_path / "m.pt") as archive:
        for member in archive.infolist():
            at = member.header_offset
            lengths = raw[at + 26 : at + 30]
            start = at + 30 + int.from_bytes(lengths[:2], "little")
            assert (start + int.from_bytes(lengths[2:], "little")) % 64 == 0


def test_we_read_torch(tmp_path: Path) -> None:
    tensors = {name: torch.from_numpy(array) for name, array in _arrays().items()}
    tensors["bf16"] = torch.randn(5).bfloat16()
    tensors["f8"] = torch.randn(4, 2).to(torch.float8_e4m3fn)
    tensors["u16"] = torch.arange(5).to(torch.uint16)
    tensors["parameter"] = torch.nn.Parameter(torch.randn(2, 2))
    torch.save(tensors, tmp_path / "m.pt")
    _assert_equal(tmp_path / "m.pt", tensors)


def test_we_read_torch_views_and_ties(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    packed = torch.randn(12, 4)
    tensors = {
        "transposed": base.T,
        "strided": base[1::2, ::3],
        "row": base[2],
        "one": base[3, 5],
        "nothing": base[:0],
        "expanded": torch.ones(1).expand(3, 5),
        "q": packed[:4],
        "k": packed[4:8],
        "tied": packed,
        "tied_again": packed,
        "flipped_axes": torch.randn(2, 3, 4).permute(2, 0, 1),
    }
    torch.save(tensors, tmp_path / "m.pt")
    _assert_equal(tmp_path / "m.pt", tensors)


@pytest.mark.parametrize("kind", ["plain", "module", "nested", "optimizer"])
def test_we_read_what_people_save(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True)
    state = dict(module.state_dict())
    saved: Any = state
    if kind == "module":
        saved = module.state_dict()
        assert hasattr(saved, "_metadata")
    elif kind == "nested":
        saved = {"model": module.state_dict(), "epoch": 3, "lr": 1e-3, "name": "x", "best": None}
        state = {f"model.{name}": tensor for name, tensor in state.items()}
    elif kind == "optimizer":
        optimizer = torch.optim.Adam(module.parameters(), betas=(0.9, 0.99))
        module(*(torch.randn(3, 2, n) for n in (8, 4, 6)))[0].sum().backward()
        optimizer.step()
        saved = optimizer.state_dict()
        state = {
            f"state.{index}.{name}": tensor
            for index, slots in saved["state"].items()
            for name, tensor in slots.items()
        }
    torch.save(saved, tmp_path / "m.pt")
    _assert_equal(tmp_path / "m.pt", state)


def test_values_that_run_nothing_are_read(tmp_path: Path) -> None:
    tagged = torch.nn.Parameter(torch.arange(3.0))
    tagged.tag = 7
    tensors = {"buffer": torch.nn.Buffer(torch.ones(2)), "parameter": tagged}
    values = {
        "dtype": torch.float32, "narrow": torch.complex32, "bytes": b"ab", "empty": b"",
        "array": bytearray(b"x"), "complex": 1j, "slice": slice(1, 5), "range": range(3),
    }  # fmt: skip
    nested = {
        "milestones": Counter([3, 5]),
        "size": torch.Size([7]),
        "set": {"a"},
        "frozen": frozenset(["a"]),
        "default": defaultdict(int, {"a": 1}),
    }
    torch.save(tensors | values | nested, tmp_path / "m.pt")
    _assert_equal(tmp_path / "m.pt", tensors)
    with checkpoint.open(tmp_path / "m.pt") as file:
        inside = ("milestones.3", "milestones.5", "size.0", "set.0", "frozen.0", "default.a")
        assert file.others == (*values, *inside)


def test_a_set_loses_no_tensor(tmp_path: Path) -> None:
    torch.save({"s": {torch.ones(2)}}, tmp_path / "m.pt")
    _assert_equal(tmp_path / "m.pt", {"s.0": torch.ones(2)})


def test_one_state_dict_may_have_two_names(tmp_path: Path) -> None:
    state = torch.nn.Linear(3, 5).state_dict()
    torch.save({"model": state, "ema": state}, tmp_path / "m.pt")
    both = {f"{key}.{name}": x for key in ("model", "ema") for name, x in state.items()}
    _assert_equal(tmp_path / "m.pt", both)


def test_more_storages_allow_more_opcodes() -> None:
    program, limits = b"\x80\x02](" + b"N" * 1500 + b"e.", checkpoint.Limits(opcodes=1000)
    found, _ = pickle.run(program, "m.pt", limits, Budget("m.pt", 0, limits), 20_000)
    assert found == [None] * 1500
    with pytest.raises(checkpoint.BudgetExceeded, match="too many pickle opcodes"):
        pickle.run(program, "m.pt", limits, Budget("m.pt", 0, limits), 1)


def test_torch_big_endian_is_converted(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    swapped = np.arange(6, dtype=">f4").tobytes()
    path.write_bytes(torch_files.torch_file(data=swapped, byteorder=b"big"))
    theirs = torch.load(path, weights_only=True)["w"]
    with checkpoint.open(path) as file:
        assert file["w"].tolist() == theirs.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_torch_legacy_is_refused_with_the_line_that_converts_it(tmp_path: Path) -> None:
    old, new = tmp_path / "old.pt", tmp_path / "new.pt"
    torch.save({"w": torch.ones(2)}, old, _use_new_zipfile_serialization=False)
    with pytest.raises(checkpoint.UnsupportedFormat, match=r"torch\.save\(torch\.load") as caught:
        checkpoint.open(old)
    code = str(caught.value).split('python -c "')[1].rstrip('"')
    exec(code.replace("OLD", str(old)).replace("NEW.pt", str(new)))  # noqa: S102
    _assert_equal(new, {"w": torch.ones(2)})


REMEDIES: dict[str, Any] = {
    ".to_dense()": lambda: torch.eye(2).to_sparse(),
    "no values": lambda: torch.empty(2, device="meta"),
    "torch.from_numpy": lambda: np.ones(2),
    ".to(torch.complex64)": lambda: torch.ones(2, dtype=torch.complex32),
    ".dequantize()": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    ".view(torch.uint8)": lambda: torch.ones(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "call .view(torch.uint8)": lambda: torch.ones(2, dtype=torch.uint8).view(torch.bits8),
    ".to_padded_tensor(0.0)": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "call .to_padded_tensor(0.0)": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    ".item()": lambda: np.float64(3),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("remedy", REMEDIES)
def test_errors_name_the_remedy(remedy: str, tmp_path: Path) -> None:
    torch.save({"w": REMEDIES[remedy]()}, tmp_path / "m.pt")
    with pytest.raises(checkpoint.ForbiddenContent, match=re.escape(remedy)):
        checkpoint.open(tmp_path / "m.pt")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Linear(2, 2),
        lambda: {"w": torch.eye(2).to_sparse()},
        lambda: {"w": torch.empty(2, device="meta")},
        lambda: {"w": torch.ones(2, dtype=torch.complex64).conj()},
        lambda: {"w": np.ones(2)},
        lambda: torch.ones(2),
        lambda: [torch.ones(2)],
    ],
    ids=["module", "sparse", "meta", "conj", "numpy", "tensor", "list"],
)
def test_torch_objects_are_refused(make: Any, tmp_path: Path) -> None:
    torch.save(make(), tmp_path / "m.pt")
    with pytest.raises(checkpoint.ForbiddenContent, match=r"m\.pt"):
        checkpoint.open(tmp_path / "m.pt")


def test_a_note_names_tied_tensors(tmp_path: Path) -> None:
    save_model = pytest.importorskip("safetensors.torch").save_model
    embed, head = torch.nn.Embedding(7, 5), torch.nn.Linear(5, 7)
    head.weight = embed.weight
    save_model(torch.nn.ModuleDict({"embed": embed, "head": head}), str(tmp_path / "m.safetensors"))
    with checkpoint.open(tmp_path / "m.safetensors") as file:
        assert len(file) == 2
        (note,) = file.notes
        assert note.endswith("its metadata gives the others: head.weight is embed.weight")
