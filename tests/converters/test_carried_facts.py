"""Facts that no tensor holds follow their block through several conversions, under its new prefix."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.converters.migrate import pipeline
from tests.converters.test_model_facts import HEADS, LAYERS, MISTRAL, D, compared, saved

TEXT = "rotary, base 10000, 2 features in pairs of halves"
OTHER = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}


@pytest.fixture(scope="module")
def tensors() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    blocks = [f"model.layers.{i}.self_attn" for i in range(LAYERS)]
    shapes = {f"{b}.{x}_proj.weight": (HEADS * 2, D) for b in blocks for x in "qkv"}
    shapes |= {f"{b}.o_proj.weight": (D, HEADS * 2) for b in blocks}
    return {name: rng.normal(size=shape).astype("f") for name, shape in shapes.items()}


def facts(path: Path, key: str) -> dict[str, str]:
    """The metadata of blocks under a key, by prefix."""
    with checkpoint.open(path) as file:
        start = f"jaxmha.{key}."
        return {k.removeprefix(start): v for k, v in file.metadata.items() if k.startswith(start)}


@pytest.mark.parametrize(
    "chain",
    [
        [("a.safetensors", "flax"), ("b.npz", "llama")],
        pytest.param(
            [("a.pt", "flax"), ("b.safetensors.index.json", "jaxmha"), ("c.bin.index.json", "llama"),
             ("d.orbax", "flax"), ("e.safetensors", "llama")],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["two", "every-format"],
)  # fmt: skip
def test_positions_follow_their_block(
    chain: list[tuple[str, str]], tensors: dict[str, Any], tmp_path: Path
) -> None:
    """The last file still differs from a model of another base."""
    at = saved(tmp_path / "source", tensors, MISTRAL)
    other = saved(tmp_path / "other", tensors, MISTRAL | OTHER)
    (tmp_path / "made").mkdir()
    for name, to in chain:
        pipeline.convert(at, at := tmp_path / "made" / name, to=to)
        s = "/" if to == "flax" else "."
        blocks = [f"model{s}layers{s}{i}{s}self_attn" for i in range(LAYERS)]
        assert facts(at, "positions") == dict.fromkeys(blocks, TEXT), name
    (text,) = compared(other, at).differing
    assert text.endswith(f"base 500000, 2 features in pairs of halves; second {TEXT}")


def test_a_configuration_goes_first_if_it_is_known(tensors: dict[str, Any], tmp_path: Path) -> None:
    made = tmp_path / "a.safetensors"
    pipeline.convert(saved(tmp_path / "source", tensors, MISTRAL), made, to="flax")
    for config, stated in (
        (MISTRAL | OTHER, TEXT.replace("10000", "500000")),
        (MISTRAL | {"model_type": "nobody_knows"}, TEXT),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        again = tmp_path / "b.safetensors"
        pipeline.convert(made, again, to="llama", force=True)
        assert {*facts(again, "positions").values()} == {stated}


def test_a_format_without_metadata_says_what_it_loses(
    tensors: dict[str, Any], tmp_path: Path
) -> None:
    made = tmp_path / "a.safetensors"
    pipeline.convert(saved(tmp_path / "source", tensors, MISTRAL), made, to="flax")
    done = pipeline.convert(made, tmp_path / "b.weights.h5", to="keras-gqa-file")
    assert f"the positions ({TEXT}) are in no tensor" in " ".join(done.notes)


def test_no_fact_stays_under_the_old_prefix(tensors: dict[str, Any], tmp_path: Path) -> None:
    """The other block is carried over as it is: its facts stay."""
    old, new, rest = "model.layers.0.self_attn", "renamed", "model.layers.1.self_attn"
    made = {"num_heads": str(HEADS), "positions": TEXT, "semantics": '{"from": "flax"}'}
    metadata = {f"jaxmha.{k}.{p}": text for k, text in made.items() for p in (old, rest)}
    source = tmp_path / "a.safetensors"
    checkpoint.write(source, tensors, metadata=metadata)
    plan, _ = pipeline.plan(source, to="llama")
    first = next(step for step in plan.steps if step.source == old)
    others = [replace(first, kind="other", layout="", becomes="", num_heads=None,
                      source=name, target=name, tensors=(name,))
              for name in tensors if name.startswith(rest)]  # fmt: skip
    plan = replace(plan, steps=(replace(first, target=new), *others))
    pipeline.convert(source, tmp_path / "b.safetensors", plan=plan)
    for key, text in made.items():
        found = facts(tmp_path / "b.safetensors", key)
        assert found.keys() == {new, rest}, key
        assert found[rest] == text
