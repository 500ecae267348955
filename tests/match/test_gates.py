"""Gate, up and down matrices are told apart by the names that libraries give them, and by shapes."""

import itertools

import numpy as np
import pytest

from jaxmha.converters import equinox

# Library -> names of the gate, the up matrix and the output.
NAMES = {
    "Llama": ("w1", "w3", "w2"),
    "DINOv2": ("w1", "w2", "w3"),
    "DBRX": ("w1", "v1", "w2"),
    "transformers": ("gate_proj", "up_proj", "down_proj"),
    "T5": ("wi_0", "wi_1", "wo"),
    "Grok": ("linear_1", "linear_v", "linear_2"),
    "labml": ("linear1", "linear_v", "linear2"),
    "timm": ("fc1_g", "fc1_x", "fc2"),
    "Shazeer": ("w", "v", "w2"),
}
INNER, D = 7, 5
ROLES = (1.0, 2.0, 3.0)


@pytest.mark.parametrize("pair", [*itertools.product(NAMES, NAMES)], ids="-".join)
def test_gates_are_no_up_matrices(pair: tuple[str, str]) -> None:
    theirs, mine = (NAMES[library] for library in pair)
    shapes = ((INNER, D), (INNER, D), (D, INNER))
    source = {
        f"mlp.{name}.weight": np.full(shape, role, np.float32)
        for name, shape, role in zip(theirs, shapes, ROLES, strict=True)
    }
    target = {
        "mlp": {
            name: {"kernel": np.zeros(shape[::-1], np.float32)}
            for name, shape in zip(mine, shapes, strict=True)
        }
    }
    made = equinox.load_into(target, source)["mlp"]
    assert [made[name]["kernel"][0, 0] for name in mine] == list(ROLES)


@pytest.mark.parametrize("sizes", [(D, D, D, D), (D, D, D, 3)])
def test_shapes_that_show_no_roles(sizes: tuple[int, ...]) -> None:
    """Square matrices may have the roles of Llama or DINOv2; layers of an ungated MLP have none."""
    shapes = list(itertools.pairwise(sizes))
    source = {f"w{n}.weight": np.ones(s[::-1], np.float32) for n, s in enumerate(shapes, 1)}
    names = NAMES["transformers"]
    target = {n: {"kernel": np.zeros(s, np.float32)} for n, s in zip(names, shapes, strict=True)}
    with pytest.raises(ValueError, match="open question"):
        equinox.load_into(target, source)
