"""Pairs and traps by an attacker who had not seen the matcher."""

import tomllib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxmha.converters import flax, match
from jaxmha.converters.matching import loading
from tests.match import more_strangers, strangers
from tests.match.test_pairs import TOLERANCE, load
from tests.promotion import foreign

assert more_strangers
run_torch: Any = strangers.rt
TRAPS = tomllib.loads(Path(__file__).with_name("hand_traps.toml").read_text())
ASKED = {"lstm_tagger": 3, "cross_decoder_keras": 3}  # pairs that ask, and how many questions
# Traps that a person could decide, and about which the matcher asks all the same.
CAUTIOUS = {"heads_named", "attn12", "llama_norms_to_attn_mlp", "xformers_swiglu", "haiku_square",
            "stack_cube"}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.everyday(name=("alexnet_like", "mamba_like"))
@pytest.mark.parametrize("name", strangers.PAIRS)
def test_pairs_are_matched_rightly(name: str) -> None:
    torch.manual_seed(0)
    with foreign():
        source, model, draw, run = strangers.PAIRS[name]()
        plan = match(source, model)
        assert len(plan.questions) == ASKED.get(name, 0)
        if name in ASKED:
            return
        inputs = draw(np.random.default_rng(0))
        expected = run_torch(source, *inputs)
        filled = load(model, source, plan)
        found = jax.jit(lambda *given: run(filled, *given))(*map(jnp.asarray, inputs))
    assert np.abs(np.asarray(found) - expected).max() < TOLERANCE * np.abs(expected).max()


def arrays(trap: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Source and right target of a trap."""
    rng, source, right = np.random.default_rng(0), dict[str, Any](), dict[str, Any]()
    for line in trap["source"]:
        name, *shape = line.split()
        dtype = shape.pop() if not shape[-1].isdigit() else "float32"
        source[name] = (100 * rng.normal(size=[int(n) for n in shape])).astype(dtype)
    for line in trap["target"]:
        name, _, origins = line.partition(" = ")
        found = []
        for origin in origins.split(" + ") if origins else ():
            of, *axes = origin.split()
            found.append(source[of].transpose([int(n) for n in axes] or None))
        if not found:
            name, *shape = line.split()
            found = [rng.normal(size=[int(n) for n in shape]).astype(np.float32)]
        right[name] = np.stack(found) if len(found) > 1 else found[0]
    return source, right


@pytest.mark.parametrize("name", TRAPS)
def test_traps_are_refused_or_right(name: str) -> None:
    (source, right), known = arrays(TRAPS[name]), TRAPS[name].get("known", False)
    target: dict[str, Any] = {}
    for key, value in right.items():
        *path, last = key.split("/")
        inner = target
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = np.zeros_like(value)
    try:
        with loading.prepared(target, source, None) as ready:
            found = dict(ready)
    except ValueError:
        assert not known or name in CAUTIOUS
        return
    assert known
    for key, value in right.items():
        np.testing.assert_array_equal(found[key], value)


@pytest.mark.parametrize("mark", ["#", "\\", "\\.", "*"])
def test_names_hold_any_character(mark: str) -> None:
    """ "#" stands for numbers in the paths of templates."""
    shapes = {f"x{mark}": (5, 3), f"l.0.b{mark}": (7, 5), f"l.1.b{mark}": (7, 5), "y": (11, 7)}
    rng = np.random.default_rng(0)
    source = {f"{name}.weight": rng.normal(size=n).astype("f") for name, n in shapes.items()}
    found = flax.load_into({name: np.zeros_like(x) for name, x in source.items()}, source)
    for name, x in source.items():
        np.testing.assert_array_equal(found[name], x)
