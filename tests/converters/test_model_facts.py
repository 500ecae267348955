"""Facts in no tensor: `verify` and `diff` compare them, other commands name them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
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


def saved(folder: Path, tensors: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
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
    """Of a known model they are named; those of attention count if the model is unknown."""
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
