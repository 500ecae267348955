"""Blocks are found in whole checkpoints, with the layout, the reason, and the head count."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxmha import checkpoint
from jaxmha.cli import app
from jaxmha.converters import huggingface, linear
from jaxmha.converters.discovery import (
    attention_blocks,
    damaged_blocks,
    head_count,
    hf_config,
    model_families,
)
from jaxmha.converters.layout import registry, transform
from jaxmha.converters.layout.arrays import to_numpy
from jaxmha.converters.layout.base import Layout
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.verify import comparison
from tests.converters.test_every_layout import N, params_of

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
        state = transform.export_params(layout, params_of(layout), layout.semantics, prefix=prefix)
        found |= {key: array.shape for key, array in state.items()}
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


SOME = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2}
TEXT = {**SOME, "intermediate_size": 8, "vocab_size": 11}
IMAGE = {**SOME, "intermediate_size": 8, "image_size": 8, "patch_size": 4}
IDS = {"bos_token_id": 0, "eos_token_id": 1}
WHISPER = {"d_model": 12, "encoder_attention_heads": 3, "decoder_attention_heads": 3, **IDS,
           "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8,
           "vocab_size": 11, "pad_token_id": 0}  # fmt: skip
T5 = {"d_model": 12, "num_heads": 3, "d_kv": 4, "num_layers": 2, "d_ff": 8, "vocab_size": 11}
TOWER = "_model.encoder.layers.{i}.self_attn"
# transformers' class, its configuration, and what is to be found: layout, family, pattern, count.
LIVE: dict[str, tuple[str, str, dict[str, Any], list[tuple[str, str, str, int]]]] = {
    "bert": ("BertModel", "BertConfig", TEXT, [("bert", "BERT", "encoder.layer.{i}.attention", 2)]),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config",
             {"n_embd": 12, "n_head": 3, "n_layer": 2, "vocab_size": 11, **IDS},
             [("gpt2", "GPT-2", "h.{i}.attn", 2)]),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**TEXT, "num_key_value_heads": 3},
              [("llama", "Llama", "layers.{i}.self_attn", 2)]),
    "clip": ("CLIPModel", "CLIPConfig",
             {"text_config": TEXT | IDS, "vision_config": IMAGE, "projection_dim": 8},
             [("linear", "CLIP", f"{tower}{TOWER}", 2) for tower in ("text", "vision")]),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5,
           [("t5", "T5", "block.{i}.layer.{i}.EncDecAttention", 2),
            ("t5", "T5", "block.{i}.layer.{i}.SelfAttention", 4)]),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT,
                 [("gpt-neox", "GPT-NeoX", "layers.{i}.attention", 2)]),
    "whisper": ("WhisperModel", "WhisperConfig", WHISPER,
                [("whisper", "Whisper", "layers.{i}.encoder_attn", 2),
                 ("whisper", "Whisper", "layers.{i}.self_attn", 4)]),
    "falcon old": ("FalconModel", "FalconConfig", {**TEXT, "multi_query": False, "bias": True},
                   [("gpt-neox", "BLOOM", "h.{i}.self_attention", 2)]),
    "vit": ("ViTModel", "ViTConfig", IMAGE,
            [("llama", "ViT (transformers 5)", "layers.{i}.attention", 2)]),
}  # fmt: skip


@pytest.mark.filterwarnings("default")  # transformers' own
@pytest.mark.parametrize("name", LIVE)
def test_live_models_of_transformers(name: str) -> None:
    import transformers

    model, config, options, expected = LIVE[name]
    made = getattr(transformers, config)(**options)
    state = getattr(transformers, model)(made).state_dict()
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    found = attention_blocks.find(shapes)
    seen: dict[tuple[str, ...], int] = {}
    for block in found:
        assert block.family is not None, block
        assert not block.unknown
        assert not block.also
        block.read(state, 3)  # every array of it fits
        row = (block.layout.name, *block.family)
        seen[row] = seen.get(row, 0) + 1
    assert sorted((*row, count) for row, count in seen.items()) == sorted(expected)
    assert damaged_blocks.describe(shapes, found) == []


@pytest.mark.filterwarnings("default")
def test_families_that_need_their_configuration_are_refused_by_name(tmp_path: Path) -> None:
    """The configuration of Gemma 2 says how its blocks compute."""
    import transformers as t

    some = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2, "vocab_size": 11}
    gemma = {**some, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 8}
    model = t.Gemma2ForCausalLM(t.Gemma2Config(**gemma))
    reason = r"its scale \(query_pre_attn_scalar \*\* -0.5\) and soft cap"
    state = {key: to_numpy(tensor) for key, tensor in model.state_dict().items()}
    shapes: Shapes = {key: array.shape for key, array in state.items()}
    found = attention_blocks.find(shapes)
    assert [block.family and block.family[0] for block in found] == ["Gemma 2"] * 2
    message = rf"layers\.0\.self_attn is of Gemma 2: .*{reason}"
    with pytest.raises(ValueError, match=message):
        found[0].read(state, 3)
    assert re.search(message, damaged_blocks.describe(shapes, found)[0])
    checkpoint.write(tmp_path / "a.npz", state)
    with pytest.raises(ValueError, match=message):
        pipeline.convert(tmp_path / "a.npz", tmp_path / "b.npz", to="flax", num_heads=3)
    with pytest.raises(ValueError, match=message):
        comparison.compare(tmp_path / "a.npz", tmp_path / "a.npz", num_heads=3)
    assert re.search(message, pipeline.inspect(tmp_path / "a.npz", num_heads=3).damaged[0])


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("keys", [1, 3])
def test_every_packing_of_falcon_is_read(keys: int) -> None:
    """One head of keys, and groups of queries with a key and a value each."""
    import transformers as t

    grouped = {"new_decoder_architecture": True, "num_kv_heads": keys} if keys > 1 else {}
    heads = 6
    model = t.FalconForCausalLM(
        t.FalconConfig(
            hidden_size=24, num_attention_heads=heads, num_hidden_layers=1, vocab_size=20, **grouped
        )
    )
    state = {key: to_numpy(tensor) for key, tensor in model.state_dict().items()}
    (block,) = attention_blocks.find({key: array.shape for key, array in state.items()})
    assert block.family == ("Falcon", "h.{i}.self_attention")
    params, _ = block.read(state, heads)
    packed = model.transformer.h[0].self_attention.query_key_value.weight
    theirs = model.transformer.h[0].self_attention._split_heads(packed.T[None])
    for mine, other in zip(params[:3], theirs, strict=True):
        width = np.shape(mine.kernel)[1]
        given = to_numpy(other.detach())[0].reshape(24, -1, 4)
        given = given[:, :: given.shape[1] // width]  # Falcon repeats a head for its queries
        np.testing.assert_array_equal(mine.kernel, given)


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
    layout = huggingface.GPT2
    state = transform.export_params(layout, params_of(layout), prefix="h.0.attn")
    state["h.0.attn.bias"] = np.ones((1, 1, 5, 5), np.float32)  # known next to attention
    state["h.0.attn.gate"] = np.ones(5, np.float32)
    (block,) = attention_blocks.find({key: array.shape for key, array in state.items()})
    assert block.unknown == ("h.0.attn.gate",)
    with pytest.raises(ValueError, match=r"unknown key 'h.0.attn.gate' in the block: layout gpt2"):
        block.read(state, N)
    del state["h.0.attn.gate"]
    (block,) = attention_blocks.find({key: array.shape for key, array in state.items()})
    assert block.read(state, N)[0].query.kernel.shape[-2] == N


def test_head_count_of_a_block_goes_before_that_of_the_file() -> None:
    a, b = attention_blocks.find(shapes_of(huggingface.GPT2, "a", "b"))
    shapes = shapes_of(huggingface.GPT2, "a", "b")
    metadata = {head_count.METADATA: "3", f"{head_count.METADATA}.b": "2"}
    config = head_count.Configured(
        Path("config.json"), (head_count.Count(6, "config.json: n_head"),)
    )
    assert head_count.find(a, shapes, None, metadata, config) == (3, "metadata")
    assert head_count.find(b, shapes, None, metadata, config) == (2, "metadata")
    assert head_count.find(b, shapes, 2, metadata, config) == (2, "given")
    with pytest.raises(ValueError, match="num_heads=4 is given, and metadata says 2"):
        head_count.find(b, shapes, 4, metadata, config)
    assert (
        head_count.find(b, shapes, None, {head_count.METADATA: "x"}, config) == config.counts[0][:2]
    )
    assert head_count.find(b, shapes)[0] is None


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"num_heads": 3}, (3, "config.json: num_heads")),
        ([{"num_heads": 3}, {"x": [{"n_head": 3}]}], (3, "config.json: num_heads")),
        ({"num_heads": None}, None),
        ([], None),
        (3, None),
        (json.loads('{"a": [' * 250 + "3" + "]}" * 250), None),
    ],
)
def test_config_next_to_the_file(content: Any, expected: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = head_count.in_config(tmp_path / "model.pt")
    assert (found and found.of("h.0.attn")) == expected
    assert head_count.in_config(tmp_path / "elsewhere" / "model.pt") is None


def test_a_config_that_is_no_plain_file_is_not_opened(tmp_path: Path) -> None:
    """A FIFO would block, a sparse file fill the memory."""
    config, model = tmp_path / "config.json", tmp_path / "model.pt"
    config.touch()
    os.truncate(config, 2**40)
    found = head_count.in_config(model)
    assert found is not None
    assert "1,099,511,627,776" in found.wrong
    config.unlink()
    os.mkfifo(config)
    found = head_count.in_config(model)
    assert found is not None
    assert "a FIFO" in found.wrong
    with pytest.raises(ValueError, match="a FIFO"):
        hf_config.refuse_behaviour(model)
    assert hf_config.epsilons(model) == {}


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ("{", "cannot be read as JSON (JSONDecodeError: "),
        ("\udc80", "cannot be read as JSON (UnicodeDecodeError: "),
        ("[" * 100_000, "cannot be read as JSON (RecursionError: "),
        ('{"num_heads": 0}', "has an impossible head count (config.json: num_heads is 0)"),
        ('{"num_heads": true}', "has an impossible head count (config.json: num_heads is True)"),
        ('{"num_heads": "3"}', "has an impossible head count (config.json: num_heads is '3')"),
        (
            '{"a": {"num_heads": [2, -4]}}',
            "has an impossible head count (config.json: a: num_heads is [2, -4])",
        ),
        ('{"num_heads": -3}', "has an impossible head count (config.json: num_heads is -3)"),
    ],
)
def test_an_unusable_config_is_reported(content: str, wrong: str, tmp_path: Path) -> None:
    """Where the head count is needed; a layout that stores it is read all the same."""
    for name in ("gpt2", "flax"):
        layout = attention_blocks.named(name)
        state = transform.export_params(
            layout, params_of(layout), layout.semantics, prefix="h.0.attn"
        )
        checkpoint.write(tmp_path / f"{name}.npz", state)
    (tmp_path / "config.json").write_text(content, errors="surrogateescape")
    printed = re.escape(f"{tmp_path / 'config.json'} {wrong}")
    unread = "cannot be read" in wrong
    remedy = f"correct it, or {'move it away' if unread else 'pass num_heads= or --num-heads'}"
    with pytest.raises(ValueError, match=rf"(?s){printed}.*[:;] {remedy}"):
        pipeline.convert(tmp_path / "gpt2.npz", tmp_path / "out.npz", to="linear")
    (info,) = pipeline.inspect(tmp_path / "gpt2.npz").blocks
    assert info.num_heads is None
    assert wrong in info.num_heads_from
    (info,) = pipeline.inspect(tmp_path / "gpt2.npz", num_heads=N).blocks
    assert (info.num_heads, info.num_heads_from) == (N, "given")
    (info,) = pipeline.inspect(tmp_path / "flax.npz").blocks
    assert (info.num_heads, info.num_heads_from) == (N, "shape")


def test_a_head_count_that_does_not_divide_is_reported(tmp_path: Path) -> None:
    layout = attention_blocks.named("gpt2")
    state = transform.export_params(layout, params_of(layout), prefix="h.0.attn")
    checkpoint.write(tmp_path / "a.npz", state)
    message = r"h\.0\.attn\.c_attn\.weight: expected axes .* N=5, got shape \(13, 72\)"
    with pytest.raises(ValueError, match=rf"a\.npz: {message}"):
        pipeline.inspect(tmp_path / "a.npz", num_heads=5)
    done = CliRunner().invoke(app.app, ["inspect", str(tmp_path / "a.npz"), "--num-heads", "5"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert re.search(message, done.stderr)
    (tmp_path / "config.json").write_text('{"n_head": 5}')
    (info,) = pipeline.inspect(tmp_path / "a.npz").blocks
    assert info.num_heads is None
    assert "config.json does not describe these tensors (n_head is 5" in info.num_heads_from


def test_config_is_read_once_per_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = huggingface.GPT2
    state: dict[str, Any] = {}
    for i in range(3):
        state |= transform.export_params(layout, params_of(layout, seed=i), prefix=f"h.{i}.attn")
    checkpoint.write(tmp_path / "a.npz", state)
    (tmp_path / "config.json").write_text(json.dumps({"n_head": N}))
    calls = []
    real = head_count.in_config

    def counted(path: Path) -> head_count.Configured | None:
        calls.append(path)
        return real(path)

    monkeypatch.setattr(head_count, "in_config", counted)
    infos = pipeline.inspect(tmp_path / "a.npz").blocks
    assert [info.num_heads for info in infos] == [N] * 3
    assert len(calls) == 1
    pipeline.convert(tmp_path / "a.npz", tmp_path / "b.npz", to="linear")
    assert len(calls) == 2
    assert comparison.compare(tmp_path / "a.npz", tmp_path / "b.npz").same
    assert len(calls) == 4
