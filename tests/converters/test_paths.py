"""Paths on the command line that name no file: empty ones, URLs and devices."""

import os
from pathlib import Path

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.cli import convert
from tests.converters.command_line import fails


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only checkpoint of the working folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    checkpoint.write("a.npz", {"w": np.ones((5, 3))})
    return Path("a.npz")


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", ""],
        ["verify", "a.npz", ""],
        ["match", "", "a.npz"],
        ["match", "a.npz", ""],
        ["convert", "a.npz", "", "--to", "flax"],
        ["convert", "a.npz", "b.npz", "--to", "flax", "--report", ""],
        ["describe", "a.npz", "--svg="],
    ],
)
def test_an_empty_path_is_not_the_working_folder(file: Path, arguments: list[str]) -> None:
    assert "it is empty" in fails(Path(), *arguments)


def test_the_api_refuses_an_empty_path(file: Path) -> None:
    with pytest.raises(checkpoint.UnreadableFile, match="the path is empty"):
        checkpoint.open("")


@pytest.mark.parametrize("url", ["https://huggingface.co/a/b", "s3://b/a.npz", "gs://b/a.npz"])
def test_a_url_is_named_as_one(file: Path, url: str) -> None:
    for arguments in (["inspect", url], ["verify", "a.npz", url], ["match", url, "a.npz"]):
        message = fails(Path(), *arguments)
        assert "is no path; download it, or give hf://ORGANISATION/MODEL" in message, arguments
    assert "is a URL; name a local file" in fails(Path(), "match", "a.npz", url)
    with pytest.raises(checkpoint.UnsupportedFormat, match=r"is a URL; write a file on this mach"):
        checkpoint.write(f"{url.removesuffix('.npz')}.npz", {"w": np.ones(2)})


def test_the_url_of_a_local_file_is_answered_by_its_path(file: Path) -> None:
    url, remedy = "file:///tmp/a%20b.npz", "give the path alone: /tmp/a b.npz"
    for arguments in (["inspect", url], ["match", url, "a.npz"], ["match", "a.npz", url]):
        assert remedy in fails(Path(), *arguments), arguments
    with pytest.raises(checkpoint.UnsupportedFormat, match=remedy):
        checkpoint.write(url, {"w": np.ones(2)})


def test_a_local_file_may_look_like_a_url(file: Path) -> None:
    Path("s3:/b").mkdir(parents=True)
    file.rename("s3:/b/a.npz")
    with checkpoint.open("s3://b/a.npz") as found:
        assert [*found] == ["w"]


def test_a_report_goes_to_no_pipe(file: Path) -> None:
    os.mkfifo("pipe")
    message = fails(Path(), "convert", "a.npz", "b.npz", "--to", "flax", "--report", os.devnull)
    assert "--json" in message
    assert not convert._is_report(Path("pipe"), Path("b.npz"))  # reading would wait forever


@pytest.mark.parametrize("name", ["b.pt", "b.npz"])
def test_shards_that_a_format_lacks(file: Path, name: str) -> None:
    with pytest.raises(checkpoint.UnsupportedFormat, match=r"name an index, such as NAME\.safe"):
        checkpoint.write(name, {"w": np.ones(2)}, shard_size=100)
