"""Models from a hub: fetched at one commit, and one message for everything that can go wrong."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants

from jaxmha import checkpoint
from jaxmha.checkpoint.hub import _cached
from jaxmha.converters import equinox, match
from tests.converters.command_line import cli
from tests.hub.server import COMMIT, Hub, serve

ARRAY = np.arange(15, dtype=np.float32).reshape(3, 5)
Opened = tuple[str, list[list[float]]]


def opened(address: str) -> Opened:
    """The address with its commit, and the kernel that a target takes from the model."""
    target = {"dense": {"kernel": np.zeros((5, 3), np.float32)}}
    plan = match(address, target)
    made: Any = equinox.load_into(target, address.partition("@")[0], plan)
    assert plan.source is not None
    return plan.source, np.asarray(made["dense"]["kernel"]).tolist()


def refused(address: str) -> checkpoint.CheckpointError:
    with pytest.raises(checkpoint.CheckpointError) as caught:
        opened(address)
    return caught.value


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The library read its settings when it was imported."""
    checkpoint.write(tmp_path / "model.safetensors", {"fc.weight": ARRAY})
    files = {
        "config.json": b'{"model_type": "mine"}',
        "mine.safetensors": (tmp_path / "model.safetensors").read_bytes(),
        "pytorch_model.bin": bytes(100),
        "tokenizer.json": b"{}",
    }
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serve(files) as found:
        reach(found.url, monkeypatch)
        yield found


def reach(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = url + constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", form)
    monkeypatch.setattr(constants, "ENDPOINT", url)


def left(tmp_path: Path) -> list[Path]:
    """Files in the cache that are no marks of the library."""
    return [p for p in (tmp_path / "home").rglob("*") if p.is_file() and "TAG" not in p.name]


ERRORS = {
    "hf://org/nothing": "no such model",
    "hf://org/gated": "is gated",
    "hf://org/model@v9": "no such revision",
    "hf://org/model/of/mine": "no address of a model",
    "hf://org/model": "it has pytorch_model.bin",
}


def test_a_model_is_fetched_once_at_one_commit(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"hf://org/model@{COMMIT}"
    expected = address, ARRAY.T.tolist()
    assert opened("hf://org/model") == opened(address) == expected
    fetched = [one for one in hub.requests if one.startswith("GET /org/")]
    names = [one.rpartition("/")[2] for one in fetched]
    assert sorted(names) == ["config.json", "mine.safetensors"]
    reach("http://127.0.0.1:9", monkeypatch)  # no network
    assert opened("hf://org/model") == expected
    assert "check the network" in str(refused("hf://org/other"))


SHARDS = {f"model-0000{i}-of-00002.safetensors": "" for i in (1, 2)}
INDEX = {"model.safetensors.index.json": json.dumps({"weight_map": {n: n for n in SHARDS}})}


@pytest.mark.parametrize(
    ("files", "whole"),
    [
        ({"model.safetensors": ""}, True),
        (SHARDS | INDEX, True),
        (SHARDS, False),
        (dict([*SHARDS.items()][:1]) | INDEX, False),
        ({"mine.safetensors": ""}, False),  # there may be others
        ({"config.json": ""}, False),
    ],
)
def test_half_a_download_of_another_program_is_not_used(
    files: dict[str, str], whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (folder := tmp_path / "models--org--model" / "snapshots" / COMMIT).mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    assert (_cached("org/model", None) is not None) == whole


def test_errors_are_one_message_and_leave_nothing(
    hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    del hub.files["mine.safetensors"]
    for address, problem in ERRORS.items():
        message = str(refused(address))
        assert problem in message
        assert message.startswith(f"{address}: ")
        assert "\n" not in message
    assert left(tmp_path) == []
    assert capfd.readouterr().err == ""


@pytest.mark.slow  # the library tries again after pauses
def test_half_a_download_leaves_only_complete_files(hub: Hub, tmp_path: Path) -> None:
    hub.broken = "mine.safetensors"
    found = refused("hf://org/model")
    assert isinstance(found, checkpoint.UnreadableFile)
    assert "the download failed" in str(found)
    kept = [path for path in left(tmp_path) if path.suffix != ".lock"]
    assert {path.resolve().read_bytes() for path in kept} == {hub.files["config.json"]}
    hub.broken = ""
    assert opened("hf://org/model")[1] == ARRAY.T.tolist()
    assert sum(one.startswith("GET") and "config.json" in one for one in hub.requests) == 1


@pytest.mark.usefixtures("hub")
def test_the_command_line_takes_addresses() -> None:
    done = cli("inspect", "hf://org/nothing")
    assert done.exit_code == 2
    assert "no such model" in " ".join(done.stderr.replace("│", "").split())


@pytest.mark.parametrize("revision", ["../../../x", "/dev/zero", "a/../b", "..", ".git", "a..b"])
def test_a_revision_is_no_path(revision: str) -> None:
    with pytest.raises(checkpoint.UnsupportedFormat, match="no address"):
        checkpoint.open(f"hf://a/b@{revision}")
