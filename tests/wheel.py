"""Builds the wheel, installs it alone into a fresh environment, and uses it outside the checkout.

The environment gets only what `pip install jaxmha` brings: jax, numpy, einops, jaxtyping.
"""

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
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
assert "site-packages" in jaxmha.__file__, jaxmha.__file__
assert not {"torch", "keras", "flax", "tensorflow"} & sys.modules.keys()
print("the wheel works")
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
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
        subprocess.run([*pip, "-c", constraints, str(wheel)], check=True)
        subprocess.run([python, "-c", SMOKE], check=True, cwd=folder)


def _check_contents(wheel: Path) -> None:
    """Every module of the checkout is in the wheel exactly once, under its import name."""
    tracked = {
        p.relative_to(ROOT)
        for folder in ("jaxmha", "converters")
        for p in (ROOT / folder).rglob("*.py")
        if "docs" not in p.parts
    }
    expected = {str(p) if p.parts[0] == "jaxmha" else str(Path("jaxmha") / p) for p in tracked}
    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if name.endswith(".py")]
    assert sorted(found) == sorted(expected), set(found) ^ expected


if __name__ == "__main__":
    main()
