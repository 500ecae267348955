"""`load_into` with every kind of target, dtypes, shardings, edited plans, and arrays left over."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from jax._src import compiler
from keras import Input, Model, layers

from jaxmha import checkpoint
from jaxmha.converters import equinox, flax, keras, match
from jaxmha.converters import torch as torch_face
from jaxmha.converters.matching import Line, Plan
from tests import drawn

SOURCE = {
    "first.weight": np.arange(15, dtype=np.float32).reshape(3, 5),
    "first.bias": np.arange(3, dtype=np.float32),
    "table.weight": np.arange(28, dtype=np.float32).reshape(7, 4),
}


class Stateful(torch.nn.ModuleDict):
    """Two layers, and an entry of the state dict that is no tensor."""

    def __init__(self) -> None:
        super().__init__({"lin": torch.nn.Linear(5, 3), "emb": torch.nn.Embedding(7, 4)})

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 1}


class Mine(nnx.Module):  # type: ignore[misc]
    def __init__(self, rngs: Any, dtype: Any = jnp.float32) -> None:
        self.linear = nnx.Linear(5, 3, param_dtype=dtype, rngs=rngs)
        self.embed = nnx.Embed(7, 4, param_dtype=dtype, rngs=rngs)


def check(model: Mine) -> None:
    np.testing.assert_array_equal(model.linear.kernel[...], SOURCE["first.weight"].T)
    np.testing.assert_array_equal(model.linear.bias[...], SOURCE["first.bias"])
    np.testing.assert_array_equal(model.embed.embedding[...], SOURCE["table.weight"])


def test_nnx_is_filled_in_place() -> None:
    model = Mine(nnx.Rngs(0))
    assert flax.load_into(model, SOURCE) is model
    check(model)
    tensors = {name: torch.from_numpy(x) for name, x in SOURCE.items()}
    check(flax.load_into(nnx.state(Mine(nnx.Rngs(0))), tensors))


def test_an_abstract_model_is_filled() -> None:
    check(flax.load_into(nnx.eval_shape(lambda: Mine(nnx.Rngs(0))), SOURCE))


def test_no_program_places_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be compiled for every shape; the values are copied all the same."""
    monkeypatch.setattr(compiler, "compile_or_get_cached", None)
    struct: Any = jax.ShapeDtypeStruct
    source = np.zeros((3, 53), np.float32)
    made = equinox.load_into({"x": struct((3, 53), jnp.float32)}, {"x": source})
    source += 1
    assert not np.asarray(made["x"]).any()
    params = drawn.params(num_heads=3, features=21)
    _, variables = flax.to_module(params, kind="linen")
    np.testing.assert_array_equal(variables["params"]["query"]["bias"], params.query.bias)


def test_a_tree_of_shapes_is_filled() -> None:
    wanted: dict[str, dict[str, tuple[int, ...]]] = {
        "dense": {"kernel": (5, 3), "bias": (3,)},
        "embed": {"embedding": (7, 4)},
    }
    struct: Any = jax.ShapeDtypeStruct
    tree = {n: {k: struct(s, jnp.float32) for k, s in x.items()} for n, x in wanted.items()}
    made = equinox.load_into(tree, SOURCE)
    np.testing.assert_array_equal(made["dense"]["kernel"], SOURCE["first.weight"].T)
    boxes = jax.tree.map(lambda x: linen.Partitioned(x, (None,) * x.ndim), tree)
    state = flax.tensors_of(linen.Dense(3), flax.load_into(boxes, SOURCE)).state
    np.testing.assert_array_equal(state["dense/kernel"], SOURCE["first.weight"].T)


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_files_are_read(suffix: str, tmp_path: Path) -> None:
    checkpoint.write(tmp_path / f"model{suffix}", SOURCE)
    check(flax.load_into(Mine(nnx.Rngs(0)), tmp_path / f"model{suffix}"))
    if suffix == ".safetensors":
        check(flax.load_into(Mine(nnx.Rngs(0)), tmp_path))


def test_torch_is_filled_from_nnx() -> None:
    model = Mine(nnx.Rngs(0))

    module: Any = Stateful()
    assert match(module, model).notes == ("left out: entries that are not tensors: _extra_state",)
    torch_face.load_into(module, model)
    np.testing.assert_array_equal(module.lin.weight.detach(), model.linear.kernel[...].T)
    copies = module.register_state_dict_post_hook(
        lambda _, state, *__: state.update({n: x.clone() for n, x in state.items() if "." in n})
    )
    with pytest.raises(ValueError, match=r"lin.bias of .* is a copy"):
        torch_face.load_into(module, model)
    copies.remove()
    module.to("meta")["again"] = module.lin
    with pytest.raises(ValueError, match="is on the device meta"):
        torch_face.load_into(module, model)


