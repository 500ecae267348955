"""Releases: one version, the same bytes from two builds, and what the pages say of versions."""

import gzip
import io
import re
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

from jaxmha.keras import VERSIONS
from tests import release

ROOT = Path(__file__).parents[1]


def archive(members: dict[str, bytes], mtime: int, owner: str, mode: int) -> bytes:
    """A .tar.gz as a building machine makes it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as file:
        for name, content in members.items():
            one = tarfile.TarInfo(name)
            one.size, one.mtime, one.uname, one.mode = len(content), mtime, owner, mode
            file.addfile(one, io.BytesIO(content))
    return packed.getvalue()


def test_archives_of_two_machines_become_the_same_bytes() -> None:
    members = {"a/b.py": b"b", "a/PKG-INFO": b"info"}
    first = archive(members, 1, "me", 0o644)
    second = archive(dict(reversed(members.items())), 2, "you", 0o664)
    assert first != second
    made = [release.normalised(x, 1_700_000_000) for x in (first, second)]
    assert made[0] == made[1]
    assert gzip.decompress(made[0])
    with tarfile.open(fileobj=io.BytesIO(made[0])) as file:
        read = {one.name: file.extractfile(one) for one in file.getmembers()}
        assert {name: x.read() for name, x in read.items() if x is not None} == members
        assert {one.mtime for one in file.getmembers()} == {1_700_000_000}


def test_differing_builds_are_noticed(tmp_path: Path) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        folder.mkdir()
        (folder / "x.whl").write_text("same")
    first, second = ([*folder.iterdir()] for folder in folders)
    assert release.same(first, second) == first
    (folders[1] / "x.whl").write_text("other")
    with pytest.raises(SystemExit, match=r"two builds differ in \['x.whl'\]"):
        release.same(first, second)
    with pytest.raises(SystemExit, match="two builds differ"):
        release.same(first, [])


def test_the_version_is_one() -> None:
    version = release.check_version([])
    assert release.check_version([f"v{version}", "other"]) == version
    with pytest.raises(SystemExit, match=r"has the tag v9.9.9, and its version is"):
        release.check_version(["v9.9.9"])
    for path in ("pyproject.toml", "native/pyproject.toml"):
        project = tomllib.loads((ROOT / path).read_text())["project"]
        assert "version" in project["dynamic"]
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_bills_of_materials(tmp_path: Path) -> None:
    file = tmp_path / "jaxmha-0.1.0.tar.gz"
    file.write_bytes(b"x")
    bill = release.bill_of_materials("jaxmha", "0.1.0", [file])
    assert bill == release.bill_of_materials("jaxmha", "0.1.0", [file])
    names = {one["name"] for one in bill["components"]}
    assert names == {"jax", "numpy", "einops", "jaxtyping"}
    assert all(re.fullmatch(r"pkg:pypi/[\w-]+@[\d.]+", one["purl"]) for one in bill["components"])
    (digest,) = bill["metadata"]["component"]["properties"]
    assert digest == {"name": f"sha256:{file.name}", "value": release.sha256(file)}
    assert release.bill_of_materials("jaxmha-cpu", "0.1.0", [])["components"] == []


def test_citation() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["license"] == project["license"]
    assert citation["repository-code"] == project["urls"]["Source"]
    required = {"cff-version", "message", "title", "authors"}
    assert required <= citation.keys()


def test_tools_of_a_release_are_pinned() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    pinned = (ROOT / ".ci" / "constraints.txt").read_text()
    for requirement in (*groups["release"], "setuptools>="):
        assert f"\n{requirement.partition('>=')[0]}==" in pinned


def test_the_page_names_what_ci_runs() -> None:
    page = " ".join((ROOT / "docs/pages/reference/versions.md").read_text().split())
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    pythons = jobs["test"]["strategy"]["matrix"]["python"]
    assert f"Python {', '.join(pythons[:-1])} and {pythons[-1]}" in page
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for python in pythons:
        assert f"Programming Language :: Python :: {python}" in project["classifiers"]
    assert jobs["versions"]["strategy"]["matrix"]["which"] == ["newest", "oldest"]
    assert f"takes Keras {' and '.join(VERSIONS)} alone" in page
