"""inspect, plan and convert name or refuse the parts that a model adds around its projections."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha.converters.discovery import architectures, head_count, signs, unconverted, unlike
from jaxmha.converters.migrate import pipeline
from tests.converters.command_line import cli, succeeds
from tests.converters.test_every_layout import N, exported, model_file


def source(folder: Path, config: Any, layout: str = "linear", **more: Any) -> Path:
    """One block, other tensors, and a configuration; None: without one."""
    config = config if config is None else {"num_attention_heads": N} | config
    return model_file(folder / "a.npz", exported(layout, "body.0.mixer") | more, config)


def notes(path: Path, to: str = "linear") -> list[str]:
    """The notes that all three give alike."""
    target = path.parent / "b.npz"
    inspected = pipeline.inspect(path, num_heads=N).notes
    planned = pipeline.plan(path, to=to, num_heads=N)[0].notes
    done = pipeline.convert(path, target, to=to, num_heads=N, force=True).notes
    assert set(inspected) <= set(planned) & set(done)
    return list(inspected)


# Type, what is said, and whether it is refused.
TYPES: list[tuple[str, str, bool]] = [
    ("llama", "rotary", False),
    ("gptj", "rotary", False),
    ("gpt_neox", "rotary", False),
    ("qwen2_vl", "rotary", False),
    ("qwen3_5", "rotary", False),
    ("glm4v", "rotary", False),
    ("roformer", "rotary", False),
    ("stablelm", "rotary", False),
    ("bloom", "alibi", False),
    ("mistral", "window", False),
    ("t5", "relative", False),
    ("bros", "relative", False),
    ("wav2vec2-conformer", "relative", False),
    ("gemma3n", "soft_cap", False),
    ("gpt_oss", "sinks", False),
    ("ministral3", "query_scale", False),
    ("dia", "scale", True),
    ("gemma4_text", "scale", True),
    ("llama4", "qk_norm", True),
    ("big_bird", "form", True),
    ("bigbird_pegasus", "form", True),
    ("yoso", "form", True),
    ("nystromformer", "form", True),
    ("mra", "form", True),
    ("autoformer", "form", True),
    ("pegasus_x", "form", True),
]


@pytest.mark.slow_variants(
    "gptj*",
    "gpt_neox*",
    "qwen*",
    "glm4v*",
    "roformer*",
    "stablelm*",
    "bros*",
    "wav2*",
    "gemma4*",
    "bigbird*",
    "yoso*",
    "nys*",
    "mra*",
    "autoformer*",
    "pegasus*",
)
@pytest.mark.parametrize(("model_type", "part", "refused"), TYPES)
def test_parts_of_a_model_type_are_named(
    model_type: str, part: str, refused: bool, tmp_path: Path
) -> None:
    path = source(tmp_path, {"model_type": model_type})
    message = signs.PARTS[part][0]
    (note,) = (x for x in pipeline.inspect(path).notes if message in x)
    assert f"model_type {model_type}" in note
    if refused:
        for function in (
            pipeline.plan,
            lambda a, **k: pipeline.convert(a, tmp_path / "b.npz", **k),
        ):
            with pytest.raises(ValueError, match="would be read as another function") as error:
                function(path, to="flax")
            assert message in str(error.value)
            assert unlike.form(model_type) in str(error.value)
    else:
        assert note in notes(path)


@pytest.mark.parametrize("model_type", ["bert", "vit", "clip", "whisper", "opt", "bart", "gpt2"])
def test_a_model_that_has_nothing_more_is_not_noted(model_type: str, tmp_path: Path) -> None:
    assert notes(source(tmp_path, {"model_type": model_type})) == []


# A configuration, and the part that it tells of, with what is shown of it.
KEYS: list[tuple[dict[str, Any], str, str]] = [
    ({"rope_theta": 1e6}, "rotary", "rope_theta = 1000000.0"),
    ({"text_config": {"rope_parameters": {"a": 1}}}, "rotary", "text_config: rope_parameters"),
    ({"rotary_dim": 64}, "rotary", "rotary_dim = 64"),
    ({"position_embedding_type": "rotary"}, "rotary", "= 'rotary'"),
    ({"position_embedding_type": "relative_key"}, "relative", "= 'relative_key'"),
    ({"self_attention_type": "alibi"}, "alibi", "= 'alibi'"),
    ({"attn_config": {"alibi": True}}, "alibi", "attn_config: alibi = True"),
    ({"model_type": "doge", "sliding_window": 4096}, "window", "sliding_window = 4096"),
    ({"text_config": {"sliding_window": 64}}, "window", "text_config: sliding_window = 64"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "window", "layer_types"),
    ({"attention_types": [[["global", "local"], 12]]}, "window", "attention_types"),
    ({"layer_types": ["linear_attention"]}, "layers", "layer_types"),
    ({"attn_output_gate": True}, "gate", "attn_output_gate"),
    ({"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "query_scale", "llama_4_scaling_beta"),
    ({"relative_attention_num_buckets": 32}, "relative", "= 32"),
    ({"attention_in_multiplier": 0.5}, "multiplier", "= 0.5"),
]


@pytest.mark.slow_variants("config[0267]-*", "config1[034]-*")
@pytest.mark.parametrize(("config", "part", "shown"), KEYS)
def test_keys_of_a_configuration_are_named(
    config: dict[str, Any], part: str, shown: str, tmp_path: Path
) -> None:
    printed = notes(source(tmp_path, {"model_type": "bert"} | config))
    message = signs.PARTS[part][0]
    assert any(message in note and shown in note for note in printed)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral", "sliding_window": None, "rope_theta": None},
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
        {"model_type": "llama", "sliding_window": 16},
        {"model_type": "bert", "layer_types": ["full_attention"], "label2id": {"window": 3}},
        {"model_type": "bert", "layer_norm_eps": 1e-6, "scale_embedding": True},
        {"model_type": "big_bird", "attention_type": "original_full"},
        {"model_type": "deberta", "relative_attention": False, "max_relative_positions": -1},
        {"model_type": "deberta-v2", "max_relative_positions": -1, "position_buckets": 256},
    ],
)
def test_a_key_switches_a_part_off(config: dict[str, Any], tmp_path: Path) -> None:
    printed = " ".join(notes(source(tmp_path, config)))
    assert not [p for p in ("window", "form", "relative") if signs.PARTS[p][0] in printed]
    assert "not known" not in printed


def test_a_key_of_no_known_meaning_is_named(tmp_path: Path) -> None:
    (note,) = notes(
        source(tmp_path, {"model_type": "bert", "sparse_kv_blocks": 30, "my_rmsnorm": 0})
    )
    assert "may change attention: sparse_kv_blocks = 30:" in note


def test_a_model_type_that_is_not_known_is_reported(tmp_path: Path) -> None:
    (note,) = notes(source(tmp_path, {"model_type": "of_tomorrow"}))
    assert "jaxmha does not know what of_tomorrow" in note
    assert "compare with the model's own output" in note


@pytest.mark.parametrize(("config", "layout"), [(None, "llama"), ({}, "llama"), (None, "gpt-neox")])
def test_without_a_model_type_the_layout_tells(config: Any, layout: str, tmp_path: Path) -> None:
    (note,) = notes(source(tmp_path, config, layout), layout)
    assert "no config.json names the model_type" in note
    assert "rotary" in note


TENSORS = [
    ("rotary", "model.rotary_emb.inv_freq"),
    ("alibi", "model.alibi_slopes"),
    ("relative", "model.layers.0.relative_attention_bias.weight"),
    ("sinks", "model.layers.0.attn.sinks"),
    ("qk_norm", "model.layers.1.attn.q_norm.weight"),
    ("gate", "model.layers.1.attn.g_proj.weight"),
]


@pytest.mark.parametrize(("part", "name"), TENSORS)
def test_tensors_outside_the_blocks_are_named(part: str, name: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {name: np.ones((3, 5), np.float32)}
    (note,) = notes(source(tmp_path, {"model_type": "bert"}, **more))
    assert signs.PARTS[part][0] in note
    assert f"tensor {name}" in note


@pytest.mark.parametrize(
    "config", [{"architectures": ["RoFormerModel"]}, {"transformers_version": "5.23.0"}]
)
def test_a_configuration_without_a_model_type_is_reported(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """RoFormer's and YOSO's say nothing else of what they have."""
    (note,) = notes(source(tmp_path, config))
    assert "config.json names no model_type" in note


def test_sinusoids_of_boxes_are_no_rotary_positions(tmp_path: Path) -> None:
    more: Any = {"bbox_embeddings.bbox_sinusoid_emb.x_pos_emb.inv_freq": np.ones(4, np.float32)}
    printed = notes(source(tmp_path, {"model_type": "bros"}, **more))
    missing = [note for note in printed if note.startswith("not converted")]
    assert [signs.PARTS["relative"][0] in note for note in missing] == [True]


def test_what_is_around_attention_under_other_names_is_named(tmp_path: Path) -> None:
    """Names of no layout and of no role: the linear layers are converted all the same."""
    state = {f"layers.0.mixer.{x}.weight": np.ones((6, 6), np.float32) for x in ("W_all", "dense")}
    model_file(tmp_path / "a.npz", state, {"model_type": "gte", "rope_theta": 1e4})
    assert any(signs.PARTS["rotary"][0] in x for x in pipeline.inspect(tmp_path / "a.npz").notes)
    for done in (
        pipeline.plan(tmp_path / "a.npz", to="flax")[0],
        pipeline.convert(tmp_path / "a.npz", tmp_path / "b.npz", to="flax"),
    ):
        assert any(signs.PARTS["rotary"][0] in note for note in done.notes)


def test_text_and_json_of_every_command_name_it(tmp_path: Path) -> None:
    path, message = source(tmp_path, {"model_type": "bloom"}), signs.PARTS["alibi"][0]
    target = str(tmp_path / "b.npz")
    for command in (
        ["inspect", str(path)],
        ["plan", str(path), "--to", "linear"],
        ["convert", str(path), target, "--to", "linear", "--force"],
    ):
        text = cli(*command)
        data = cli(*command, "--json")
        assert (text.exit_code, data.exit_code) == (0, 0), text.output + data.output
        assert f"note: not converted: {message}" in " ".join(text.stdout.split())
        assert any(message in note for note in json.loads(data.stdout)["notes"])


def test_a_conversion_by_a_plan_names_it_too(tmp_path: Path) -> None:
    path, plan = source(tmp_path, {"model_type": "bloom"}), tmp_path / "plan.toml"
    for command in (
        ["plan", str(path), "--to", "linear", "-o", str(plan)],
        ["convert", str(path), str(tmp_path / "b.npz"), "--plan", str(plan)],
    ):
        done = succeeds(*command)
    assert signs.PARTS["alibi"][0] in " ".join(done.stdout.split())
    assert done.stdout.count("ALiBi") == 1


def test_a_configuration_that_cannot_be_read_is_no_crash(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": ')
    assert unconverted.notes(tmp_path / "none.npz", [], ["bert"]) == ()


@pytest.mark.slow
def test_every_type_of_transformers_is_known() -> None:
    """A type that is new there is to be read, run and added."""
    names = importlib.import_module("transformers.models.auto.configuration_auto")
    assert set(names.CONFIG_MAPPING_NAMES) <= architectures.KNOWN


def test_parts_have_words() -> None:
    parts = {*architectures.PARTS, *architectures.FUNCTIONS, *(sign.part for sign in signs.SIGNS)}
    assert parts | {part for part, _ in signs.TENSORS} <= signs.PARTS.keys()
    assert not architectures.PLAIN & frozenset().union(*architectures.FUNCTIONS.values())


def test_every_part_of_a_model_has_its_own_head_count(tmp_path: Path) -> None:
    """Seamless M4T: the speech encoder's count is not that of the text's, nor T2U's."""
    config = {
        "encoder_attention_heads": 16, "decoder_attention_heads": 4,
        "speech_encoder_attention_heads": 8, "t2u_encoder_attention_heads": 2,
        "t2u_decoder_attention_heads": 32, "memory_attention_num_attention_heads": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = head_count.in_config(tmp_path / "a.pt")
    assert found is not None
    for prefix, expected in {
        "speech_encoder.encoder.layers.0.self_attn": 8,
        "t2u_model.model.encoder.layers.0.self_attn": 2,
        "t2u_model.model.decoder.layers.0.encoder_attn": 32,
        "text_encoder.layers.0.self_attn": 16,
        "text_decoder.layers.0.self_attn": 4,
        "memory_attention.layers.0.self_attn": 1,
    }.items():
        assert found.of(prefix)[0] == expected, prefix
