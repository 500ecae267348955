"""Messages of `match`, `load_into` and `prove` say what is wrong, and what to do about it."""

# mypy: disallow-subclassing-any=False, warn-return-any=False
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from typer.testing import CliRunner

from experiments.recipes import bert, gemma, gpt2, llama, t5, vit, whisper
from jaxmha import checkpoint
from jaxmha.cli.app import app
from jaxmha.converters import config_of, equinox, flax, keras, match
from jaxmha.converters import torch as convert_torch
from jaxmha.converters.matching import Line, prove


class Activated(torch.nn.Module):
    """A linear layer and its activation in one module, as `intermediate` of BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(5, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.dense(x))


class Theirs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Activated(), torch.nn.LayerNorm(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x))


class Mine(nnx.Module):
    def __init__(self, epsilon: float = 1e-5) -> None:
        rngs = nnx.Rngs(0)
        self.up, self.ln = nnx.Linear(5, 7, rngs=rngs), nnx.LayerNorm(7, epsilon=epsilon, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.ln(jax.nn.relu(self.up(x)))


def inputs(rng: np.random.Generator) -> tuple[Any, ...]:
    return (rng.normal(size=(11, 5)),)


def test_a_module_with_its_activation_is_no_departure() -> None:
    source = Theirs()
    proof = prove(source, flax.load_into(Mine(), source), inputs=inputs)
    assert proof.same
    assert "first layer" not in str(proof)
    proof = prove(source, flax.load_into(Mine(1e-2), source), inputs=inputs)
    assert proof.departure is not None
    assert proof.departure[:2] == ("norm", "ln")
    assert "jaxmha.converters.attribute" in str(proof).splitlines()[-1]


SMALL = {"fc.weight": np.arange(15, dtype="f").reshape(3, 5), "pooler.bias": np.ones(2, "f")}
PLACE = {"dense": {"kernel": np.zeros((5, 3), "f")}}


def test_unused_arrays_are_the_reason_and_can_be_left_out() -> None:
    made = equinox.load_into(PLACE, SMALL, unused="keep")
    proof = prove(SMALL, made)
    assert not proof.same
    assert "not the same: 1 array of the source is unused" in str(proof)
    kept = prove(SMALL, made, unused="keep")
    assert kept.same
    assert "unused" not in str(kept)
    with pytest.raises(ValueError, match="unused must be"):
        prove(SMALL, made, unused="drop")  # type: ignore[arg-type]


NAMES = ("alpha", "beta", "gamma")
SEVERAL = {f"{name}.weight": np.full((3, 5), n, "f") for n, name in enumerate(NAMES)}
PLACES = {name: {"kernel": np.zeros((5, 3), "f")} for name in ("left", "middle", "right")}


def test_a_question_shows_an_example_in_both_forms() -> None:
    with pytest.raises(ValueError, match="for example, if it is alpha") as caught:
        equinox.load_into(PLACES, SEVERAL)
    text = str(caught.value)
    assert "plan.with_lines(\n    Line('left/kernel', ('alpha.weight',), arrow='" in text
    assert "[[array]]\nto = " in text
    assert (
        "#   for example, if it is alpha.weight:\n# [[array]]" in match(SEVERAL, PLACES).to_toml()
    )


def test_candidates_that_are_used_are_dropped() -> None:
    plan = match(SEVERAL, PLACES)
    assert plan.questions[0].candidates == tuple(f"{name}.weight" for name in NAMES)
    plan = plan.with_lines(Line("left/kernel", ("alpha.weight",), "o i -> i o"))
    assert [q.candidates for q in plan.questions] == [("beta.weight", "gamma.weight")] * 2
    assert "alpha" not in plan.questions[0].line
    with pytest.raises(ValueError, match="for example, if it is beta"):
        equinox.load_into(PLACES, SEVERAL, plan)
    plan = plan.with_lines(Line("middle/kernel", ("beta.weight",), "o i -> i o"))
    assert [q.reason.split(",")[0] for q in plan.questions] == ["one layer of these shapes is left"]


def test_patterns_use_their_arrays_and_lines_are_by_you() -> None:
    source = {f"h.{i}.{x}.weight": np.ones((3, 5), "f") for i in range(2) for x in ("mu", "pi")}
    target = {"h": [{x: {"kernel": np.zeros((5, 3), "f")} for x in ("left", "right")}] * 2}
    plan = match(source, target).with_lines(
        Line("h/{i}/left/kernel", ("h.{i}.mu.weight",), "o i -> i o"),
        Line("h/{i}/right/kernel", ("h.{i}.pi.weight",), "o i -> i o"),
    )
    assert not plan.questions
    assert not plan.unused
    assert "unused" not in str(plan) + plan.to_toml()
    assert all(row.endswith("  by you") for row in str(plan).splitlines())
    part = match({"qkv.weight": np.ones((6, 5))}, {"q": {"kernel": np.ones((5, 3))}})
    first = Line("q/kernel", ("qkv.weight",), "(p o) i -> p i o", take="0/2")
    assert part.with_lines(first).unused == ("qkv.weight",)


def norms(*names: str) -> dict[str, dict[str, Any]]:
    """Layers that nothing but the user's lines tells apart."""
    return {
        name: {"scale": np.full(3, n, "f"), "bias": np.full(3, -n, "f")}
        for n, name in enumerate(names)
    }


