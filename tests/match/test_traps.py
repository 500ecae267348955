"""Drawn pairs are matched rightly, and traps are never accepted."""

import numpy as np
import pytest

from jaxmha.converters import match
from jaxmha.converters.matching import loading
from tests.match import traps

COUNT = 200
KINDS = list(traps.TRAPS)


def filled(target: traps.Arrays, source: traps.Arrays) -> traps.Arrays:
    with loading.prepared(target, source, None) as ready:
        return dict(ready)


@pytest.mark.everyday(part=[2])
@pytest.mark.parametrize("part", range(8))
def test_traps_are_refused_or_asked(part: int) -> None:
    accepted = []
    for seed in range(part, COUNT, 8):
        rng, kind = np.random.default_rng(seed), KINDS[seed % len(KINDS)]
        drawn = traps.draw(rng)
        traps.TRAPS[kind](drawn, rng)
        try:
            filled(drawn.target, drawn.source)
        except ValueError:
            continue
        accepted.append((seed, kind))
    assert accepted == []


@pytest.mark.everyday(part=[0])
@pytest.mark.parametrize("part", range(2))
def test_the_same_models_without_traps_are_matched(part: int) -> None:
    for seed in range(part, 40, 2):
        drawn = traps.draw(np.random.default_rng(seed))
        made = filled(drawn.target, drawn.source)
        assert made.keys() == drawn.right.keys()
        for name, value in drawn.right.items():
            np.testing.assert_array_equal(made[name], value, err_msg=f"{seed} {name}")


@pytest.mark.everyday(part=[0])
@pytest.mark.parametrize("part", range(80))
def test_names_that_tell_nothing_are_asked_or_matched_rightly(part: int) -> None:
    outcomes = {"right": 0, "asked": 0}
    for seed in range(part, 1900, 80):
        rng = np.random.default_rng(seed)
        drawn = traps.draw(rng)
        traps.without_names(drawn, rng)
        try:
            made = filled(drawn.target, drawn.source)
        except ValueError:
            outcomes["asked"] += 1
            continue
        for name, value in drawn.right.items():
            np.testing.assert_array_equal(made[name], value, err_msg=f"{seed} {name}")
        outcomes["right"] += 1
    assert min(outcomes.values()) > 0


@pytest.mark.parametrize("name", traps.PACKED_NAMES)
def test_packed_projections_are_asked_once_and_loaded_as_decided(name: str) -> None:
    drawn = traps.draw(np.random.default_rng(0))
    traps.pack(drawn, name, by_head=False)
    asked = match(drawn.source, drawn.target)
    assert len(asked.questions) == 1
    assert "alternate head by head" in asked.questions[0].reason
    assert match(drawn.source, drawn.target, packing="concatenated").questions == ()
    with loading.prepared(drawn.target, drawn.source, None, packing="concatenated") as ready:
        for key, value in drawn.right.items():
            np.testing.assert_array_equal(ready[key], value, err_msg=key)


def test_an_axis_of_three_is_parts_or_heads() -> None:
    shapes = {"out": (12, 12), "qkv": (12, 3, 12)}
    source = {f"attn/{n}/kernel": np.zeros(s, np.float32) for n, s in shapes.items()}
    names = ("query", "key", "value", "out")

    def target(*heads: int) -> dict[str, object]:
        sizes = [(12, *heads)] * 3 + [(*heads, 12)]
        return {
            "attn": {n: {"kernel": np.zeros(s, "f")} for n, s in zip(names, sizes, strict=True)}
        }

    assert match(source, target(3, 4)).questions
    assert match(source, target(12)).questions
    assert not match(source, target(2, 6)).questions


def test_the_only_block_of_a_model_is_matched_as_blocks_are() -> None:
    """Norms in a block and after all blocks have one shape; numbers tell repeated blocks apart."""
    names = {
        "layers.0.input_layernorm.weight": "blocks/0/attention_norm/scale",
        "layers.0.self_attn.q_proj.weight": "blocks/0/attention/query/kernel",
        "layers.0.self_attn.o_proj.weight": "blocks/0/attention/out/kernel",
        "layers.0.post_attention_layernorm.weight": "blocks/0/mlp_norm/scale",
        "layers.0.mlp.up_proj.weight": "blocks/0/up/kernel",
        "norm.weight": "norm/scale",
    }
    shapes = [(5,), (7, 5), (5, 7), (5,), (11, 5), (5,)]
    source = {name: np.zeros(shape) for name, shape in zip(names, shapes, strict=True)}
    target = {new: np.zeros(source[name].shape[::-1]) for name, new in names.items()}
    plan = match(source, target)
    assert not plan.questions
    assert {line.target: line.sources[0] for line in plan.lines} == {b: a for a, b in names.items()}
