"""Uses every toy; runs in a copy of the package that has them."""

import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
import toy
from typer.testing import CliRunner

import jaxmha
from jaxmha import checkpoint
from jaxmha.cli.app import app
from jaxmha.converters import toy as face
from jaxmha.converters.migrate import convert, convert_state
from jaxmha.converters.verify import compare

assert Path(jaxmha.__file__).is_relative_to(Path.cwd()), jaxmha.__file__
N, H = 2, 3
params = jaxmha.init_params(jax.random.key(0), num_heads=N, features=N * H, use_bias=False)

# A layout: attention and the layers next to it, to another framework and back.
state = {f"block.{key}": array for key, array in face.export_params(params).items()}
state["norm.weight"], state["norm.bias"] = np.ones((2, N * H), np.float32)
flax = convert_state(state, to="flax", num_heads=N)
assert flax["norm/scale"].shape == (N * H,), sorted(flax)
back = convert_state(flax, to="toy")
assert back.keys() == state.keys(), sorted(back)
assert all(np.array_equal(back[name], state[name]) for name in state)

# A format: written, recognised without its suffix's help, and converted.
with checkpoint.open(checkpoint.write("a.toy", state).files[0]) as file:
    assert file.format == "toy"
done = convert("a.toy", "a.safetensors", to="flax", num_heads=N)
assert [block[1] for block in done.blocks] == ["toy"]
assert convert("a.safetensors", "b.toy", to="toy").other_layers
assert compare("a.toy", "b.toy", num_heads=N)

# A framework: a live layer against its file, and against jaxmha with a mask.
layer = face.to_module(params)
assert isinstance(layer, toy.Attention)
report = compare(layer, params)
assert report, report
assert report.blocks[0].errors
hidden = np.arange(7) > np.array([[6], [3]])
with (
    mock.patch.dict(sys.modules, toy=None),
    pytest.raises(ModuleNotFoundError, match="pip install toy"),
):
    face.to_module(params)
mask, bias = face.import_masks(hidden=hidden)
assert mask is not None
assert bias is None
assert np.array_equal(face.export_masks(mask, key_length=7)["hidden"], hidden)
x = np.random.default_rng(0).normal(size=(2, 7, N * H)).astype(np.float32)

# An implementation: by its name.
ours = jaxmha.multi_head_attention(params, x, mask=mask, implementation="toy")
assert np.allclose(ours, layer(x, x, x, hidden), atol=1e-5)
assert "toy" in jaxmha.implementations.IMPLEMENTATIONS

# A command.
result = CliRunner().invoke(app, ["toy", "a.toy"])
assert (result.exit_code, result.stdout) == (0, "4 tensors\n"), result.output
sys.stdout.write("used\n")
