"""Builds the wheel, installs it alone into a fresh environment, and uses it outside the checkout.

The environment gets only what `pip install jaxmha` brings: jax, numpy, einops, jaxtyping. Then it
gets what files need, and reads and writes every format without torch, keras, tensorflow and flax.

The wheel is built from the archive of sources, which has no tests. A checkout without links is
installed as well, plain and editable.
"""

import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path, PurePosixPath

from tests.checkpoint import hostile
from tests.test_checkout import without_link

ROOT = Path(__file__).parents[1]
# Packages of `jaxmha[cli,orbax]`, but for orbax itself, which needs more than its format does.
FOR_FILES = "[cli]", "tensorstore"
# Suffixes of the data that modules read.
TABLES = (".json", ".tsv")
SMOKE = """
import sys
import numpy as np
import jaxmha
import jaxmha.converters.torch as converter
from jaxmha.converters import checkpoint, verify

state = {"in_proj_weight": np.ones((18, 6), "f"), "out_proj.weight": np.ones((6, 6), "f")}
params, semantics = converter.import_params(state, num_heads=2)
out = jaxmha.multi_head_attention(params, np.ones((2, 5, 6), "f"), semantics=semantics)
assert out.shape == (2, 5, 6)
checkpoint.write("a.safetensors", converter.export_params(params))
assert verify.compare("a.safetensors", state, num_heads=2)
for target, extra in (("a.weights.h5", "files"), ("a.orbax", "orbax")):
    try:
        checkpoint.write(target, {"w": np.ones(2)})
    except checkpoint.MissingDependency as e:
        assert e.remedy == f"pip install 'jaxmha[{extra}]'", e.remedy
    else:
        raise AssertionError(f"{target} needs nothing")
assert "site-packages" in jaxmha.__file__, jaxmha.__file__
assert not {"torch", "keras", "flax", "tensorflow"} & sys.modules.keys()
print("the wheel works")
"""
FILES = """
import importlib.util, sys
from pathlib import Path
import numpy as np
from jaxmha.converters import checkpoint

for name in ("torch", "keras", "tensorflow", "flax", "orbax", "safetensors"):
    assert importlib.util.find_spec(name) is None, name
formats = set()
for path in map(Path, sys.argv[1:]):
    with checkpoint.open(path) as file:
        (name,) = file
        assert file[name].tolist() == [[0, 1, 2], [3, 4, 5]], path
        formats.add(file.format)
assert formats == {format.name for format in checkpoint.FORMATS}, formats
for suffix in checkpoint.suffixes():
    if suffix not in (".keras", ".gguf"):  # read only
        checkpoint.write(f"written{suffix}", {"w": np.arange(6).reshape(2, 3)})
        with checkpoint.open(f"written{suffix}") as file:
            assert file["w"].tolist() == [[0, 1, 2], [3, 4, 5]] and file.digests, suffix
print("every format is read and written without any framework")
"""


def main() -> None:
    """Raises CalledProcessError or AssertionError where the wheel is not whole."""
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "build", "--outdir", folder, str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        wheel = next(Path(folder).glob("*.whl"))
        _check_contents(wheel)
        _check_archive(next(Path(folder).glob("*.tar.gz")))
        _check_checkout(Path(folder))
        home = Path(folder) / "environment"
        venv.create(home)
        python = str(home / "bin" / "python")
        constraints = str(ROOT / ".ci" / "constraints.txt")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "install",
            "--quiet",
            "--no-compile",
        ]
        subprocess.run([*pip, "-c", constraints, str(wheel)], check=True)
        subprocess.run([python, "-I", "-c", SMOKE], check=True, cwd=folder)
        extras, *packages = FOR_FILES
        subprocess.run([*pip, "-c", constraints, f"{wheel}{extras}", *packages], check=True)
        sound = sound_files(Path(folder))
        subprocess.run([python, "-I", "-c", FILES, *map(str, sound)], check=True, cwd=folder)
        command = [python, "-I", str(home / "bin" / "jaxmha"), "convert", "a.safetensors", "b.npz"]
        command += ["--to", "flax", "--num-heads", "2"]
        subprocess.run(command, check=True, cwd=folder)


def sound_files(folder: Path) -> list[Path]:
    """One checkpoint of every format."""
    made = []
    for name, case in hostile.SOUND.items():
        (folder / name).mkdir()
        made.append(folder / name / f"m{case.suffix}")
        case.build(made[-1])
    return made


def _modules() -> set[Path]:
    """Modules and tables of the checkout by their paths; those behind the link only once."""
    folders = [ROOT / "jaxmha", ROOT / "converters", ROOT / "experiments" / "recipes"]
    found = {
        path.relative_to(ROOT)
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in (".py", *TABLES)
    }
    return {path for path in found if path.parts[:2] != ("jaxmha", "converters")}


def _check_contents(wheel: Path) -> None:
    """Every module and table of the checkout is in the wheel once, and links of the README lead
    somewhere."""
    paths = _modules()
    outside = {"converters": "jaxmha/converters", "experiments": "jaxmha"}  # as package-dir says
    expected = {str(Path(outside.get(p.parts[0], "jaxmha"), *p.parts[1:])) for p in paths}
    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if name.endswith((".py", *TABLES))]
        (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        links = re.findall(r"\]\(([^)]+)\)", archive.read(metadata).decode())
    assert sorted(found) == sorted(expected), set(found) ^ expected
    assert len(links) > 10
    assert not [link for link in links if not link.startswith("https://")]


def _check_archive(archive: Path) -> None:
    """The archive of sources has every module once, and no tests, which need the whole checkout."""
    with tarfile.open(archive) as file:
        inside = [PurePosixPath(*PurePosixPath(name).parts[1:]) for name in file.getnames()]
    assert not [path for path in inside if "tests" in path.parts]
    suffixes = (".py", *TABLES)
    modules = [str(path) for path in inside if path.suffix in suffixes and path.name != "setup.py"]
    assert sorted(modules) == sorted(map(str, _modules())), set(modules) ^ {*map(str, _modules())}


def _check_checkout(folder: Path) -> None:
    """A checkout whose link is a text file is installed, plain and editable, and imported.

    The environments take the libraries of this one.
    """
    tree = without_link(folder)
    code = "import jaxmha.converters.torch, jaxmha.converters.checkpoint"
    for mode in ([], ["--editable"]):
        home = folder / f"checkout{len(mode)}"
        venv.create(home)
        paths = {"base": str(home), "platbase": str(home)}
        site = Path(sysconfig.get_path("purelib", vars=paths))
        (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
        python = str(home / "bin" / "python")
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
        pip += ["--no-deps", "--no-build-isolation", *mode, str(tree)]
        subprocess.run(pip, check=True)
        for place in (folder, tree):
            subprocess.run([python, "-c", code], check=True, cwd=place)


if __name__ == "__main__":
    main()
