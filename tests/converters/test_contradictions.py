"""A config.json of another model than the tensors next to it decides nothing."""

import json
import re
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t

from jaxmha.converters.discovery import (
    attention_blocks,
    contradictions,
    head_count,
    hf_config,
)
from jaxmha.converters.migrate import pipeline, plan_toml
from jaxmha.converters.verify import comparands, load_block
from tests.converters.command_line import cli, printed, succeeds
from tests.converters.test_every_layout import exported, model_file

N, D, LAYERS = 6, 24, 2
OTHER = 4  # also divides the width


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A torch encoder, whose file says nothing of heads."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(D, N, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    path = tmp_path_factory.mktemp("encoder") / "mine.pt"
    torch.save(model.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BERT with its configuration."""
    folder = tmp_path_factory.mktemp("bert")
    sizes = {"hidden_size": D, "num_hidden_layers": LAYERS, "intermediate_size": 32}
    config = t.BertConfig(num_attention_heads=N, vocab_size=31, **sizes)
    t.BertModel(config).save_pretrained(folder)
    return folder / "model.safetensors"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama with fewer key heads, with its configuration."""
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": D, "num_hidden_layers": LAYERS, "intermediate_size": 32}
    config = t.LlamaConfig(
        num_attention_heads=N, num_key_value_heads=3, vocab_size=31, head_dim=D // N, **sizes
    )
    t.LlamaModel(config).save_pretrained(folder)
    return folder / "model.safetensors"


def copied_to(source: Path, folder: Path, config: Any) -> Path:
    """A copy of a checkpoint next to a configuration."""
    path = folder / source.name
    shutil.copy(source, path)
    (folder / "config.json").write_text(json.dumps(config))
    return path


def own(source: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((source.parent / "config.json").read_text())
    return config


AS_BERT = {"num_attention_heads": OTHER, "layer_norm_eps": 1e-12}
UNLIKE: list[tuple[str, dict[str, Any], str]] = [
    ("encoder", AS_BERT | {"hidden_size": 64}, "hidden_size is 64, and layers.0.self_attn has 24"),
    ("encoder", AS_BERT | {"d_model": 48}, "d_model is 48, and layers.0.self_attn has 24 features"),
    ("encoder", AS_BERT | {"model_type": "bert"}, "model_type is bert, and the tensors are named"),
    ("encoder", AS_BERT | {"model_type": "gpt2"}, "model_type is gpt2, and the tensors are named"),
    ("encoder", AS_BERT | {"model_type": "llama"}, "named as nn.Transformer has them"),
    ("encoder", AS_BERT | {"num_hidden_layers": 12}, "num_hidden_layers is 12, and layers.{i} has 2"),
    ("encoder", AS_BERT | {"intermediate_size": 64}, "is 64, and layers.0.linear1.weight has shape"),
    ("encoder", {"num_attention_heads": 5}, "num_attention_heads is 5, and layers.0.self_attn has"),
    ("encoder", AS_BERT | {"head_dim": 8}, "head_dim is 8, and layers.0.self_attn has 6 features"),
    ("encoder", AS_BERT | {"num_key_value_heads": 2}, "num_key_value_heads is 2, and"),
    ("encoder", {"model": AS_BERT | {"hidden_size": 64}}, "hidden_size is 64, and"),
    ("bert", {"vocab_size": 100}, "vocab_size is 100, and embeddings.word_embeddings.weight"),
    ("bert", {"hidden_size": 48, "num_attention_heads": OTHER}, "hidden_size is 48, and encoder."),
    ("bert", {"intermediate_size": 48}, "intermediate_size is 48, and encoder.layer.0.intermediate"),
    ("bert", {"num_hidden_layers": 1}, "num_hidden_layers is 1, and encoder.layer.{i} has 2"),
    ("bert", {"model_type": "whisper"}, "model_type is whisper, and the tensors are named as BERT"),
    ("llama", {"num_key_value_heads": 6}, "num_key_value_heads is 6, and layers.0.self_attn has 3"),
    ("llama", {"head_dim": 8}, "head_dim is 8, and layers.0.self_attn has 4 features in a head"),
]  # fmt: skip


@pytest.mark.slow_variants(
    "encoder-*",
    "bert-*",
    "!encoder-change[027]-*",
    "!encoder-change9-*",
    "llama-change17*",
    "!bert-change11*",
    "!encoder-change5-*",
)
@pytest.mark.parametrize(("model", "change", "reported"), UNLIKE)
def test_a_configuration_that_contradicts_the_tensors_is_set_aside(
    model: str,
    change: dict[str, Any],
    reported: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    original: Path = request.getfixturevalue(model)
    config = change if model == "encoder" else own(original) | change
    source, target = copied_to(original, tmp_path, config), tmp_path / "a.safetensors"
    with pytest.raises(
        ValueError, match=rf"config.json does not describe.*{re.escape(reported)}.*--num-heads"
    ):
        pipeline.convert(source, target, to="flax")
    info = pipeline.inspect(source)
    assert {block.num_heads for block in info.blocks} == {None}
    assert any(reported in note for note in info.notes)
    done = pipeline.convert(source, target, to="flax", num_heads=N)
    assert {(count, where) for _, count, where in done.heads} == {(N, "given")}
    assert any("config.json was set aside" in note and reported in note for note in done.notes)
    assert not any("1e-12" in note for note in done.notes)
    plan = pipeline.plan(source, to="flax", num_heads=N)[0]
    by_plan = pipeline.convert(source, tmp_path / "b.npz", plan=plan)
    assert {where for *_, where in by_plan.heads} <= {"given", "plan"}
    for read in (comparands.read, load_block.read):
        with pytest.raises(ValueError, match=r"does not describe"):
            read(source)


def test_a_configuration_that_fits_is_used_and_named(
    bert: Path, llama: Path, encoder: Path, tmp_path: Path
) -> None:
    for source in (bert, llama):
        done = cli("convert", source, tmp_path / "a.npz", "--to", "flax", "--force")
        assert "heads 6 (config.json: num_attention_heads): 2 blocks" in printed(done), printed(
            done
        )
        assert {block.confidence for block in pipeline.inspect(source).blocks} == {"certain"}
        data = cli(
            "convert", source, tmp_path / "b.npz", "--to", "flax", "--json", "--force"
        ).stdout
        (first, *_) = json.loads(data)["heads"]
        assert first[1:] == [N, "config.json: num_attention_heads"]
        text = plan_toml.dumps(pipeline.plan(source, to="flax")[0])
        assert "# num_heads: from config.json: num_attention_heads" in text
    source = copied_to(encoder, tmp_path, {"num_attention_heads": N})
    assert {block.confidence for block in pipeline.inspect(source).blocks} == {"likely"}
    assert {x.confidence for x in pipeline.inspect(encoder, num_heads=N).blocks} == {"certain"}


@pytest.mark.parametrize("name", ["ViT", "DeiT", "IJepa"])
def test_vision_models_keep_the_names_of_older_versions(name: str, tmp_path: Path) -> None:
    """transformers 5 writes them as version 4 named them: no other model's configuration."""
    sizes = {"hidden_size": D, "num_hidden_layers": 1, "intermediate_size": 32}
    config = getattr(t, f"{name}Config")(num_attention_heads=N, image_size=4, patch_size=2, **sizes)
    getattr(t, f"{name}Model")(config).save_pretrained(tmp_path)
    done = pipeline.convert(tmp_path, tmp_path / "a.npz", to="flax")
    assert done.heads == ((*done.heads[0][:1], N, "config.json: num_attention_heads"),)


def test_inspect_says_each_note_once(llama: Path) -> None:
    assert printed(succeeds("inspect", llama)).count("note: not converted: rotary positions") == 1


def test_where_every_head_count_is_from(bert: Path, tmp_path: Path) -> None:
    kept = tmp_path / "torch.safetensors"
    pipeline.convert(bert, kept, to="linear")
    assert {where for *_, where in pipeline.convert(kept, tmp_path / "a.npz", to="flax").heads} == {
        "metadata"
    }
    again = pipeline.convert(tmp_path / "a.npz", tmp_path / "b.npz", to="linear")
    assert {where for *_, where in again.heads} == {"shape"}
    plan = plan_toml.loads(plan_toml.dumps(pipeline.plan(kept, to="flax")[0]))
    done = pipeline.convert(kept, tmp_path / "c.npz", plan=plan)
    assert {(count, where) for _, count, where in done.heads} == {(N, "plan")}


def test_a_plan_that_contradicts_is_refused(bert: Path, tmp_path: Path) -> None:
    plan = pipeline.plan(bert, to="flax")[0]
    for count, reported in ((OTHER, "a head count of 4 is given"), (5, "N=5")):
        steps = tuple(
            replace(m, num_heads=count) if m.kind == "attention" else m for m in plan.steps
        )
        with pytest.raises(ValueError, match=reported):
            pipeline.convert(bert, tmp_path / "a.npz", plan=replace(plan, steps=steps))


def test_a_file_that_was_converted_keeps_its_configuration(bert: Path, tmp_path: Path) -> None:
    """The advice of the note: a config.json stands next to a file that holds no head count."""
    pipeline.convert(bert, tmp_path / "made.npz", to="torch")
    with np.load(tmp_path / "made.npz") as arrays:  # without our metadata, which has the heads
        np.savez(tmp_path / "a.npz", **arrays)
    (tmp_path / "config.json").write_text(json.dumps(own(bert)))
    done = pipeline.convert(tmp_path / "a.npz", tmp_path / "b.npz", to="flax")
    assert {where for *_, where in done.heads} == {"config.json: num_attention_heads"}
    assert not any("set aside" in note for note in done.notes)


def contradicted(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """The contradictions between a configuration and tensors of these shapes."""
    counts = [
        head_count._count("config.json", way, (x,))
        for way, x in hf_config.search(config, head_count.CONFIG_KEYS)
        if isinstance(x, int)
    ]
    configured = head_count.Configured(Path("config.json"), tuple(counts))
    return contradictions.find(config, configured, attention_blocks.find(shapes), shapes)


def test_towers_of_other_widths_keep_their_configurations() -> None:
    """A part that is not said of is not judged by the other's sizes."""
    config = {
        "text_config": {"hidden_size": 24, "num_attention_heads": 6, "head_dim": 4},
        "vision_config": {"hidden_size": 16, "num_heads": 4},
    }
    shapes = {
        f"{tower}.layers.0.self_attn.{which}_proj.{kind}": (width,) * (1 + (kind == "weight"))
        for tower, width in (("language_model", 24), ("visual", 16))
        for which in ("q", "k", "v", "out")
        for kind in ("weight", "bias")
    }
    assert len(attention_blocks.find(shapes)) == 2
    assert contradicted(config, shapes) == []
    wrong = config | {"vision_config": {"hidden_size": 24, "num_heads": 4}}
    (reported,) = contradicted(wrong, shapes)
    assert "visual.layers.0.self_attn has 16 features" in reported


Shapes = dict[str, tuple[int, ...]]
TWO_LAYERS: Shapes = {
    f"layers.{i}.self_attn.{x}_proj.weight": (D, D) for i in range(2) for x in ("q", "k", "v", "o")
}
PACKED: Shapes = {
    "h.0.self_attention.query_key_value.weight": (3 * D, D),
    "h.0.self_attention.dense.weight": (D, D),
}
FALCON: dict[str, Any] = {
    "model_type": "falcon",
    "new_decoder_architecture": False,
    "num_kv_heads": 3,
}
ONE_KEY_HEAD = PACKED | {"h.0.self_attention.query_key_value.weight": (D + 2 * D // N, D)}
AGREEING: dict[str, tuple[dict[str, Any], Shapes]] = {
    "a row for padding": ({"vocab_size": 31}, {"embed_tokens.weight": (32, D)}),
    "a row for each of two vocabularies": (
        {"vocab_size": 31, "audio_vocab_size": 11},
        {"embed_tokens.weight": (42, D)},
    ),
    "a packed gate": ({"intermediate_size": 32}, {"layers.0.mlp.fc1.weight": (64, D)}),
    "one layer less": ({"num_hidden_layers": 6, "decoder_layers": 3}, {}),
    "Falcon 40B's key heads in 7B": (FALCON | {"multi_query": False}, PACKED),
    "one key head": (
        {"model_type": "falcon", "multi_query": True, "num_kv_heads": 3},
        ONE_KEY_HEAD,
    ),
}


@pytest.mark.parametrize("name", AGREEING)
def test_sizes_that_only_seem_to_differ(name: str) -> None:
    config, more = AGREEING[name]
    shapes = more if config.get("model_type") else TWO_LAYERS | more
    assert contradicted({"hidden_size": D, "num_attention_heads": N} | config, shapes) == []


def test_rows_of_one_projection_are_counted() -> None:
    """Not all rows of the packed three, which 3 heads would divide."""
    packed = "gpt_neox.layers.0.attention."
    shapes: Shapes = {
        f"{packed}query_key_value.weight": (48, 16),
        f"{packed}dense.weight": (16, 16),
    }
    config = {"model_type": "gpt_neox", "hidden_size": 16, "num_attention_heads": 3}
    (reported,) = contradicted(config, shapes)
    assert (
        reported
        == "num_attention_heads is 3, and gpt_neox.layers.0.attention has 16 rows of queries"
    )


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_an_archive_that_contradicts_itself_is_set_aside(tmp_path: Path) -> None:
    import keras

    inputs = keras.Input((7, D))
    attended = keras.layers.MultiHeadAttention(N, D // N, name="attn")(inputs, inputs)
    out = keras.layers.LayerNormalization(epsilon=1e-9, name="norm")(attended)
    keras.Model(inputs, keras.layers.Dense(5, name="head")(out)).save(tmp_path / "a.keras")
    done = pipeline.plan(tmp_path / "a.keras", to="flax")[0]
    assert any("epsilon is 1e-09 (the archive's config.json)" in note for note in done.notes)
    for old, new, reported in (
        ('"num_heads": 6', '"num_heads": 4', "num_heads of attn is 4, and layers/multi_head"),
        ('"units": 5', '"units": 9', "units of head is 9, and layers/dense/vars/0 has shape"),
    ):
        with (
            zipfile.ZipFile(tmp_path / "a.keras") as archive,
            zipfile.ZipFile(tmp_path / "b.keras", "w") as other,
        ):
            for name in archive.namelist():
                raw = archive.read(name)
                if name == "config.json":
                    assert old.encode() in raw
                    raw = raw.replace(old.encode(), new.encode())
                other.writestr(name, raw)
        plan = pipeline.plan(tmp_path / "b.keras", to="flax")[0]
        assert any("was set aside" in note and reported in note for note in plan.notes)
        assert not any("1e-09" in note for note in plan.notes)


def test_a_number_in_a_wrong_place_is_no_crash(encoder: Path, tmp_path: Path) -> None:
    for config in (
        {"model_type": ["bert"], "num_attention_heads": N, "hidden_size": "x", "vocab_size": None},
        {"hidden_size": True, "num_attention_heads": N, "layers": {"a": [[]]}},
        [1, 2],
        {"text_config": {"text_config": [{"num_attention_heads": N}]}},
    ):
        pipeline.inspect(copied_to(encoder, tmp_path, config))


def test_the_epsilon_of_parts_is_reported_of_each(bert: Path, tmp_path: Path) -> None:
    config = own(bert)
    source = copied_to(bert, tmp_path, config | {"other_config": {"layer_norm_eps": 1e-7}})
    (note, *_) = [n for n in pipeline.plan(source, to="flax")[0].notes if "epsilon" in n]
    assert "epsilon is 1e-12 or 1e-07" in note
    assert "each part of the model has its own" in note


def test_an_epsilon_that_was_not_read_is_not_stated(encoder: Path, tmp_path: Path) -> None:
    (note,) = [n for n in pipeline.plan(encoder, to="flax", num_heads=N)[0].notes if "epsilon" in n]
    assert "epsilon is not known" in note
    assert "It is 1e-05 if it is the default of torch, and 1e-06 by default in flax" in note


@pytest.mark.parametrize("model_type", ["vit", "deit", "ijepa", "dinov2"])
def test_names_on_disk_are_of_the_type_too(model_type: str, tmp_path: Path) -> None:
    """transformers 5 renames these models' tensors in memory, and back when it saves them."""
    config = {"model_type": model_type, "num_heads": N}
    model_file(tmp_path / "a.npz", exported("vit", "encoder.layer.0.attention"), config)
    assert pipeline.inspect(tmp_path / "a.npz").notes == ()
    pipeline.convert(tmp_path / "a.npz", tmp_path / "b.npz", to="flax")
