"""Facts of a config.json that no tensor holds: head counts of parts, and what changes a function."""

import importlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.converters.discovery import head_count, hf_config, other_layers
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.verify import load_block
from tests.converters.command_line import cli, message, succeeds
from tests.converters.test_every_layout import exported, model_file
from tests.converters.test_families import state_of

D, TEXT, VISION = 15, 3, 5  # both counts divide the width
TOWERS = {"text_config": {"n_heads": 8}, "vision_config": {"n_heads": 12}}
SIDES = {"encoder_attention_heads": 8, "decoder_attention_heads": 12}


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two towers with different head counts, saved with its configuration."""
    import transformers as t

    sizes = {"hidden_size": D, "num_hidden_layers": 1, "intermediate_size": 22}
    ids = {"vocab_size": 31, "bos_token_id": 1, "eos_token_id": 2}
    image = {"image_size": 8, "patch_size": 4}
    config = t.CLIPConfig(
        text_config={**sizes, **ids, "num_attention_heads": TEXT},
        vision_config={**sizes, **image, "num_attention_heads": VISION},
    )
    return model_file(
        tmp_path_factory.mktemp("clip") / "model.safetensors",
        state_of(t.CLIPModel(config)),
        config.to_dict(),
    )


def test_towers_have_their_own_head_counts(clip: Path, tmp_path: Path) -> None:
    target = tmp_path / "a.safetensors"
    succeeds("convert", clip, target, "--to", "flax")
    with checkpoint.open(target) as file:
        for tower, N in (("text", TEXT), ("vision", VISION)):
            name = f"{tower}_model/encoder/layers/0/self_attn/query/kernel"
            assert file[name].shape == (D, N, D // N)
    assert [info.num_heads for info in pipeline.inspect(clip).blocks] == [TEXT, VISION]


def test_a_conversion_reads_the_configuration_once(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of the file is seen by the next call."""
    seen: list[Path] = []

    def read(path: Path, of: Any = hf_config._read) -> Any:
        seen.append(path)
        return of(path)

    monkeypatch.setattr(hf_config, "_read", read)
    source = shutil.copytree(clip.parent, tmp_path / "a") / clip.name
    pipeline.convert(source, tmp_path / "made.safetensors", to="flax")
    pipeline.plan(source, to="flax")
    assert len(seen) == 2
    config = json.loads((source.parent / "config.json").read_text())
    config["vision_config"]["num_attention_heads"] = TEXT
    (source.parent / "config.json").write_text(json.dumps(config))
    assert [info.num_heads for info in pipeline.inspect(source).blocks] == [TEXT, TEXT]
    assert len(seen) == 3


def test_one_head_count_is_not_that_of_two_towers(clip: Path, tmp_path: Path) -> None:
    for N, tower, own in ((TEXT, "vision", VISION), (VISION, "text", TEXT), (1, "text", TEXT)):
        done = cli("convert", clip, tmp_path / "a.npz", "--to", "flax", "--num-heads", N)
        assert done.exit_code == 2
        assert f"a head count of {N} is given" in message(done)
        assert f"{tower}_config: num_attention_heads says {own}" in message(done)
        assert "write a plan and set num_heads for each module" in message(done)
    made = pipeline.plan(clip, to="flax")[0]
    wrong = [replace(m, num_heads=TEXT) if m.source.startswith("vision") else m for m in made.steps]
    with pytest.raises(ValueError, match=r"block vision_model.*a head count of 3 is given"):
        pipeline.convert(clip, tmp_path / "a.npz", plan=replace(made, steps=tuple(wrong)))
    assert not list(tmp_path.iterdir())


def assert_planned(source: Path, folder: Path, towers: dict[str, int]) -> None:
    """Asserts that a plan drafted with the count of text converts each tower with its own."""
    plan = folder / "plan.toml"
    assert cli("plan", source, "--to", "flax", "--num-heads", TEXT, "-o", plan).exit_code == 0
    succeeds("convert", source, folder / "a.npz", "--plan", plan)
    with checkpoint.open(folder / "a.npz") as file:
        for tower, N in towers.items():
            assert file[f"{tower}/encoder/layers/0/self_attn/query/kernel"].shape[-2] == N


