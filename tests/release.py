"""Builds what a release uploads into `dist`: `python -m tests.release`, or `make release`.

Everything is built from the files of a commit, twice, in two folders, and the bytes are the same:
anyone with the commit and the versions in .ci/constraints.txt can build the files again. Beside them
lie SHA256SUMS and a bill of materials (CycloneDX) of each distribution.
"""

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
# The oldest glibc of the wheel of jaxmha-cpu, which auditwheel checks; the versions page states it.
PLATFORM = "manylinux_2_34_x86_64"
FOLDERS = {"jaxmha": "", "jaxmha-cpu": "native"}
NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "https://github.com/jaxmha/jaxmha")


def main() -> None:
    """Raises SystemExit where the files would not be fit to upload."""
    commit, epoch = _git("log", "-1", "--format=%H %ct").split()
    if _git("status", "--porcelain", "--untracked-files=no"):
        raise SystemExit("release: commit or stash first: files are built from the last commit")
    version = check_version(_git("tag", "--points-at", "HEAD").split())
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        made = [build(commit, epoch, Path(folder)) for folder in (first, second)]
        files = same(*made)
        subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)
        target = ROOT / "dist"
        target.mkdir(exist_ok=True)
        for old in target.iterdir():
            old.unlink()
        for file in files:
            (target / file.name).write_bytes(file.read_bytes())
    for name in FOLDERS:
        own = [
            x for x in sorted(target.iterdir()) if re.match(rf"{name.replace('-', '_')}-\d", x.name)
        ]
        bill = json.dumps(bill_of_materials(name, version, own), indent=2)
        (target / f"{name}-{version}.cdx.json").write_text(f"{bill}\n")
    sums = "".join(f"{sha256(x)}  {x.name}\n" for x in sorted(target.iterdir()))
    (target / "SHA256SUMS").write_text(sums)
    print(f"{commit}, built twice with the same bytes:\n{sums}", end="")


def versions() -> dict[str, str]:
    """Every place that states the version of a distribution."""
    face = (ROOT / "jaxmha" / "__init__.py").read_text()
    native = (ROOT / "native" / "build_library.py").read_text()
    return {
        "jaxmha/__init__.py": re.findall(r'^__version__ = "(.+)"$', face, re.MULTILINE)[0],
        "native/build_library.py": re.findall(r'^VERSION = "(.+)"$', native, re.MULTILINE)[0],
    }


def check_version(tags: list[str]) -> str:
    """The version of the release; SystemExit unless all places and the tag agree.

    >>> check_version([]) == check_version([f"v{check_version([])}"])
    True
    """
    found = versions()
    if len({*found.values()}) > 1:
        raise SystemExit(f"release: versions differ: {found}")
    version = found["jaxmha/__init__.py"]
    wrong = [tag for tag in tags if tag.startswith("v") and tag != f"v{version}"]
    if wrong:
        raise SystemExit(
            f"release: the commit has the tag {wrong[0]}, and its version is {version}"
        )
    return version


def build(commit: str, epoch: str, folder: Path) -> list[Path]:
    """Archives of sources and wheels of both distributions, from the files of a commit."""
    tree, out = folder / "tree", folder / "out"
    archive = subprocess.run(
        ["git", "archive", commit], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as file:
        file.extractall(tree, filter="data")
    pins = folder / "pins.txt"  # jaxmha-cpu names the jaxlib that it is built with itself
    pins.write_text("".join(re.findall(r"^setuptools==.*", CONSTRAINTS.read_text(), re.MULTILINE)))
    environment = os.environ | {
        "SOURCE_DATE_EPOCH": epoch,
        "PIP_CONSTRAINT": str(pins),
        "PYTHONHASHSEED": "0",
    }
    for name, place in FOLDERS.items():
        command = [sys.executable, "-m", "build", "--outdir", str(out / name), str(tree / place)]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        for sdist in (out / name).glob("*.tar.gz"):
            sdist.write_bytes(normalised(sdist.read_bytes(), int(epoch)))
    (plain,) = (out / "jaxmha-cpu").glob("*.whl")
    repair = [sys.executable, "-m", "auditwheel", "repair", "--plat", PLATFORM]
    subprocess.run(
        [*repair, "--wheel-dir", str(plain.parent), str(plain)],
        check=True,
        env=environment | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
    )
    plain.unlink()
    return sorted(out.glob("*/*"))


def normalised(archive: bytes, epoch: int) -> bytes:
    """A .tar.gz with the same files, in order of name, without owners and times of its building."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as old,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda one: one.name):
            one = tarfile.TarInfo(member.name)
            one.size, one.type, one.mtime = member.size, member.type, epoch
            one.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(one, old.extractfile(member) if member.isfile() else None)
    zipped = io.BytesIO()
    with gzip.GzipFile(fileobj=zipped, mode="wb", mtime=epoch, filename="") as file:
        file.write(packed.getvalue())
    return zipped.getvalue()


def same(first: list[Path], second: list[Path]) -> list[Path]:
    """The files of the first build; SystemExit unless those of the second have the same bytes."""
    names = [[path.name for path in files] for files in (first, second)]
    differing = [
        x.name for x, y in zip(first, second, strict=False) if x.read_bytes() != y.read_bytes()
    ]
    if names[0] != names[1] or differing:
        raise SystemExit(f"release: two builds differ in {differing or names}")
    return first


def bill_of_materials(name: str, version: str, files: list[Path]) -> dict[str, Any]:
    """Needs of a distribution, in CycloneDX: requirements, and the versions that were tested."""
    needed = requirements(name)
    pinned = dict(re.findall(r"^([\w.-]+)==(.+)$", CONSTRAINTS.read_text(), re.MULTILINE))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(NAMESPACE, f'{name}=={version}')}",
        "version": 1,
        "metadata": {
            "component": _component(name, version)
            | {
                "type": "library",
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "properties": [
                    {"name": f"sha256:{file.name}", "value": sha256(file)} for file in files
                ],
            }
        },
        "components": [
            {"type": "library"}
            | _component(package, pinned[package])
            | {"properties": [{"name": "requirement", "value": requirement}]}
            for package, requirement in needed.items()
        ],
        "dependencies": [
            {
                "ref": _component(name, version)["bom-ref"],
                "dependsOn": [_component(x, pinned[x])["bom-ref"] for x in needed],
            }
        ],
    }


def requirements(name: str) -> Mapping[str, str]:
    """Package -> requirement, of a distribution without its extras."""
    project = tomllib.loads((ROOT / FOLDERS[name] / "pyproject.toml").read_text())["project"]
    needed: list[str] = project.get("dependencies", [])
    return {re.split(r"[^\w.-]", one)[0]: one for one in needed}


def _component(name: str, version: str) -> dict[str, str]:
    url = f"pkg:pypi/{name}@{version}"
    return {"name": name, "version": version, "purl": url, "bom-ref": url}


def sha256(path: Path) -> str:
    """The digest of the bytes of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
