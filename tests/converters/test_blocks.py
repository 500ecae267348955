"""Blocks are found in whole checkpoints, with the layout, the reason, and the head count."""

from dataclasses import replace

import numpy as np
import pytest

from jaxmha.converters import huggingface, linear
from jaxmha.converters.discovery import attention_blocks, damaged_blocks, model_families
from jaxmha.converters.layout import registry, transform
from jaxmha.converters.layout.base import Layout
from tests.converters.test_every_layout import N, exported, params_of

Shapes = dict[str, tuple[int, ...]]
ROWS = [
    (f.layout, f.name, p)
    for f in model_families.FAMILIES
    for p in f.prefixes.split()
    if not f.refused  # these have a test of their own
]


# Family -> an array next to its projections, by which it is recognised.
NEAR: dict[str, tuple[str, tuple[int, ...]]] = {
    "MaxViT of timm": ("rel_pos.mlp.fc1.weight", (4, 2)),
    "CoAtNet of timm": ("rel_pos.mlp.fc1.weight", (4, 2)),
    "TinyViT of timm": ("attention_biases", (2, 9)),
}


def shapes_of(layout: Layout, *prefixes: str) -> Shapes:
    """Shapes of a synthetic checkpoint: one block at each prefix."""
    found: Shapes = {"embedding": (7, 5)}
    for prefix in prefixes:
        found |= {key: array.shape for key, array in exported(layout.name, prefix).items()}
    return found


def test_every_family_has_a_known_layout_and_patterns_differ() -> None:
    names = {layout.name for layout in registry.LAYOUTS}
    assert {layout for layout, _, _ in ROWS} <= names
    assert len({(layout, pattern) for layout, _, pattern in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("layout", "family", "pattern"), ROWS)
@pytest.mark.parametrize("before", ["", "some.model."])
def test_blocks_of_every_family(layout: str, family: str, pattern: str, before: str) -> None:
    named = attention_blocks.named(layout)
    prefixes = [before.replace(".", named.separator) + pattern.replace(".", named.separator)]
    prefixes = [p.replace("{i}", str(i)) for p in prefixes for i in (0, 11)]
    shapes = shapes_of(named, *dict.fromkeys(prefixes))
    if family in NEAR:
        shapes |= {f"{prefix}.{NEAR[family][0]}": NEAR[family][1] for prefix in prefixes}
    found = attention_blocks.find(shapes)
    assert [block.prefix for block in found] == list(dict.fromkeys(prefixes))
    for block in found:
        assert block.layout.name == layout
        assert block.family == (family, pattern)
        assert block.also == ()
        assert block.why == f"{len(block.keys)} keys and the prefix of {family}: {pattern}"


@pytest.mark.parametrize(
    "prefix", ["my.attn", "xh.1.attn", "h.1.attn.inner", "h.one.attn", "h.1xattn", ""]
)
def test_keys_alone_elsewhere(prefix: str) -> None:
    (block,) = attention_blocks.find(shapes_of(huggingface.GPT2, prefix))
    assert block.layout.name == "gpt2"
    assert block.family is None
    assert block.why == "4 keys alone"


def test_same_keys_are_decided_by_the_place_or_reported_to_be_ambiguous(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = replace(linear.LLAMA, name="other")
    row = model_families.Family("Others", "other", "stack.{i}.core")
    monkeypatch.setattr(model_families, "FAMILIES", (*model_families.FAMILIES, row))
    state = shapes_of(linear.LLAMA, "stack.3.core", "model.layers.3.self_attn", "x")
    for tables in ([linear.LLAMA, other], [other, linear.LLAMA]):
        found = {block.prefix: block for block in attention_blocks.find(state, tables)}
        first, second = (table.name for table in tables)
        assert found["stack.3.core"].layout.name == "other"
        assert found["model.layers.3.self_attn"].layout.name == "llama"
        assert found["x"].layout.name == first
        assert found["x"].also == (second,)
        assert found["x"].why == f"8 keys alone; they fit {second} as well"


def test_two_layouts_with_other_keys_at_one_prefix_are_decided_by_the_place() -> None:
    def both(prefix: str) -> Shapes:
        return shapes_of(huggingface.GPT2, prefix) | shapes_of(huggingface.T5, prefix)

    (block,) = attention_blocks.find(both("h.0.attn"))
    assert block.layout.name == "gpt2"
    assert block.unknown  # what belongs to the other is not dropped in silence
    with pytest.raises(ValueError, match=r"prefix 'x' fits two layouts, gpt2 and t5: name one"):
        attention_blocks.find(both("x"))


def test_keras_with_as_many_heads_fits_two_classes() -> None:
    tables = {layout.name: layout for layout in registry.LAYOUTS}
    shapes = shapes_of(tables["keras"], "attention")
    params = params_of(tables["keras"])
    square = params._replace(
        gate=None,
        value=params.value._replace(kernel=params.key.kernel, bias=params.key.bias),
        out=params.out and params.out._replace(kernel=np.ones((N, 4, 13)), bias=np.ones(13)),
    )
    state = transform.export_params(tables["keras"], square, prefix="attention")
    (block,) = attention_blocks.find({key: array.shape for key, array in state.items()})
    assert (block.layout.name, block.also) == ("keras", ("keras-gqa",))
    assert [b.also for b in attention_blocks.find(shapes)] == [()]  # value_dim: only one holds it


def test_natural_order() -> None:
    names = [f"layer.{i}.attention" for i in range(12)]
    shapes = shapes_of(huggingface.BERT, *sorted(names))
    assert [block.prefix for block in attention_blocks.find(shapes)] == names
    assert sorted(names) != names


def test_damaged_blocks_are_named() -> None:
    shapes = shapes_of(huggingface.GPT2, "h.0.attn", "h.1.attn")
    del shapes["h.1.attn.c_proj.bias"]
    found = attention_blocks.find(shapes)
    assert [block.prefix for block in found] == ["h.0.attn"]
    (reason,) = damaged_blocks.describe(shapes, found)
    assert reason == "h.1.attn looks like layout gpt2 but lacks c_proj.bias"
    shapes["h.1.attn.c_proj.bias"] = ()
    (reason,) = damaged_blocks.describe(shapes, attention_blocks.find(shapes))
    assert "c_proj.bias expected axes (Do), got shape ()" in reason


def test_unknown_keys_under_a_prefix() -> None:
    state = exported("gpt2", "h.0.attn")
    state["h.0.attn.bias"] = np.ones((1, 1, 5, 5), np.float32)  # known next to attention
    state["h.0.attn.gate"] = np.ones(5, np.float32)
    (block,) = attention_blocks.find({key: array.shape for key, array in state.items()})
    assert block.unknown == ("h.0.attn.gate",)
    with pytest.raises(ValueError, match=r"unknown key 'h.0.attn.gate' in the block: layout gpt2"):
        block.read(state, N)
    del state["h.0.attn.gate"]
    (block,) = attention_blocks.find({key: array.shape for key, array in state.items()})
    assert block.read(state, N)[0].query.kernel.shape[-2] == N