def test_a_plan_gives_each_block_its_count(clip: Path, tmp_path: Path) -> None:
    """The names of the towers say nothing, so that a conversion cannot know."""
    with checkpoint.open(clip) as file:
        state = {name.replace("text_model", "left"): file[name] for name in file}
    source, plan = tmp_path / "model.safetensors", tmp_path / "plan.toml"
    checkpoint.write(source, state)
    config = json.loads((clip.parent / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = cli("convert", source, tmp_path / "a.npz", "--to", "flax")
    assert done.exit_code == 2
    assert "none of them belongs to left.encoder.layers.0.self_attn" in message(done)
    assert "write a plan and set num_heads for each module" in message(done)
    refused = cli("plan", source, "--to", "flax", "--num-heads", 1, "-o", plan)
    assert refused.exit_code == 2
    assert_planned(source, tmp_path, {"left": TEXT, "vision_model": VISION})


@pytest.mark.parametrize(
    ("config", "prefix", "expected"),
    [
        (TOWERS, "vision_tower.vision_model.encoder.layers.3.self_attn", 12),
        (TOWERS, "language_model.layers.3.self_attn", 8),
        (TOWERS, "model.visual.blocks.3.attn", 12),
        (TOWERS, "texture.layers.3.self_attn", None),
        (TOWERS | {"n_heads": 5}, "layers.3.self_attn", None),
        (TOWERS | {"n_heads": 5}, "text_model.layers.3.self_attn", 8),
        (SIDES, "model/decoder/layers/3/encoder_attn", 12),
        (SIDES, "model.encoder.layers.3.self_attn", 8),
        (SIDES, "layers.3.encoder_attn", None),
        ({"encoder": SIDES, "decoder": {"n_head": 6}}, "decoder.bert.encoder.layer.3.attention", 6),
        ({"encoder": SIDES, "decoder": {"n_head": 6}}, "encoder.model.decoder.layers.3.attn", 12),
        ({"n_head": 3, "num_heads": 4}, "h.3.attn", None),
        ({"a": {"n_head": 3}, "b": {"n_head": 3}}, "h.3.attn", 3),
        # Said of one part alone: others may rely on a default.
        ({"vision_config": {"n_head": 3}}, "vision_tower.encoder.layers.3.attn", 3),
        ({"vision_config": {"n_head": 3}, "text_config": {}}, "language_model.layers.3.attn", None),
        ({"decoder": {"n_head": 3}}, "encoder.layers.3.attn", None),
        ({"decoder_attention_heads": 3}, "encoder.layers.3.attn", None),
        ({"n_head": 3, "decoder_num_attention_heads": 4}, "vit.decoder.layers.3.attn", 4),
        ({"model": {"n_head": 3}}, "h.3.attn", 3),
        (TOWERS | {"vision_config": {"n_head": 8}}, "layers.3.self_attn", 8),
    ],
)  # fmt: skip
def test_parts_of_a_model(
    config: dict[str, Any], prefix: str, expected: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = head_count.in_config(tmp_path / "model.pt")
    assert found is not None
    assert found.of(prefix)[0] == expected


def test_a_plan_completes_what_a_config_says_of_one_part(clip: Path, tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    shutil.copy(clip, source)
    config = {"vision_config": {"num_attention_heads": VISION}, "text_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = cli("convert", source, tmp_path / "a.npz", "--to", "flax")
    assert (done.exit_code, "write a plan" in message(done)) == (2, True)
    assert_planned(source, tmp_path, {"text_model": TEXT, "vision_model": VISION})


def test_a_count_that_is_none_of_several_is_refused(tmp_path: Path) -> None:
    config = {"a": {"n_head": 3}, "num_heads": 6}
    model_file(tmp_path / "a.npz", exported("gpt2", "h.0.attn"), config)
    several = (
        r"has several head counts \(config.json: a: n_head is 3, config.json: num_heads is 6\)"
    )
    for given in (None, 2):
        with pytest.raises(ValueError, match=rf"{several}.*write a plan and set num_heads"):
            pipeline.convert(tmp_path / "a.npz", tmp_path / "b.npz", to="flax", num_heads=given)
    done = pipeline.convert(tmp_path / "a.npz", tmp_path / "b.npz", to="flax", num_heads=3)
    assert done.plan is not None
    assert [step.num_heads for step in done.plan.steps] == [3]


def llama(path: Path, config: dict[str, Any]) -> None:
    """Attention and a norm as Llama has them, next to a configuration."""
    state = exported("llama", "model.layers.0.self_attn")
    state["model.norm.weight"] = np.arange(13, dtype=np.float32)
    model_file(path, state, {"num_attention_heads": 6} | config)


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({"clip_qkv": 8.0}, "clip_qkv=8.0: .*set Semantics"),
        ({"attn_config": {"clip_qkv": 6}}, "clip_qkv=6: .*set Semantics"),
        ({"text_config": {"use_qk_norm": True}}, "use_qk_norm=True: .*between jaxmha.project"),
        ({"attn_temperature_tuning": 4}, "attn_temperature_tuning=4: .*between jaxmha.project"),
    ],
)
def test_what_changes_attention_is_refused(
    config: dict[str, Any], shown: str, tmp_path: Path
) -> None:
    llama(tmp_path / "a.npz", config)
    expected = "it changes attention and is in no tensor, and is not read for this model_type"
    with pytest.raises(ValueError, match=expected):  # no file of another layout is written here
        load_block.read(tmp_path / "a.npz")
    with pytest.raises(ValueError, match=expected) as refused:
        pipeline.convert(tmp_path / "a.npz", tmp_path / "b.npz", to="flax")
    assert re.search(rf"has {shown}", str(refused.value))
    llama(tmp_path / "c.npz", {"clip_qkv": None, "use_qk_norm": False, "n": [{"clip_qkv": None}]})
    pipeline.convert(tmp_path / "c.npz", tmp_path / "b.npz", to="flax")


def test_norms_that_multiply_by_more_are_not_understood(tmp_path: Path) -> None:
    llama(tmp_path / "a.npz", {"model_type": "gemma"})
    done = pipeline.convert(tmp_path / "a.npz", tmp_path / "b.npz", to="flax")
    assert done.carried == ("model.norm.weight",)
    (note,) = (x for x in done.notes if "carried over" in x)
    assert re.match(r"1 x .* as it is: model_type gemma of config.json: .* 1 \+ weight", note)
    with pytest.raises(ValueError, match=r"model.norm.weight \(model_type gemma .* 1 \+ weight"):
        pipeline.convert(tmp_path / "a.npz", tmp_path / "c.npz", to="flax", others="refuse")
    assert "1 + weight" in pipeline.inspect(tmp_path / "a.npz").not_understood["model.norm.weight"]
    (tmp_path / "config.json").write_text('{"num_attention_heads": 6, "model_type": "llama"}')
    assert pipeline.convert(tmp_path / "a.npz", tmp_path / "d.npz", to="flax").carried == ()


def test_norms_with_a_bias_are_others_than_those_without() -> None:
    """A vision tower next to Gemma has ordinary ones."""
    info = {f"n.{key}": np.zeros(5, np.float32) for key in ("weight", "bias")}
    assert other_layers.find(info, [], {"rmsnorm": "why"})[1] == {}
    assert other_layers.find(info, [], {"norm": "why"})[1] == dict.fromkeys(info, "why")


@pytest.mark.parametrize(
    ("model_type", "class_name", "kinds"),
    [
        ("gemma", "GemmaRMSNorm", {"rmsnorm"}),
        ("gemma2", "Gemma2RMSNorm", {"rmsnorm"}),
        ("gemma3", "Gemma3RMSNorm", {"rmsnorm"}),
        ("recurrent_gemma", "RecurrentGemmaRMSNorm", {"rmsnorm"}),
        ("t5gemma", "T5GemmaRMSNorm", {"rmsnorm"}),
        ("vaultgemma", "VaultGemmaRMSNorm", {"rmsnorm"}),
        ("qwen3_next", "Qwen3NextRMSNorm", {"rmsnorm"}),
        ("nemotron", "NemotronLayerNorm1P", {"rmsnorm", "norm"}),
        ("moonshine_streaming", "MoonshineStreamingLayerNorm", {"rmsnorm", "norm"}),
        ("llama", "LlamaRMSNorm", set()),
        ("gemma3n", "Gemma3nRMSNorm", set()),
    ],
)
def test_which_models_have_such_norms(
    model_type: str, class_name: str, kinds: set[str], tmp_path: Path
) -> None:
    """With a weight of 0 only these give anything."""
    import torch

    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    norm = getattr(module, class_name)(5)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.zero_()
        given = bool(norm(torch.ones(2, 5) + torch.arange(5)).any())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert (given, set(hf_config.offset_norms(tmp_path / "a.pt"))) == (bool(kinds), kinds)
