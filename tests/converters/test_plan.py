"""Plans: what they say, what a file of one may hold, and that conversion does exactly that."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmha import checkpoint
from jaxmha.converters.discovery.attention_blocks import find, named
from jaxmha.converters.layout import transform
from jaxmha.converters.migrate import pipeline, plan_toml
from jaxmha.converters.migrate.plans import Plan, Step, make
from jaxmha.converters.migrate.resolved import resolve
from tests.converters.command_line import cli, succeeds
from tests.converters.test_every_layout import N, model_file, params_of

State = dict[str, Any]


def model() -> State:
    """Attention, each kind of other layer, and what is not understood."""
    layout, rng = named("bert"), np.random.default_rng(0)
    params = params_of(layout)
    shapes = {
        "encoder.layer.0.intermediate.dense.weight": (7, 13),
        "encoder.layer.0.intermediate.dense.bias": (7,),
        "encoder.layer.0.attention.output.LayerNorm.weight": (13,),
        "encoder.layer.0.attention.output.LayerNorm.bias": (13,),
        "embeddings.word_embeddings.weight": (17, 13),
        "mystery.weight": (2, 3),
    }
    drawn = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    attention = transform.export_params(layout, params, prefix="encoder.layer.0.attention")
    return attention | drawn | {"embeddings.position_ids": np.arange(5)[None]}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_file(
        tmp_path_factory.mktemp("plan") / "model.safetensors",
        model(),
        {"n_head": N, "layer_norm_eps": 1e-12},
    )


@pytest.fixture(scope="module")
def plan(source: Path) -> Plan:
    return pipeline.plan(source, to="flax")[0]


def test_every_tensor_is_in_it(plan: Plan) -> None:
    assert sorted(name for step in plan.steps for name in step.tensors) == sorted(model())
    assert {(step.kind, step.target) for step in plan.steps} == {
        ("attention", "encoder/layer/0/attention"),
        ("linear", "encoder/layer/0/intermediate/dense"),
        ("norm", "encoder/layer/0/attention/output/LayerNorm"),
        ("embedding", "embeddings/word_embeddings"),
        ("other", "mystery.weight"),
        ("other", "embeddings.position_ids"),
    }


def test_the_epsilon_of_norms_is_stated(plan: Plan, source: Path) -> None:
    (note,) = plan.notes
    assert note.startswith("1 x norm: epsilon is 1e-12 (config.json: layer_norm_eps), and 1e-06")
    assert "1e-05 by default in torch" in pipeline.plan(source, to="linear")[0].notes[0]


def test_the_file_of_a_plan_is_that_plan(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(plan_toml.dumps(plan))
    assert plan_toml.read(path) == plan


# Not by Unicode's categories or by a regular expression: their tables take seconds.
characters = (
    st.sampled_from("\"'\\\n\r\t\0\x7f#[]={}. ")
    | st.integers(0, 0x7F).map(chr)
    | (st.integers(0, 0xD7FF) | st.integers(0xE000, 0x10FFFF)).map(chr)
)
names = st.lists(characters, min_size=1, max_size=9).map("".join)
fields = st.tuples(
    st.sampled_from(["attention", "linear", "other"]),
    *[names] * 3,
    st.lists(names, min_size=1, max_size=3).map(tuple),
    names,
    st.none() | st.integers(1, 99),
    names,
)
hexadecimal = st.integers(0, 2**128 - 1).map("{:032x}".format)
digests = hexadecimal.map("xxh3_128:{}".format) | hexadecimal.map(lambda one: f"sha256:{one * 2}")


@settings(max_examples=50, deadline=None)
@given(names, st.lists(fields, max_size=3), names, st.just("") | digests)
def test_any_name_survives_the_file(to: str, drawn: Any, source: str, digest: str) -> None:
    made = Plan(to, tuple(Step(*one) for one in drawn), source=source, digest=digest)
    assert plan_toml.loads(plan_toml.dumps(made)) == made


def test_a_file_without_attention_is_noted(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "a.npz", {"fc.weight": np.ones((3, 5)), "fc.bias": np.ones(3)})
    made, _ = pipeline.plan(tmp_path / "a.npz", to="flax")
    assert "no attention block was found" in made.notes[0]


def test_a_file_whose_name_is_no_text_has_a_plan(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"n\xff.safetensors")
    checkpoint.write(path, model())
    succeeds("plan", path, "--to", "flax", "--num-heads", N, "-o", tmp_path / "p.toml")
    assert plan_toml.read(tmp_path / "p.toml").source.endswith(".safetensors")


def test_conversion_by_a_plan_is_conversion(plan: Plan, source: Path, tmp_path: Path) -> None:
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    pipeline.convert(source, a, to="flax")
    done = pipeline.convert(source, b, plan=plan)
    assert a.read_bytes() == b.read_bytes()
    assert set(done.carried) == {"mystery.weight", "embeddings.position_ids"}


def test_edited_plans_are_followed(plan: Plan, source: Path, tmp_path: Path) -> None:
    text = plan_toml.dumps(plan).replace('to = "encoder/layer/0/', 'to = "blocks/0/')
    old = 'kind = "other"\nfrom = "mystery.weight"\nto = "mystery.weight"\nas = "other"'
    assert old in text
    new = 'kind = "linear"\nlayout = "torch"\nfrom = "mystery"\nto = "known"'
    path, target = tmp_path / "plan.toml", tmp_path / "a.npz"
    path.write_text(text.replace(old, new))
    succeeds("convert", source, target, "--plan", path, "--json")
    with checkpoint.open(target) as file:
        np.testing.assert_array_equal(file["known/kernel"], model()["mystery.weight"].T)
        assert "blocks/0/attention/query/kernel" in file
        assert "blocks/0/attention/output/LayerNorm/scale" in file


def edited(plan: Plan, which: str, **changes: Any) -> Plan:
    """The plan with the first move of a kind changed."""
    first = next(step for step in plan.steps if step.kind == which)
    return replace(
        plan, steps=tuple(replace(m, **changes) if m is first else m for m in plan.steps)
    )


BIAS, KERNEL = (f"encoder.layer.0.intermediate.dense.{x}" for x in ("bias", "weight"))
WRONG: dict[str, tuple[Any, str]] = {
    "dropped": (lambda p: replace(p, steps=p.steps[:-1]), r"leaves out 1 tensors, .* is dropped"),
    "invented": (lambda p: edited(p, "other", tensors=("no",)), r"names 'no', which the source"),
    "twice": (lambda p: replace(p, steps=(*p.steps, Step("other", "", "x", "x", (BIAS,)))),
        r"in 2 modules: leave it in one"),
    "clash": (lambda p: edited(p, "other", target="embeddings/word_embeddings/embedding"),
        r"two tensors would be written as 'embeddings/word_embeddings/embedding'"),
    "from": (lambda p: edited(p, "other", source="x"), r"`from` must be the name of its tensor"),
    "kind": (lambda p: edited(p, "linear", kind="embedding"),
        r"is no array of embedding in torch, which has weight"),
    "no kind": (lambda p: edited(p, "linear", kind="lstm"), r"torch has no lstm: it has linear"),
    "shape": (lambda p: edited(p, "linear", kind="conv1d"), r"expected axes \(Di Do\), Do=7"),
    "convention": (lambda p: edited(p, "linear", layout="jax"), r"unknown convention 'jax'"),
    "layout": (lambda p: edited(p, "attention", layout="vit"), r"no block of layout vit"),
    "unknown layout": (lambda p: edited(p, "attention", layout="x"), r"unknown layout 'x'"),
    "heads": (lambda p: edited(p, "attention", num_heads=7), r"N=7"),
    "other heads": (lambda p: edited(p, "attention", num_heads=2),
        r"a head count of 2 is given, and config.json"),
    "no heads": (lambda p: edited(p, "attention", num_heads=None), r"of the plan lacks num_heads"),
    "prefix": (lambda p: edited(p, "linear", source="x"), r"is not under x"),
    "becomes": (lambda p: edited(p, "linear", becomes="rnn"), r"flax has no rnn"),
    "attention becomes": (lambda p: edited(p, "attention", becomes="linear"),
        r"'attention' and cannot become another kind, got as = 'linear'"),
    "digest": (lambda p: replace(p, digest="sha256:0"), r"write a new plan"),
    "no digest": (lambda p: replace(p, digest="md5:0"), r"safetensors: no digest 'md5'"),
    "refuse": (lambda p: replace(p, others="refuse"),
        r"the plan has others = .refuse., and a module of kind other"),
    "to": (lambda p: replace(p, to="keras-file"), r"inside a .weights.h5 file"),
    "dtype": (lambda p: replace(p, dtype="int3"), r"unknown dtype 'int3'"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_plans_are_refused(what: str, plan: Plan, source: Path, tmp_path: Path) -> None:
    edit, message = WRONG[what]
    with pytest.raises(ValueError, match=message) as caught:
        pipeline.convert(source, tmp_path / "x.npz", plan=edit(plan))
    assert not list(tmp_path.iterdir())
    path = tmp_path / "plan.toml"
    path.write_text(plan_toml.dumps(edit(plan)))
    done = cli("convert", source, tmp_path / "x.npz", "--plan", path)
    assert done.exit_code == 2
    assert str(caught.value).split(":")[-1].split()[-1] in done.output
    assert [p.name for p in tmp_path.iterdir()] == ["plan.toml"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[plan]", "[plan", "no TOML"),
        ("[plan]", "[plan]\nx = " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("version = 1", "version = 2", "has version 2"),
        ("version = 1", "version = true", "has version True"),
        ("version = 1", "version = 1\nfast = 1", "unknown key ['fast'] in [plan]"),
        ('to = "flax"\nothers', "others", "lacks `to`"),
        ('others = "pass"', 'others = "drop"', "others must be pass or refuse"),
        ('others = "pass"', "others = 1", "others must be a string"),
        ('kind = "linear"', "kind = 3", "kind must be str, got 3"),
        ('kind = "linear"', "", "lacks 'kind'"),
        ('kind = "linear"', 'kind = "linear"\nshape = 3', "has an unknown key ['shape']"),
        ('tensors = ["mystery.weight"]', "tensors = []", "must be a list of names"),
        ('digest = "sha256:', 'digest = "md5:', "digest must be one of xxh3_128, sha256"),
        ('others = "pass"', 'others = "pass"\ndtype = "int3"', "dtype must be one of float16"),
        ("num_heads = 6", "num_heads = true", "num_heads must be int, got True"),
    ],
)
def test_files_that_are_no_plans_are_refused(
    old: str, new: str, message: str, plan: Plan, source: Path, tmp_path: Path
) -> None:
    text = plan_toml.dumps(plan)
    assert old in text
    (tmp_path / "plan.toml").write_text(text.replace(old, new, 1))
    done = cli("convert", source, tmp_path / "x.npz", "--plan", tmp_path / "plan.toml")
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert done.stderr.count("error:") == 1


def test_another_source_is_refused(plan: Plan, tmp_path: Path) -> None:
    state = model()
    state["mystery.weight"][1, 1] += 1
    checkpoint.write(tmp_path / "other.npz", state)
    with pytest.raises(ValueError, match=r"other.npz: its digest is sha256:.* write a new plan"):
        pipeline.convert(tmp_path / "other.npz", tmp_path / "x.npz", plan=plan)


def test_the_same_contents_in_another_format_are_the_same_source(
    plan: Plan, tmp_path: Path
) -> None:
    state = dict(reversed(model().items()))
    checkpoint.write(tmp_path / "same.npz", state)
    pipeline.convert(tmp_path / "same.npz", tmp_path / "x.npz", plan=plan)


def test_a_plan_without_a_digest_is_followed_with_a_note(
    plan: Plan, source: Path, tmp_path: Path
) -> None:
    done = pipeline.convert(source, tmp_path / "a.npz", plan=replace(plan, digest=""))
    assert any("the plan has no digest" in note for note in done.notes)
    done = pipeline.convert(source, tmp_path / "b.npz", plan=plan)
    assert not any("no digest" in note for note in done.notes)


def test_others_are_passed_or_refused_and_always_reported(source: Path, tmp_path: Path) -> None:
    done = succeeds("convert", source, tmp_path / "a.npz", "--to", "flax", "--check", "weights")
    for name in ("mystery.weight", "embeddings.position_ids"):
        assert f"carried over: {name}" in done.stdout
    for command in (["plan", source], ["convert", source, tmp_path / "b.npz"]):
        refused = cli(*command, "--to", "flax", "--others", "refuse")
        assert refused.exit_code == 2
        message = " ".join(refused.stderr.split())
        assert "mystery.weight (could be conv1d or embedding or linear" in message
        assert "embeddings.position_ids (a parameter or buffer" in message
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_attention_only(source: Path, tmp_path: Path) -> None:
    done = pipeline.convert(source, tmp_path / "a.npz", to="flax", attention_only=True)
    assert done.other_layers == ()
    assert BIAS in done.carried
    with checkpoint.open(tmp_path / "a.npz") as file:
        assert file[KERNEL].tobytes() == model()[KERNEL].tobytes()


def test_plan_prints_every_tensor_and_writes_the_file(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    done = succeeds("plan", source, "--to", "flax", "--output", path)
    for name in model():
        assert name in done.stdout
    assert "layer_norm_eps" in done.stdout
    assert f"{KERNEL} -> encoder/layer/0/intermediate/dense/kernel (13, 7)" in done.stdout
    assert plan_toml.read(path) == pipeline.plan(source, to="flax")[0]
    assert "# -> encoder/layer/0/attention/query/kernel (13, 6, 4) ((N H) Dq -> Dq N H)" in (
        path.read_text()
    )
    again = cli("plan", source, "--to", "flax", "--output", path)
    assert again.exit_code == 2
    assert "plan.toml" in again.stderr
    assert cli("plan", source, "--to", "flax", "--output", path, "--force").exit_code == 0
    printed = json.loads(cli("plan", source, "--to", "flax", "--json").stdout)
    tensors = [
        t for m in printed["modules"] for one in m["tensors"].values() for t in one["sources"]
    ]
    assert sorted(tensors) == sorted(model())


def test_nothing_is_loaded_to_plan() -> None:
    """Shapes are enough: terabytes are planned in no time."""

    class File(dict[str, Any]):
        metadata: dict[str, str] = {}  # noqa: RUF012
        names: dict[str, str] = {}  # noqa: RUF012
        others: tuple[str, ...] = ()

        @property
        def info(self) -> dict[str, Any]:
            return self

        def __getitem__(self, name: str) -> Any:
            return super().__getitem__(name)

    shapes: dict[str, Any] = {
        "in_proj_weight": (3 * 2**20, 2**20),
        "out_proj.weight": (2**20, 2**20),
    }
    shapes = {f"a.{key}": shape for key, shape in shapes.items()} | {"proj.weight": (2**20, 2**20)}
    single = np.dtype(np.float32)
    file: Any = File({name: checkpoint.TensorInfo(shape, single) for name, shape in shapes.items()})
    blocks = find(shapes)
    found = resolve(make(file, named("flax"), found=blocks, num_heads=N - 2), file)
    assert found.made["a/query/kernel"].info.shape == (2**20, 4, 2**18)
    assert found.made["proj/kernel"].info.nbytes == 2**42


def test_head_counts_of_a_plan(plan: Plan, source: Path, tmp_path: Path) -> None:
    """Nothing in the file contradicts them: they are missing, or differ between layers."""

    def heads(*counts: int | None) -> Plan:
        given = iter(counts)
        steps = (
            replace(m, num_heads=next(given)) if m.kind == "attention" else m for m in two.steps
        )
        return replace(two, steps=tuple(steps))

    state = {k: v for k, v in model().items() if "attention" in k}
    state |= {k.replace("layer.0", "layer.1"): v for k, v in state.items()}
    checkpoint.write(tmp_path / "two.safetensors", state)
    two = pipeline.plan(tmp_path / "two.safetensors", to="flax", num_heads=N)[0]
    with pytest.raises(ValueError, match=r"module encoder.layer.1.attention of the plan lacks num"):
        pipeline.convert(tmp_path / "two.safetensors", tmp_path / "a.npz", plan=heads(N, None))
    done = pipeline.convert(tmp_path / "two.safetensors", tmp_path / "b.npz", plan=heads(N, 1))
    assert any("blocks of the same shapes have different head counts" in n for n in done.notes)
    done = pipeline.convert(tmp_path / "two.safetensors", tmp_path / "c.npz", plan=heads(N, N))
    assert not any("head counts" in n for n in done.notes)


def test_notes_of_a_plan_are_reported_when_it_is_carried_out(
    plan: Plan, source: Path, tmp_path: Path
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(plan_toml.dumps(plan))
    assert plan.notes
    assert plan_toml.read(path).notes == plan.notes
    done = cli("convert", source, tmp_path / "a.npz", "--plan", path, "--check", "weights")
    assert "note: 1 x norm: epsilon" in " ".join(done.output.split())


def test_plans_that_cannot_be_read(source: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    for path, why in [
        (tmp_path / "absent.toml", "there is no such file"),
        (tmp_path, "is a directory"),
        (tmp_path / "bytes.toml", "no UTF-8"),
    ]:
        done = cli("convert", source, tmp_path / "a.npz", "--plan", path)
        assert done.exit_code == 2
        assert done.stderr.startswith(f"error: {path}: ")
        assert why in " ".join(done.stderr.split())
