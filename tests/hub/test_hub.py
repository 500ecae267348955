"""Models from a hub: fetched at one commit, and one message for everything that can go wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.checkpoint.hub import _cached
from tests.hub.server import COMMIT, Hub, serve

Run = Callable[..., list[dict[str, Any]]]
ARRAY = np.arange(15, dtype=np.float32).reshape(3, 5)
# Prints the outcome of opening each address. The library reads its settings when it is imported.
PROGRAM = """
import json, sys
import numpy as np
from jaxmha import checkpoint
from jaxmha.converters import equinox, match

target = {"dense": {"kernel": np.zeros((5, 3), np.float32)}}
for address in sys.argv[1:]:
    try:
        plan = match(address, target)
        made = equinox.load_into(target, address.partition("@")[0], plan)
        out = {"source": plan.source, "value": np.asarray(made["dense"]["kernel"]).tolist()}
    except checkpoint.CheckpointError as error:
        out = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(out))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    checkpoint.write(tmp_path / "model.safetensors", {"fc.weight": ARRAY})
    files = {
        "config.json": b'{"model_type": "mine"}',
        "mine.safetensors": (tmp_path / "model.safetensors").read_bytes(),
        "pytorch_model.bin": bytes(100),
        "tokenizer.json": b"{}",
    }
    with serve(files) as found:
        yield found


@pytest.fixture
def run(hub: Hub, tmp_path: Path) -> Run:
    def call(*addresses: str, url: str = "") -> list[dict[str, Any]]:
        settings = {"HF_ENDPOINT": url or hub.url, "HF_HOME": str(tmp_path / "home")}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *addresses],
            env=os.environ | settings | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        found = [json.loads(line) for line in done.stdout.splitlines()]
        if any("error" in one for one in found):
            assert done.stderr == ""
        return found

    return call


def left(tmp_path: Path) -> list[Path]:
    """Files in the cache that are no marks of the library."""
    return [p for p in (tmp_path / "home").rglob("*") if p.is_file() and "TAG" not in p.name]


ERRORS = {
    "hf://org/nothing": "no such model",
    "hf://org/gated": "is gated",
    "hf://org/model@v9": "no such revision",
    "hf://org/model/of/mine": "no address of a model",
}


def test_a_model_is_fetched_once_at_one_commit(hub: Hub, run: Run, tmp_path: Path) -> None:
    expected = {"source": f"hf://org/model@{COMMIT}", "value": ARRAY.T.tolist()}
    assert run("hf://org/model", f"hf://org/model@{COMMIT}") == [expected] * 2
    fetched = [one for one in hub.requests if one.startswith("GET /org/")]
    names = [one.rpartition("/")[2] for one in fetched]
    assert sorted(names) == ["config.json", "mine.safetensors"]
    no_network = "http://127.0.0.1:9"
    cached, unknown = run("hf://org/model", "hf://org/other", url=no_network)
    assert cached == expected
    assert "check the network" in unknown["message"]


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
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (folder := tmp_path / "models--org--model" / "snapshots" / COMMIT).mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    assert (_cached("org/model", None) is not None) == whole


def test_errors_are_one_message_and_leave_nothing(hub: Hub, run: Run, tmp_path: Path) -> None:
    for (address, message), found in zip(ERRORS.items(), run(*ERRORS), strict=True):
        assert message in found["message"]
        assert found["message"].startswith(f"{address}: ")
        assert "\n" not in found["message"]
    assert left(tmp_path) == []


def test_a_model_without_safetensors_is_refused(hub: Hub, run: Run, tmp_path: Path) -> None:
    del hub.files["mine.safetensors"]
    assert "it has pytorch_model.bin" in run("hf://org/model")[0]["message"]
    assert left(tmp_path) == []


@pytest.mark.slow  # the library tries again after pauses
def test_half_a_download_leaves_only_complete_files(hub: Hub, run: Run, tmp_path: Path) -> None:
    hub.broken = "mine.safetensors"
    found = run("hf://org/model")[0]
    assert found["error"] == "UnreadableFile"
    assert "the download failed" in found["message"]
    kept = [path for path in left(tmp_path) if path.suffix != ".lock"]
    assert {path.resolve().read_bytes() for path in kept} == {hub.files["config.json"]}
    hub.broken = ""
    assert run("hf://org/model")[0]["value"] == ARRAY.T.tolist()
    assert sum(one.startswith("GET") and "config.json" in one for one in hub.requests) == 1


def test_the_command_line_takes_addresses(hub: Hub, tmp_path: Path) -> None:
    def jaxmha(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "jaxmha", *arguments],
            env=os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
            check=False,
        )

    done = jaxmha("inspect", "hf://org/nothing")
    assert done.returncode == 2
    assert "no such model" in " ".join(done.stderr.replace("│", "").split())


@pytest.mark.parametrize("revision", ["../../../x", "/dev/zero", "a/../b", "..", ".git", "a..b"])
def test_a_revision_is_no_path(revision: str) -> None:
    with pytest.raises(checkpoint.UnsupportedFormat, match="no address"):
        checkpoint.open(f"hf://a/b@{revision}")
