"""Tied tensors: safetensors keeps one of them, and the other names as metadata."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model

from jaxmha import checkpoint
from jaxmha.converters import migrate, verify
from jaxmha.converters.torch import load_into
from tests.converters.command_line import cli, printed


class Model(torch.nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(11, 6)
        self.attn = torch.nn.MultiheadAttention(6, 2)
        self.head = torch.nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.emb.weight


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    model = Model()
    save_model(model, str(tmp_path / "tied.safetensors"))
    torch.save(model.state_dict(), tmp_path / "tied.pt")
    return tmp_path / "tied.safetensors"


def tied(path: Path) -> dict[str, str]:
    with checkpoint.open(path) as file:
        return file.tied


def test_names_stay_where_they_are_true(saved: Path, tmp_path: Path) -> None:
    assert tied(saved) == {"head.weight": "emb.weight"}
    migrate.convert(saved, tmp_path / "same.safetensors", to="torch", num_heads=2)
    assert tied(tmp_path / "same.safetensors") == {"head.weight": "emb.weight"}
    renamed = migrate.convert(saved, tmp_path / "flax.safetensors", to="flax", num_heads=2)
    with checkpoint.open(tmp_path / "flax.safetensors") as file:
        assert "head.weight" not in file.metadata
    assert any("lacks head.weight: tie the parameters" in note for note in renamed.notes)


@pytest.mark.parametrize("to", ["pt", "npz"])
def test_a_note_names_ties_that_a_format_cannot_hold(to: str, saved: Path, tmp_path: Path) -> None:
    done = migrate.convert(saved, tmp_path / f"a.{to}", to="torch", num_heads=2)
    assert any("lacks head.weight: tie the parameters" in note for note in done.notes)


@pytest.mark.parametrize("order", [1, -1])
def test_verify_compares_both_names(order: int, saved: Path, tmp_path: Path) -> None:
    files = [saved, saved.with_suffix(".pt")][::order]
    report = verify.compare(files[0], files[1], num_heads=2)
    assert report.same
    assert cli("verify", *files, "--num-heads", 2).exit_code == 0
    state = torch.load(saved.with_suffix(".pt"))
    torch.save({**state, "head.weight": torch.zeros(11, 6)}, saved.with_suffix(".pt"))
    shown = cli("verify", *files, "--num-heads", 2)
    assert shown.exit_code == 1
    assert "head.weight" in printed(shown)
    found = verify.compare(files[0], files[1], num_heads=2)
    assert [*found.outside] == ["head.weight"]
    assert not found.not_compared


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("value", [0.0, None], ids=["different", "same"])
def test_a_tensor_under_only_the_other_name_is_compared(
    value: float | None, order: int, saved: Path
) -> None:
    state = torch.load(saved.with_suffix(".pt"))
    head = state.pop("emb.weight")
    state["head.weight"] = head if value is None else head * value
    torch.save(state, saved.with_suffix(".pt"))
    files = [saved, saved.with_suffix(".pt")][::order]
    found = verify.compare(files[0], files[1], num_heads=2)
    assert [*found.outside] == ["head.weight"] * (value is not None)
    assert not found.not_compared


@pytest.mark.parametrize("ending", [".safetensors", ".pt"])
@pytest.mark.parametrize("kept", [True, False], ids=["tied", "untied"])
def test_models_are_filled_from_either_file(kept: bool, ending: str, saved: Path) -> None:
    model = Model(kept)
    load_into(model, saved.with_suffix(ending))
    wanted = torch.load(saved.with_suffix(".pt"))
    assert torch.equal(model.head.weight, wanted["head.weight"])
    assert torch.equal(model.emb.weight, wanted["emb.weight"])