def test_lines_of_patterns_and_of_layers_settle_questions_on_either() -> None:
    source, target = norms("ln1_0", "ln1_1", "ln2_0", "ln2_1"), norms("a_0", "a_1", "b_0", "b_1")
    pairs, leaves = (("a_{i}", "ln1_{i}"), ("b_{i}", "ln2_{i}")), ("scale", "bias")
    lines = [Line(f"{a}/{leaf}", (f"{b}/{leaf}",)) for a, b in pairs for leaf in leaves]
    plan = match(source, target)
    assert [q.target for q in plan.questions] == [*target]
    plan = plan.with_lines(*lines)
    assert (plan.questions, plan.unused) == ((), ())
    assert equinox.load_into(target, source, plan)["b_1"]["bias"][0] == -3
    mine, theirs = ({"h": [norms(*names)] * 2} for names in (("mu", "pi"), ("left", "right")))
    plan = match(mine, theirs)
    assert [q.target for q in plan.questions] == ["h/{i}/left", "h/{i}/right"]
    plan = plan.with_lines(*(
        Line(f"h/{n}/{a}/{leaf}", (f"h/{n}/{b}/{leaf}",))
        for n in range(2) for a, b in (("left", "pi"), ("right", "mu")) for leaf in leaves
    ))  # fmt: skip
    assert prove(mine, equinox.load_into(theirs, mine, plan), plan).same


def test_zeros_are_no_advice_for_layers_that_lines_or_shapes_name() -> None:
    source, target = norms("mu", "pi"), norms("left", "right", "more")
    part = match(source, target).with_lines(Line("left/scale", ("pi/scale",)))
    assert part.questions[0].candidates == ("mu", "pi")
    assert part.questions[0].arrays == ("left/bias",)
    whole = part.with_lines(Line("left/bias", ("pi/bias",)), *part.questions[1].examples[0])
    assert [(q.target, q.candidates) for q in whole.questions] == [("right", ("mu",))]
    with pytest.raises(
        ValueError, match="every layer of these shapes fills another: correct"
    ) as caught:
        equinox.load_into(target, source, whole)
    assert "fill='zeros')\n" not in str(caught.value)


def test_prove_asks_for_the_plan_that_filled_the_model() -> None:
    plan = match(SEVERAL, PLACES)
    with pytest.raises(ValueError, match=r"prove\(source, model, plan\)"):
        prove(SEVERAL, PLACES)
    with pytest.raises(ValueError, match="open question") as caught:
        prove(SEVERAL, PLACES, plan)
    assert "prove(" not in str(caught.value)


BUILD = """
import numpy as np


def build():
    return {"dense": {"kernel": np.zeros((5, 3), "f")}}


def more():
    return {**build(), "head": {"kernel": np.zeros((11, 13), "f")}}
"""


