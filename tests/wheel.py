"""Builds the wheel, installs it alone into a fresh environment, and uses it outside the checkout.

The environment gets only what `pip install jaxmha` brings: jax, numpy, einops, jaxtyping. Then it
gets what files need, and reads and writes every format without torch, keras, tensorflow and flax.
"""

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from tests.checkpoint import hostile

ROOT = Path(__file__).parents[1]
# What `jaxmha[cli,orbax]` brings, but for orbax itself, which needs more than its format does.
FOR_FILES = "[cli]", "tensorstore"
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
    if suffix != ".keras":  # read only
        checkpoint.write(f"written{suffix}", {"w": np.arange(6).reshape(2, 3)})
        with checkpoint.open(f"written{suffix}") as file:
            assert file["w"].tolist() == [[0, 1, 2], [3, 4, 5]] and file.digests, suffix
print("every format is read and written without any framework")
"""


def main() -> None:
    """Raises CalledProcessError or AssertionError where the wheel is not whole."""
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "build", "--wheel", "--outdir", folder, str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        wheel = next(Path(folder).glob("*.whl"))
        _check_contents(wheel)
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


def _check_contents(wheel: Path) -> None:
    """Every module of the checkout is in the wheel exactly once, under its import name."""
    tracked = {
        p.relative_to(ROOT)
        for folder in ("jaxmha", "converters")
        for p in (ROOT / folder).rglob("*.py")
    }
    expected = {str(p) if p.parts[0] == "jaxmha" else str(Path("jaxmha") / p) for p in tracked}
    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if name.endswith(".py")]
    assert sorted(found) == sorted(expected), set(found) ^ expected


if __name__ == "__main__":
    main()