def test_keras_is_filled() -> None:
    layer = layers.Dense(3)
    layer.add_weight((2,), name="seed_vectors")
    layer.add_weight((4,), name="bias")  # the layer will have two of this name
    layer.build((None, 5))
    names = [question.target for question in match(SOURCE, layer).questions]
    assert names == ["seed_vectors", "bias", "bias_1"]
    layer = layers.Dense(3)
    layer.build((None, 5))
    keras.load_into(layer, {k: v for k, v in SOURCE.items() if "first" in k})
    np.testing.assert_array_equal(layer.kernel, SOURCE["first.weight"].T)


def test_keras_is_filled_by_the_keys_of_its_file() -> None:
    def made() -> Any:
        x = layers.Dense(5, name="zz")(inputs := Input((5,)))
        return Model(inputs, layers.LayerNormalization(name="n")(layers.Dense(5, name="aa")(x)))

    source = made()
    state = dict(keras.tensors_of(source).state)
    assert "layers/dense_1/vars/0" in state
    model = keras.load_into(made(), state)
    for mine, theirs in zip(model.weights, source.weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    # Without one array the numbers may be those of another model: names decide again.
    del state["layers/layer_normalization/vars/1"]
    assert {x.target for x in match(state, made()).questions} >= {"zz", "aa"}
    dense = layers.Dense(3)
    dense.build((None, 5))
    linear = flax.load_into(nnx.Linear(5, 3, rngs=nnx.Rngs(0)), keras.tensors_of(dense).state)
    np.testing.assert_array_equal(linear.kernel[...], dense.kernel)


def test_arrays_keep_their_sharding() -> None:
    mesh = jax.make_mesh((1,), ("x",))
    placed = jax.NamedSharding(mesh, jax.P("x"))  # type: ignore[no-untyped-call]
    model = Mine(nnx.Rngs(0))
    model.linear.kernel.set_value(jax.device_put(np.zeros((5, 3), np.float32), placed))
    flax.load_into(model, SOURCE)
    assert model.linear.kernel[...].sharding == placed


def test_a_lossy_cast_is_asked_for() -> None:
    values = {k: v + np.float32(1e-4) for k, v in SOURCE.items()}
    untouched = Mine(nnx.Rngs(0), jnp.bfloat16)
    before = np.asarray(untouched.linear.kernel[...])
    with pytest.raises(ValueError, match=r"pass dtype='bfloat16' \(--dtype bfloat16\) to round"):
        flax.load_into(untouched, values)
    np.testing.assert_array_equal(untouched.linear.kernel[...], before)
    model = flax.load_into(Mine(nnx.Rngs(0), jnp.bfloat16), values, dtype="bfloat16")
    assert model.linear.kernel[...].dtype == jnp.bfloat16
    model = flax.load_into(Mine(nnx.Rngs(0), jnp.bfloat16), values, dtype="float32")
    assert model.linear.kernel[...].dtype == jnp.float32


def test_a_dtype_that_does_not_fit_changes_nothing() -> None:
    plan = match(SOURCE, Mine(nnx.Rngs(0)))
    wide = SOURCE | {"table.weight": SOURCE["table.weight"].astype(np.float64)}
    fitting: Any = {n: np.zeros_like(x) for n, x in wide.items()}
    struct: Any = jax.ShapeDtypeStruct
    tree = jax.tree.map(lambda x: struct(x.shape, x.dtype), fitting)
    model = Mine(nnx.Rngs(0))
    for variable in (model.linear.kernel, model.linear.bias):
        variable.set_value(np.zeros(variable.shape, np.float32))
    model.embed.embedding.set_value(np.zeros((7, 4)))
    with pytest.raises(ValueError, match="embed/embedding: JAX would keep float64 as float32"):
        flax.load_into(model, wide, plan)
    assert not np.any(model.linear.kernel[...])
    with pytest.raises(ValueError, match="jax_enable_x64"):
        equinox.load_into(tree, wide)

    module: Any = Stateful()
    assert match(module, model).notes == ("left out: entries that are not tensors: _extra_state",)
    before = module.lin.weight.detach().clone()
    with pytest.raises(ValueError, match="not float16"):
        torch_face.load_into(module, SOURCE, dtype="float16")
    assert torch.equal(module.lin.weight, before)


def test_arrays_left_over_raise() -> None:
    more = SOURCE | {"pooler.weight": np.zeros((9, 8), np.float32)}
    with pytest.raises(ValueError, match=r"no place for pooler\.weight"):
        flax.load_into(Mine(nnx.Rngs(0)), more)
    check(flax.load_into(Mine(nnx.Rngs(0)), more, unused="keep"))
    less = {k: v for k, v in SOURCE.items() if "table" not in k}
    with pytest.raises(ValueError, match="embed/embedding"):
        flax.load_into(Mine(nnx.Rngs(0)), less)


def test_a_plan_serves_a_deeper_model() -> None:
    def source(count: int) -> dict[str, Any]:
        return {
            f"h.{i}.{n}.weight": np.full((4, 4), 10 * i + k, np.float32)
            for i in range(count)
            for k, n in enumerate(("attn.wq", "attn.wk", "attn.wv", "attn.wo"))
        }

    def target(count: int) -> Any:
        names = ("query", "key", "value", "out")
        return {"layers": [{n: {"kernel": np.zeros((4, 2, 2) if n != "out" else (2, 2, 4), np.float32)}
                            for n in names} for _ in range(count)]}  # fmt: skip

    plan = Plan.from_toml(match(source(2), target(2)).to_toml())
    made = equinox.load_into(target(12), source(12), plan)
    assert made["layers"][11]["value"]["kernel"].max() == 112
    with pytest.raises(ValueError, match="another number of layers"):
        equinox.load_into(target(12), source(11), plan)


def test_decisions_complete_a_plan() -> None:
    rng = np.random.default_rng(0)
    source = {
        f"{n}.{k}": rng.normal(size=s).astype("f")
        for n in ("mu", "pi")
        for k, s in (("weight", (3, 5)), ("bias", (3,)))
    }
    target = {
        n: {"kernel": np.zeros((5, 3), "f"), "bias": np.zeros(3, "f")} for n in ("left", "right")
    }
    plan = match(source, target)
    assert [q.target for q in plan.questions] == ["left", "right"]
    assert plan.questions[0].candidates == ("mu", "pi")
    left, right = (q.line for q in plan.questions)
    edited = Plan.from_toml("\n".join([plan.to_toml(), left.replace("mu", "pi"), right]))
    decided = plan.with_lines(*edited.lines)
    assert decided.questions == ()
    made = equinox.load_into(target, source, decided)
    np.testing.assert_array_equal(made["left"]["kernel"], source["pi.weight"].T)
    np.testing.assert_array_equal(made["left"]["bias"], source["pi.bias"])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("version = 2", "version = 1"),
        ("version = 1\n[[array]]\nto = 3", "must be a string"),
        ('version = 1\n[[array]]\nto = "a"', "expected `from`"),
        ('version = 1\n[[array]]\nto = "a"\nfrom = "b"\nwhy = "c"', "expected the keys"),
        ("version", "no TOML"),
    ],
)
def test_plans_that_are_none_are_refused(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Plan.from_toml(text)


@pytest.mark.parametrize(
    "arrow", ["o i", "o i -> o i", "x y z -> x y", "(a b) i -> i a b", "o i -> i"]
)
def test_wrong_arrows_are_refused(arrow: str) -> None:
    plan = match(SOURCE, Mine(nnx.Rngs(0))).with_lines(
        Line("linear/kernel", ("first.weight",), arrow)
    )
    with pytest.raises(ValueError, match=r"linear/kernel <- first\.weight"):
        flax.load_into(Mine(nnx.Rngs(0)), SOURCE, plan)


def test_a_list_is_filled_from_a_stack_and_back() -> None:
    rng = np.random.default_rng(0)
    names = ("query", "key", "value")
    stacked = {"layers": {n: {"kernel": rng.normal(size=(4, 6, 2, 5)).astype("f")} for n in names}}
    apart = {"blocks": [{n: {"kernel": np.zeros((6, 10), "f")} for n in names} for _ in range(4)]}
    made = equinox.load_into(apart, stacked)
    for i, layer in enumerate(made["blocks"]):
        for n in names:
            wanted = stacked["layers"][n]["kernel"][i].reshape(6, 10)
            np.testing.assert_array_equal(layer[n]["kernel"], wanted)
    back = equinox.load_into(jax.tree.map(np.zeros_like, stacked), made)
    for n in names:
        np.testing.assert_array_equal(back["layers"][n]["kernel"], stacked["layers"][n]["kernel"])


def test_two_lists_of_one_length_are_matched_or_asked() -> None:
    rng = np.random.default_rng(0)
    source = {
        f"layers.{i}.experts.{j}.w.weight": rng.normal(size=(3, 5)).astype("f")
        for i in range(2)
        for j in range(2)
    }
    crossed = {"experts": [{"layers": [{"w": {"kernel": np.zeros((5, 3), "f")}}] * 2}] * 2}
    with pytest.raises(ValueError, match="open question"):
        equinox.load_into(crossed, source)
    stacked = {"things": [{"w": {"kernel": np.zeros((2, 5, 3), "f")}}] * 2}
    with pytest.raises(ValueError, match="two repeated lists have the same length"):
        equinox.load_into(stacked, source)


def test_caches_and_counters_are_no_weights() -> None:
    attention = nnx.MultiHeadAttention(2, 6, decode=True, rngs=nnx.Rngs(0))
    attention.init_cache((1, 4, 6))
    source = torch.nn.MultiheadAttention(6, 2)
    flax.load_into(attention, source)
    wanted = source.out_proj.weight.detach().numpy().T.reshape(2, 3, 6)
    np.testing.assert_array_equal(attention.out.kernel[...], wanted)


def test_a_plan_is_also_python() -> None:
    plan = replace(match(SOURCE, Mine(nnx.Rngs(0))), source="hf://org/model@v1")
    made: dict[str, Any] = {}
    exec(plan.to_python(), made)  # noqa: S102
    assert made["PLAN"].source == plan.source
    check(flax.load_into(Mine(nnx.Rngs(0)), SOURCE, replace(made["PLAN"], source="")))


def test_a_module_without_source_is_one_question() -> None:
    source = {"body.weight": np.ones((5, 3))}
    head = {"fc1": {"kernel": np.zeros((3, 11))}, "fc2": {"kernel": np.zeros((11, 2))}}
    target = {"body": {"kernel": np.zeros((3, 5))}, "head": head}
    plan = match(source, target)
    assert [q.target for q in plan.questions] == ["head"]
    first, second = (Line(f"head/{n}/kernel", fill="zeros") for n in ("fc1", "fc2"))
    assert [q.arrays for q in plan.with_lines(first).questions] == [("head/fc2/kernel",)]
    assert plan.with_lines(first, second).questions == ()


@pytest.mark.parametrize("name", ["a.{i}", "{j}", "a.{i}.{i}", "{k", "{x!r}"])
@pytest.mark.parametrize("many", [1, 3])
def test_braces_in_names_are_no_letters(name: str, many: int) -> None:
    """Neither in source nor target; and what a pattern matches as well is another."""
    weights = {f"{name}.{n}.weight": SOURCE["first.weight"] + n for n in range(many)}
    other = {"h.{i}.weight": SOURCE["table.weight"], "h.5.weight": np.zeros((2, 3), np.float32)}
    empty = {f"{name}{n}": {"kernel": jnp.zeros((5, 3))} for n in range(many)}
    tree = empty | {
        "x": {"{i}": {"embedding": jnp.zeros((7, 4))}, "7": {"kernel": jnp.zeros((3, 2))}}
    }
    source = weights | other
    assert match(source, tree).unused == ()
    made = flax.load_into(tree, source)
    for n in range(many):
        np.testing.assert_array_equal(made[f"{name}{n}"]["kernel"], weights[f"{name}.{n}.weight"].T)
    np.testing.assert_array_equal(made["x"]["{i}"]["embedding"], other["h.{i}.weight"])


def test_the_optimizer_of_a_torch_file_is_left_out(tmp_path: Path) -> None:
    layer = torch.nn.Linear(5, 3)
    model = torch.nn.ModuleDict({"fc": layer})
    optimizer = torch.optim.AdamW(model.parameters())
    layer(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt"
    )
    template = {"fc": {"kernel": np.zeros((5, 3), "f"), "bias": np.zeros(3, "f")}}
    plan = match(tmp_path / "a.pt", template)
    assert not plan.unused
    settings = "the settings (optimizer.param_groups) of an optimizer are left out"
    assert plan.notes == (f"6 arrays and {settings}",)
    found = flax.load_into(template, tmp_path / "a.pt")
    np.testing.assert_array_equal(found["fc"]["kernel"].T, layer.weight.detach().numpy())
    state = {0: {"of_its_own": torch.ones(3, 5)}}
    own = {"train": {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}}
    torch.save({"model": model.state_dict(), **own}, tmp_path / "b.pt")
    plan = match(tmp_path / "b.pt", template)
    assert not plan.unused
    assert plan.notes == (f"1 array and {settings.replace('optimizer.', 'train.')}",)