def test_the_command_names_its_own_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "builders_of_advice.py").write_text(BUILD)
    checkpoint.write(tmp_path / "a.npz", SMALL)
    monkeypatch.chdir(tmp_path)
    command = ["match", "a.npz", "builders_of_advice:build"]
    run = CliRunner().invoke
    done = run(app, [*command, "--save", "plan.toml"])
    assert done.exit_code == 1
    assert "--keep-unused" in done.output
    assert "edit the plan" not in done.output
    planned = [*command, "--plan", "plan.toml", "--to", "m.npz"]
    done = run(app, planned)
    assert done.exit_code == 1
    assert "--keep-unused" in done.output
    assert "unused=" not in done.output
    assert run(app, [*planned, "--keep-unused"]).exit_code == 0
    lacking = ["match", "a.npz", "builders_of_advice:more", "--plan", "plan.toml", "--keep-unused"]
    done = run(app, [*lacking, "--to", "n.npz"])
    assert done.exit_code == 2
    assert "head/kernel" in done.output
    assert "missing=" not in done.output


@pytest.mark.parametrize("recipe", [bert, gemma, gpt2, llama, t5, vit, whisper])
def test_a_recipe_refuses_folders_of_other_models(recipe: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(ValueError, match="model_type of the folder is clip, expected"):
        recipe.load(tmp_path)


def test_the_configuration_of_a_folder_or_of_a_checkpoint_in_it(tmp_path: Path) -> None:
    with pytest.raises(checkpoint.CheckpointError, match=r"config.json: there is no such file"):
        config_of(tmp_path, "bert")
    (tmp_path / "config.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(checkpoint.CheckpointError, match="the file is a link"):
        config_of(tmp_path, "bert")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "model.safetensors").touch()
    for source in (tmp_path, tmp_path / "model.safetensors"):
        assert config_of(source, "bert") == {"model_type": "bert"}


@pytest.mark.parametrize(
    ("face", "model", "message"),
    [
        (flax, torch.nn.Linear(2, 3), "got torch's Linear: are model and source swapped"),
        (flax, nnx.Linear, "got the class Linear: pass an instance"),
        (flax, "weights.safetensors", "got str: are model and source swapped"),
        (equinox, torch.nn.Linear(2, 3), "got torch's Linear: are model and source swapped"),
        (
            convert_torch,
            nnx.Dropout(0.1),
            "model must be a torch module, got flax's Dropout: are model and",
        ),
        (keras, torch.nn.Linear(2, 3), "model must be a built Keras model or layer, got torch's"),
    ],
)
def test_swapped_arguments_and_classes_are_named(face: Any, model: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        face.load_into(model, {"weight": np.ones((3, 2), "f"), "bias": np.ones(3, "f")})


def test_match_and_prove_name_the_argument_that_is_a_class() -> None:
    with pytest.raises(
        TypeError, match=r"target must be .* got the class Linear: pass an instance"
    ):
        match(SMALL, nnx.Linear)
    with pytest.raises(TypeError, match=r"model must be .* got the class Linear: pass an instance"):
        prove(SMALL, nnx.Linear)
    with pytest.raises(TypeError, match=r"source must be .* got int, in which there is no array"):
        match(3, PLACE)


def test_the_nearest_array_is_named_before_zeros_are() -> None:
    target = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="open question") as caught:
        flax.load_into(target, torch.nn.Linear(2, 4))
    text = str(caught.value)
    nearest = "the nearest is weight (4, 2), which does not fit kernel (2, 3)"
    assert 0 < text.find(nearest) < text.find("to fill it with zeros:")


def test_another_width_shows_the_shapes_expected_and_found() -> None:
    target = nnx.MultiHeadAttention(2, 6, decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="open question") as caught:
        flax.load_into(target, torch.nn.MultiheadAttention(10, 2))
    nearest = "the nearest is in_proj_weight (30, 10), which does not fit key/kernel (6, 2, 3)"
    assert 0 < str(caught.value).find(nearest) < str(caught.value).find("to fill it with zeros:")
