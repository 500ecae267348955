"""Facts in no tensor: `verify` and `diff` compare them, other commands name them."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.converters.discovery import described
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.verify import comparands, comparison, comparison_report, model_facts
from tests.converters.command_line import cli, printed

LAYERS, HEADS, D = 2, 3, 13
MISTRAL: dict[str, Any] = {
    "model_type": "mistral", "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
    "hidden_size": D, "head_dim": 2, "num_hidden_layers": LAYERS, "rms_norm_eps": 1e-6,
    "sliding_window": 5, "max_position_embeddings": 32, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
AROUND = (
    "positions: rotary, base 10000, 2 features in pairs of halves; mask: causal, a query and 4 keys "
    "before"
)
SHORTER = "a query and 3 keys before"
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 8,
}


@pytest.fixture(scope="module")
def tensors() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {}
    for i in range(LAYERS):
        block = f"model.layers.{i}.self_attn"
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
            (f"{block}.{x}_proj.weight" for x in "qkv"), (HEADS * 2, D)
        )
        shapes[f"{block}.o_proj.weight"] = (D, HEADS * 2)
        shapes[f"model.layers.{i}.input_layernorm.weight"] = (D,)
        found |= {name: rng.normal(size=shape).astype("f") for name, shape in shapes.items()}
    return found


def saved(folder: Path, tensors: dict[str, Any], config: Any = None) -> Path:
    folder.mkdir()
    checkpoint.write(folder / "model.safetensors", tensors)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder / "model.safetensors"


def compared(a: Path, b: Path) -> model_facts.Compared:
    first, second = (comparands.read(path, HEADS) for path in (a, b))
    pairs, *_ = comparison.pair(first.blocks, second.blocks)
    return model_facts.compare(first.source, second.source, pairs)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"transformers_version": "5", "torch_dtype": "float16", "_name_or_path": "x"}, []),
        ({"rope_parameters": MISTRAL["rope_parameters"] | {"rope_theta": 5e5}},
         [("positions of 2 x model.layers.{i}.self_attn: first rotary, base 10000, 2 features in "
          "pairs of halves; second rotary, base 500000, 2 features in pairs of halves")]),
        ({"sliding_window": 4},
         [("mask of 2 x model.layers.{i}.self_attn: first causal, a query and 4 keys before; "
          "second causal, a query and 3 keys before")]),
        ({"sliding_window": None},
         [("mask of 2 x model.layers.{i}.self_attn: first causal, a query and 4 keys before; "
          "second causal")]),
        ({"rms_norm_eps": 1e-5}, ["rms_norm_eps: first 1e-06; second 1e-05"]),
        ({"rms_norm_eps": None, "layer_norm_eps": 1e-6},
         [("kind of 2 x model.layers.0.input_layernorm, model.layers.1.input_layernorm: "
          "first rmsnorm; second norm")]),
        ({"model_type": "gemma", "sliding_window": None},
         [("mask of 2 x model.layers.{i}.self_attn: first causal, a query and 4 keys before; "
          "second causal"),
          "the rmsnorms multiply by 1 + weight, or only multiply and add, in the second only"]),
    ],
    ids=["same", "unrelated", "theta", "window", "no-window", "epsilon", "kind", "offset"],
)  # fmt: skip
def test_facts_of_two_configurations(
    changed: dict[str, Any], expected: list[str], tensors: dict[str, Any], tmp_path: Path
) -> None:
    a = saved(tmp_path / "a", tensors, MISTRAL)
    b = saved(tmp_path / "b", tensors, MISTRAL | changed)
    assert list(compared(a, b).differing) == expected


def test_numbers_that_the_words_leave_out(tensors: dict[str, Any], tmp_path: Path) -> None:
    a, b = (
        saved(tmp_path / name, tensors, MISTRAL | {"rope_parameters": YARN | {"factor": factor}})
        for name, factor in (("a", 2.0), ("b", 3.0))
    )
    (found,) = compared(a, b).differing
    assert found.endswith("scaling yarn, of other numbers")


def test_settings_that_are_not_judged(tensors: dict[str, Any], tmp_path: Path) -> None:
    """A note names such a setting; one of attention is a difference if the model type is unknown."""
    a = saved(tmp_path / "a", tensors, MISTRAL)
    b = saved(tmp_path / "b", tensors, MISTRAL | {"hidden_act": "gelu"})
    found = compared(a, b)
    note = "their configurations also differ in hidden_act ('silu' and 'gelu'): compare"
    assert (found.differing, len(found.notes)) == ((), 1)
    assert found.notes[0].startswith(note)
    unknown = MISTRAL | {"model_type": "nobody"}
    theta = {"rope_parameters": MISTRAL["rope_parameters"] | {"rope_theta": 7.0}}
    c, d = saved(tmp_path / "c", tensors, unknown), saved(tmp_path / "d", tensors, unknown | theta)
    expected = "settings of attention: rope_parameters: rope_theta (10000.0 and 7.0)"
    assert compared(c, d).differing == (expected,)


UNKNOWN = {k: v for k, v in MISTRAL.items() if k not in ("rope_parameters", "sliding_window")} | {
    "model_type": "nobody", "rope_theta": 1e4, "rope_scaling": None,
}  # fmt: skip


@pytest.mark.slow_variants("untyped-*", "!untyped-scaling")
@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}},
         ["rope_parameters: rope_type ('default' and 'linear')",
          "rope_parameters: factor (absent and 4.0)"]),
        ({"sliding_window": 4}, ["sliding_window (absent and 4)"]),
        ({"layer_types": ["sliding_attention", "full_attention"]},
         ["layer_types (absent and ['sliding_attention', 'full_attention'])"]),
        ({"rope_theta": None}, ["rope_parameters: rope_theta (10000.0 and None)"]),
        ({"rope_theta": ...}, ["rope_parameters: rope_theta (10000.0 and absent)"]),
        ({"rope_theta": ..., "rope_scaling": ..., "layer_types": ["full_attention"] * LAYERS,
          "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, []),
    ],
    ids=["scaling", "window", "types", "null", "absent", "newer"],
)  # fmt: skip
@pytest.mark.parametrize("model_type", ["nobody", ...], ids=["unknown", "untyped"])
def test_settings_of_attention_that_one_configuration_states(
    model_type: Any,
    changed: dict[str, Any],
    expected: list[str],
    tensors: dict[str, Any],
    tmp_path: Path,
) -> None:
    """They differ if no model type tells what they do; newer files state the same otherwise."""
    content = UNKNOWN | {"model_type": model_type}
    a = saved(tmp_path / "a", tensors, without_dots(content))
    b = saved(tmp_path / "b", tensors, without_dots(content | changed))
    for first, second in ((a, b), (b, a)):
        found = compared(first, second)
        assert len(found.differing) == len(expected)
    found = compared(a, b)
    assert list(found.differing) == [f"settings of attention: {text}" for text in expected]
    untyped = [note for note in found.notes if "names no model_type" in note]
    assert len(untyped) == (model_type is ...)
    assert all("positions and masks were not compared" in note for note in untyped)


def without_dots(content: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if value is not ...}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}},
         [("not compared: positions of 2 x model.layers.{i}.self_attn, unknown in the second "
          "(mistral: rope type 'foo' is not known here")]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.5}},
         [("not compared: positions of 2 x model.layers.{i}.self_attn, unknown in the second "
          "(mistral: partial_rotary_factor is 1.5, and its heads are rotated as a whole)"),
          "only the configuration of the second states rope_"]),
        ({"sliding_window": 0},
         [("not compared: mask of 2 x model.layers.{i}.self_attn, unknown in the second "
          "(mistral: sliding_window must be a positive integer, got 0)")]),
        ({"rms_norm_eps": ...},
         ["only the first states rms_norm_eps (1e-06): these epsilons of norms were not compared"]),
        ({"hidden_act": ..., "residual_multiplier": 0.2},
         ["only the configuration of the first states hidden_act ('silu'), which was not compared",
          "only the configuration of the second states residual_multiplier (0.2), which was not"]),
        ({"initializer_range": 0.1, "attention_dropout": 0.1, "eos_token_id": 7, "use_cache": True,
          "pretraining_tp": 2, "do_sample": False, "attention_bias": False, "rope_scaling": None}, []),
    ],
    ids=["rope-type", "share", "window", "epsilon", "others", "not-of-the-function"],
)  # fmt: skip
def test_facts_that_were_not_compared(
    changed: dict[str, Any], expected: list[str], tensors: dict[str, Any], tmp_path: Path
) -> None:
    a = saved(tmp_path / "a", tensors, MISTRAL)
    b = saved(tmp_path / "b", tensors, without_dots(MISTRAL | changed))
    notes = compared(a, b).notes
    assert len(notes) == len(expected)
    for note, start in zip(notes, expected, strict=True):
        assert note.startswith(start)


@pytest.mark.slow
def test_a_configuration_as_two_versions_of_transformers_save_it(
    tensors: dict[str, Any], tmp_path: Path
) -> None:
    """Version 4 has base and scaling at the top, and lacks settings that version 5 writes."""
    from transformers import MistralConfig

    settings = {
        key: MISTRAL[key]
        for key in ("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim")
    } | {"num_hidden_layers": LAYERS, "sliding_window": 5, "hidden_act": "silu", "vocab_size": 7}
    newer = json.loads(MistralConfig(**settings).to_json_string())
    older = settings | {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "initializer_range": 0.02, "intermediate_size": newer["intermediate_size"],
        "max_position_embeddings": newer["max_position_embeddings"], "model_type": "mistral",
        "rms_norm_eps": newer["rms_norm_eps"], "rope_theta": 1e4, "rope_scaling": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "transformers_version": "4.34.0",
    }  # fmt: skip
    a, b = saved(tmp_path / "a", tensors, older), saved(tmp_path / "b", tensors, newer)
    assert compared(a, b) == ((), ())


def test_epsilons_of_two_towers(tensors: dict[str, Any], tmp_path: Path) -> None:
    def towers(*epsilons: float | None) -> dict[str, Any]:
        names = ("text_config", "vision_config")
        parts = zip(names, epsilons, strict=True)
        heads = {"num_attention_heads": MISTRAL["num_attention_heads"]}
        return {"model_type": "llava"} | {n: {"layer_norm_eps": e} | heads for n, e in parts if e}

    a, b, c = (
        saved(tmp_path / name, tensors, towers(*epsilons))
        for name, epsilons in (("a", (1e-6, 1e-5)), ("b", (1e-5, 1e-6)), ("c", (1e-6, None)))
    )
    assert compared(a, b).differing == (
        "text_config: layer_norm_eps: first 1e-06; second 1e-05",
        "vision_config: layer_norm_eps: first 1e-05; second 1e-06",
    )
    found = compared(a, c)
    assert found.differing == ()
    (note,) = (note for note in found.notes if "epsilons" in note)
    assert note.startswith("only the first states vision_config: layer_norm_eps (1e-05): these")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (MISTRAL | {"num_attention_heads": True}, "was set aside ("),
        (MISTRAL | {"hidden_size": D + 4}, "was set aside ("),
        ([], "names no model_type"),
        (MISTRAL | {"model_type": {}}, "names no model_type"),
        ({k: v for k, v in MISTRAL.items() if k != "model_type"}, "names no model_type"),
    ],
    ids=["heads", "sizes", "list", "no-name", "untyped"],
)
def test_a_configuration_that_was_set_aside(
    config: Any, why: str, tensors: dict[str, Any], tmp_path: Path
) -> None:
    a, b = saved(tmp_path / "a", tensors, MISTRAL), saved(tmp_path / "b", tensors, config)
    (note,) = (note for note in compared(a, b).notes if "next to" in note)
    assert note.startswith(f"the config.json next to the second {why}")
    assert "positions" in note
    assert "masks" in note
    c = saved(tmp_path / "c", tensors, [*config, 1] if config == [] else config | {"more": 1})
    both = [note for note in compared(b, c).notes if "next to" in note]
    assert "next to the first" in both[0]
    assert "next to the second" in both[0]


def test_a_file_without_configuration(tensors: dict[str, Any], tmp_path: Path) -> None:
    """A note; a converted file names its positions in metadata, which are compared."""
    a, plain = saved(tmp_path / "a", tensors, MISTRAL), saved(tmp_path / "b", tensors)
    found = compared(a, plain)
    assert found.differing == ()
    assert found.notes[0].startswith("only the first has a config.json")
    assert "positions, masks and epsilons of norms were not compared" in found.notes[0]
    assert compared(plain, plain) == ((), ())
    (tmp_path / "flax").mkdir()
    made = tmp_path / "flax" / "flax.safetensors"
    pipeline.convert(a, made, to="flax")
    found = compared(made, a)
    assert found.differing == ()
    assert found.notes[0].startswith("only the second has a config.json of its model next to it: m")
    other = {"rope_parameters": MISTRAL["rope_parameters"] | {"rope_theta": 7.0}}
    b = saved(tmp_path / "c", tensors, MISTRAL | other)
    (text,) = compared(made, b).differing
    assert "base 10000" in text
    assert "second rotary, base 7" in text


def test_diff_and_describe_name_them(tensors: dict[str, Any], tmp_path: Path) -> None:
    a = saved(tmp_path / "a", tensors, MISTRAL)
    b = saved(tmp_path / "b", tensors, MISTRAL | {"rms_norm_eps": 1e-5, "sliding_window": 4})
    block = ["--block", "model.layers.0.self_attn"]
    differ = cli("diff", a, b, *block, "--json")
    assert differ.exit_code == 1
    assert [SHORTER in fact for fact in json.loads(differ.stdout)["facts"]] == [True]
    assert f"not in this table: {AROUND}" in printed(cli("describe", a))
    (a.parent / "config.json").write_text(json.dumps(MISTRAL | {"sliding_window": None}))
    described = json.loads(cli("describe", a, "--causal", "--json").stdout)
    assert described["not_applied"] == AROUND.rpartition("; mask")[0]
    report = comparison_report.Report((), facts=("rms_norm_eps: first 1; second 2",))
    assert (report.verdict, str(report)) == (
        "different",
        "differs, in no tensor: " + report.facts[0],
    )


@pytest.mark.slow
def test_verify_and_plot_name_them(tensors: dict[str, Any], tmp_path: Path) -> None:
    a = saved(tmp_path / "a", tensors, MISTRAL)
    b = saved(tmp_path / "b", tensors, MISTRAL | {"rms_norm_eps": 1e-5, "sliding_window": 4})
    epsilon = "rms_norm_eps: first 1e-06; second 1e-05"
    page = tmp_path / "page.html"
    verified = cli("verify", a, b, "--html", page)
    assert (verified.exit_code, epsilon in printed(verified)) == (1, True)
    assert SHORTER in printed(verified)
    assert printed(verified).endswith("different")
    assert epsilon in page.read_text()
    np.savez(tmp_path / "in.npz", query=np.ones((5, D), "f"))
    options = ("--inputs", tmp_path / "in.npz", "--causal", "--output", tmp_path / "o.svg")
    assert f"not applied to these weights: {AROUND}" in printed(cli("plot", a, *options))


def test_the_configuration_stays_with_the_file(tensors: dict[str, Any], tmp_path: Path) -> None:
    a = saved(tmp_path / "a", tensors, MISTRAL)

    def last(destination: Path) -> str:
        return pipeline.convert(a, destination, to="flax", force=True).notes[-1]

    other = tmp_path / "other"
    other.mkdir()
    missing = (
        "no tensor holds masks and epsilons of norms: copy config.json next to the destination"
    )
    assert last(other / "x.safetensors").startswith(missing)
    assert "destination" not in last(a.with_name("x.safetensors"))
    shutil.copy(a.with_name("config.json"), other)
    assert "destination" not in last(other / "x.safetensors")
    assert not compared(a, other / "x.safetensors").notes
    (other / "config.json").write_text(json.dumps(MISTRAL | {"sliding_window": 7}))
    assert "differs from the config.json of the source" in last(other / "x.safetensors")


def test_a_conversion_describes_the_source_once(
    tensors: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, once = saved(tmp_path / "a", tensors, MISTRAL), Mock(wraps=described.of)
    monkeypatch.setattr(described, "of", once)
    plan, _ = pipeline.plan(a, to="flax")
    for given in ({"plan": plan}, {"to": "flax"}):
        once.reset_mock()
        pipeline.convert(a, tmp_path / "x.safetensors", force=True, **given)
        once.assert_called_once()
