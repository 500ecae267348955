"""Plans that are edited by what their comments say, and by nothing else, convert."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.converters.migrate import pipeline
from tests.converters.command_line import cli, printed, succeeds
from tests.converters.test_every_layout import N, exported, model_file


def source_of(folder: Path, extra: Mapping[str, tuple[int, ...]], name: str = "a.npz") -> Path:
    rng = np.random.default_rng(0)
    drawn = {key: rng.normal(size=shape).astype(np.float32) for key, shape in extra.items()}
    return model_file(folder / name, exported("linear", "layers.0.self_attn") | drawn)


def planned(source: Path, to: str) -> str:
    succeeds("plan", source, "--to", to, "--num-heads", N, "-o", source.with_suffix(".toml"))
    return source.with_suffix(".toml").read_text()


KINDS = ["conv1d", "embedding", "linear"]
FLAX = {"conv1d": "tok/kernel", "linear": "tok/kernel", "embedding": "tok/embedding"}
FIRST = {"flax": FLAX, "linear": dict.fromkeys(KINDS, "tok.weight")}


@pytest.mark.slow_variants("*", "!*-flax", "!embedding-linear", "!linear-keras*")
@pytest.mark.parametrize("to", ["flax", "linear", "keras-file", "keras"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_that_the_comment_names_is_enough(kind: str, to: str, tmp_path: Path) -> None:
    source = source_of(tmp_path, {"tok.weight": (11, 7)})
    text = planned(source, to)
    comment = "# could be conv1d or embedding or linear: set kind below to it\n"
    assert comment in text
    edited = re.sub(f"{comment}kind = .*", f'{comment}kind = "{kind}"', text)
    assert edited != text
    plan = tmp_path / "edited.toml"
    plan.write_text(edited)
    in_file = to in ("keras-file", "keras")
    target = tmp_path / ("b.weights.h5" if in_file else "b.npz")
    assert "verified" in printed(succeeds("convert", source, target, "--plan", plan))
    group = "embedding" if kind == "embedding" else "dense"
    expected = f"layers/{group}/vars/0" if in_file else FIRST[to][kind]
    with checkpoint.open(source) as a, checkpoint.open(target) as b:
        turned = (kind == "linear") != (to == "linear" and kind != "embedding")
        array = a["tok.weight"].T if turned and kind != "embedding" else a["tok.weight"]
        np.testing.assert_array_equal(b[expected], array)


@pytest.mark.slow_variants("rmsnorm-*-keras-file", "norm-*-keras")
@pytest.mark.parametrize("to", ["keras-file", "keras"])
@pytest.mark.parametrize(
    ("kind", "group"), [("rmsnorm", "rms_normalization"), ("norm", "layer_normalization")]
)
def test_a_norm_without_a_bias_is_named(kind: str, group: str, to: str, tmp_path: Path) -> None:
    """Keras stores both under one name; it holds them once the plan says which they are."""
    source = source_of(tmp_path, {"norm.weight": (7,)})
    text, count = re.subn(
        r"(# .*name the kind \(norm or rmsnorm\) in a plan\n)kind = .*",
        rf'\1kind = "{kind}"',
        planned(source, to),
    )
    assert count == 1
    plan = tmp_path / "edited.toml"
    plan.write_text(text)
    done = succeeds("convert", source, tmp_path / "b.weights.h5", "--plan", plan)
    assert "no tensor tells" not in printed(done)
    with checkpoint.open(source) as a, checkpoint.open(tmp_path / "b.weights.h5") as b:
        np.testing.assert_array_equal(b[f"layers/{group}/vars/0"], a["norm.weight"])


@pytest.mark.everyday(to=["flax"])
@pytest.mark.parametrize("to", ["flax", "keras-file"])
def test_answered_notes_are_dropped(to: str, tmp_path: Path) -> None:
    """One of three norms without a bias is named: the note counts two, and other notes stay."""
    norms = {f"{name}.weight": (7,) for name in ("norm_a", "norm_b", "norm_c")}
    source = source_of(tmp_path, norms)
    text = planned(source, to).replace("notes = [", 'notes = ["a note of mine",')
    counted = "x norm (LayerNorm or RMSNorm: no tensor tells)"
    counted = counted if to == "flax" else "x a tensor of a norm, carried over as it is"
    assert f"3 {counted}" in text
    ending = "npz" if to == "flax" else "weights.h5"

    def notes_after(edits: int) -> str:
        plan = tmp_path / f"{edits}.toml"
        comment = r"(# .*name the kind \(norm or rmsnorm\) in a plan\n)kind = .*"
        edit, count = (
            re.subn(comment, r'\1kind = "rmsnorm"', text, count=edits) if edits else (text, 0)
        )
        assert count == edits
        plan.write_text(edit)
        return printed(succeeds("convert", source, tmp_path / f"{edits}.{ending}", "--plan", plan))

    assert f"3 {counted}" in notes_after(0)
    one, all_named = notes_after(1), notes_after(3)
    assert f"2 {counted}" in one
    assert f"3 {counted}" not in one
    assert not re.search(r"no tensor tells|of a norm, carried over", all_named)
    for shown in (one, all_named):
        assert "a note of mine" in shown
        assert "x rmsnorm: epsilon is not known" in shown


@pytest.mark.parametrize("both", [False, True])
def test_a_bias_goes_with_its_kernel(both: bool, tmp_path: Path) -> None:
    """Its comment is the same; one of them may be followed, or both."""
    extra = {"encoder.patches.weight": (7, 5, 3, 3), "encoder.patches.bias": (7,)}
    source = source_of(
        tmp_path, extra | {"x.tr_deconv.weight": (7, 5, 3, 3), "x.tr_deconv.bias": (7,)}
    )
    text = planned(source, "flax")
    pattern = r"(# a convolution that could be .*\n)kind = .*"
    assert len(re.findall(pattern, text)) == 2
    plan = tmp_path / "edited.toml"
    plan.write_text(re.sub(pattern, r'\1kind = "convolution"', text, count=0 if both else 1))
    succeeds("convert", source, tmp_path / "b.npz", "--plan", plan)
    with checkpoint.open(tmp_path / "b.npz") as file:
        assert file.info["x/tr_deconv/kernel"].shape == (3, 3, 5, 7)
        assert "x/tr_deconv/bias" in file


@pytest.mark.parametrize("to", ["flax", "keras-file"])
def test_a_kind_by_name_can_be_another(to: str, tmp_path: Path) -> None:
    source = source_of(tmp_path, {"head.weight": (11, 7)})
    text = planned(source, to)
    pattern = r"(# by name: its name 'head' .*\n)kind = .*"
    assert re.search(pattern, text)
    plan = tmp_path / "edited.toml"
    plan.write_text(re.sub(pattern, r'\1kind = "embedding"', text))
    target = tmp_path / ("b.weights.h5" if to == "keras-file" else "b.npz")
    succeeds("convert", source, target, "--plan", plan)
    with checkpoint.open(target) as file:
        name = "layers/embedding/vars/0" if to == "keras-file" else "head/embedding"
        assert file.info[name].shape == (11, 7)


def test_a_kind_that_the_arrays_are_not_is_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"tok.weight": (11, 7)})
    text = planned(source, "flax").replace('kind = "other"', 'kind = "norm"')
    plan = tmp_path / "edited.toml"
    plan.write_text(text)
    done = cli("convert", source, tmp_path / "b.npz", "--plan", plan)
    assert done.exit_code == 2
    assert "module 'tok.weight' of the plan is no norm: tok.weight: expected axes (D)" in printed(
        done
    )


def test_a_plan_to_keras_is_one_for_its_files(tmp_path: Path) -> None:
    extra = {
        f"fc{i}.{key}": shape for i in (2, 1) for key, shape in (("weight", (7, 5)), ("bias", (7,)))
    }
    source = source_of(tmp_path, extra)
    text = planned(source, "keras")
    plan = tmp_path / "edited.toml"
    plan.write_text(text)
    succeeds("convert", source, tmp_path / "a.weights.h5", "--plan", plan)
    modules = text.split("[[module]]")
    first = next(i for i, one in enumerate(modules) if 'from = "fc1"' in one)
    second = next(i for i, one in enumerate(modules) if 'from = "fc2"' in one)
    modules[first], modules[second] = modules[second], modules[first]
    plan.write_text("[[module]]".join(modules))
    succeeds("convert", source, tmp_path / "b.weights.h5", "--plan", plan)
    with (
        checkpoint.open(source) as state,
        checkpoint.open(tmp_path / "a.weights.h5") as a,
        checkpoint.open(tmp_path / "b.weights.h5") as b,
    ):
        np.testing.assert_array_equal(a["layers/dense/vars/0"], state["fc1.weight"].T)
        np.testing.assert_array_equal(b["layers/dense/vars/0"], state["fc2.weight"].T)
        assert b.names["layers/dense"] == "fc2"


def test_the_python_call_takes_an_edited_plan_too(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"tok.weight": (11, 7)})
    made = pipeline.plan(source, to="flax", num_heads=N)[0]
    steps = [replace(m, kind="embedding") if m.kind == "other" else m for m in made.steps]
    pipeline.convert(source, tmp_path / "b.npz", plan=replace(made, steps=tuple(steps)))
    with checkpoint.open(tmp_path / "b.npz") as file:
        assert "tok/embedding" in file
