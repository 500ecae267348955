"""`prove` finds wrong values, parts left over, and the first layer that computes something else."""

# mypy: disallow-subclassing-any=False, warn-return-any=False, disallow-untyped-decorators=False
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import numpy as np
import pytest
import torch
from flax import nnx
from torch.nn.utils import prune
from typer.testing import CliRunner

from jaxmha import Mask
from jaxmha.cli.app import app
from jaxmha.converters import equinox, flax, keras, match
from jaxmha.converters.matching import Line, Plan, prove
from tests.promotion import foreign


class Theirs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(5, 7), torch.nn.LayerNorm(7)
        self.last = torch.nn.Linear(7, 3)
        torch.nn.init.normal_(self.norm.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(torch.relu(self.first(x))))


class Mine(nnx.Module):
    def __init__(self, epsilon: float = 1e-5) -> None:
        rngs = nnx.Rngs(0)
        self.up, self.ln = nnx.Linear(5, 7, rngs=rngs), nnx.LayerNorm(7, epsilon=epsilon, rngs=rngs)
        self.down = nnx.Linear(7, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.ln(jax.nn.relu(self.up(x))))


def inputs(rng: np.random.Generator) -> tuple[Any, ...]:
    return (rng.normal(size=(11, 5)),)


@pytest.fixture
def source() -> Theirs:
    torch.manual_seed(0)
    return Theirs()


def test_equal_models_agree(source: Theirs) -> None:
    proof = prove(source, flax.load_into(Mine(), source), inputs=inputs)
    assert proof.same
    assert (proof.equal, proof.compared, proof.departure) == (6, 4, None)
    assert proof.difference is not None
    assert proof.difference < 1e-14
    assert (proof.dtype, proof.narrow) == ("float64", None)


@pytest.mark.parametrize("epsilon", [1e-6, 1e-3])
def test_the_first_layer_that_departs_is_named(source: Theirs, epsilon: float) -> None:
    proof = prove(source, flax.load_into(Mine(epsilon), source), inputs=inputs)
    assert not proof.same
    assert proof.departure is not None
    assert proof.departure[:2] == ("norm", "ln")
    assert "first layer that departs: ln from norm" in str(proof)


class Masked(Mine):
    def __call__(  # type: ignore[override]
        self, x: jax.Array, *, mask: Any, name: str
    ) -> jax.Array:
        assert name == "all"
        rows = mask.to_array(1, 11) if isinstance(mask, Mask) else mask["padding"]
        return super().__call__(x) * rows.reshape(11, 1)


@pytest.mark.parametrize(
    "mask", [Mask.lengths(key_value=np.array([11])), {"padding": np.ones(11, bool)}]
)
def test_arguments_may_hold_arrays(source: Theirs, mask: Any) -> None:
    def both(rng: np.random.Generator) -> dict[str, Any]:
        (x,) = inputs(rng)
        return {"source": (x,), "target": {"x": x, "mask": mask, "name": "all"}}

    assert prove(source, flax.load_into(Masked(), source), inputs=both).same


def test_linen_and_equinox_are_run(source: Theirs) -> None:
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.LayerNorm(1e-3, name="ln")(nn.relu(nn.Dense(7, name="up")(x)))
            return nn.Dense(3, name="down")(x)

    class Equinox(eqx.Module):
        up: eqx.nn.Linear
        ln: eqx.nn.LayerNorm
        down: eqx.nn.Linear

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.down(self.ln(jax.nn.relu(self.up(x))))

    model = Linen()
    pair = model, jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 5), np.float32))
    proof = prove(source, flax.load_into(pair, source), inputs=inputs)
    assert proof.departure is not None
    assert proof.departure[:2] == ("norm", "ln")
    made = eqx.filter_eval_shape(
        lambda key: Equinox(
            eqx.nn.Linear(5, 7, key=key), eqx.nn.LayerNorm(7), eqx.nn.Linear(7, 3, key=key)
        ),
        jax.random.key(0),
    )
    one = prove(source, equinox.load_into(made, source), inputs=lambda rng: (rng.normal(size=5),))
    assert one.same
    assert one.compared == 4


@pytest.mark.slow_variants("float16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_layers_of_half_precision_are_run_wide(source: Theirs, dtype: str) -> None:
    """Also where linen names the dtype in the call, in `setup` or in a layer that it is given."""

    class Compact(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.LayerNorm(1e-5, name="ln", dtype=dtype)(nn.relu(nn.Dense(7, name="up")(x)))
            return nn.Dense(3, name="down", dtype=self.dtype)(x)

    class SetUp(nn.Module):
        up: nn.Module

        def setup(self) -> None:
            self.ln, self.down = nn.LayerNorm(1e-5, dtype=dtype), nn.Dense(3, dtype=dtype)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.down(self.ln(nn.relu(self.up(x))))

    inner = nn.Dense(7, dtype=dtype)
    for model in (Compact(dtype), SetUp(inner)):
        with foreign():
            pair = model, jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 5), "f"))
        proof = prove(source, flax.load_into(pair, source), inputs=inputs)
        assert proof.same, str(proof)
        assert (proof.dtype, proof.narrow, proof.compared) == ("float64", None, 4)
        assert "outputs returned in float64 agree" in str(proof)
    assert inner.dtype == dtype


class SourceInFloat32(Theirs):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums, rows = torch.zeros(11, 3), torch.arange(11)
        return sums.index_add_(0, rows, super().forward(x))  # raises unless dtypes agree


class ModelInFloat32(Mine):
    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.add(super().__call__(x), np.zeros((11, 3), "f"))  # the same


@pytest.mark.parametrize("only", ["source", "model"])
def test_models_of_float32_alone_are_compared_in_it(source: Theirs, only: str) -> None:
    if only == "source":
        source = SourceInFloat32()
    for epsilon in (1e-5, 1e-3):
        model = (Mine if only == "source" else ModelInFloat32)(epsilon)
        proof = prove(source, flax.load_into(model, source), inputs=inputs)
        assert proof.same == (epsilon == 1e-5), str(proof)
        assert (proof.dtype, proof.tolerance) == ("float32", 1e-5)
        assert proof.narrow is not None
        assert proof.narrow.endswith(f" of the {only}")
        (note,) = proof.notes[-1:]
        assert note.startswith(f"the {only} ran in float32, because it raises in float64: ")


def test_a_layer_that_casts_to_half_precision_is_named(source: Theirs) -> None:
    class Casts(Mine):
        def __call__(self, x: jax.Array) -> jax.Array:
            return super().__call__(x).astype("bfloat16")

    proof = prove(source, flax.load_into(Casts(), source), inputs=inputs)
    assert not proof.same
    assert (proof.dtype, proof.narrow) == ("bfloat16", "the model")
    assert "outputs returned in bfloat16 by the model depart" in str(proof)
    assert "bfloat16 rounds by more than that" in str(proof)


@pytest.mark.parametrize("dtype", ["bfloat16", None])
def test_a_cast_inside_a_layer_is_a_possible_cause(source: Theirs, dtype: str | None) -> None:
    class Casts(Mine):
        def __call__(self, x: jax.Array) -> jax.Array:
            out = super().__call__(x)
            return out.astype(dtype).astype(x.dtype) if dtype else 2 * out

    proof = prove(source, flax.load_into(Casts(), source), inputs=inputs)
    assert not proof.same
    assert (proof.dtype, proof.narrow) == ("float64", None)
    assert ("casts to float32 or narrower inside" in str(proof)) == (dtype is not None)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float32"])
def test_keras_models_of_a_mixed_policy_are_run_in_float32(source: Theirs, policy: str) -> None:
    from keras import Input, Model, Sequential, layers

    with foreign():
        made = [
            layers.Dense(7, dtype=policy, name="up", activation="relu"),
            layers.LayerNormalization(epsilon=1e-5, dtype=policy, name="ln"),
            layers.Dense(3, dtype=policy, name="down"),
        ]
        entry = Input((5,), dtype=made[0].compute_dtype)
        functional = Model(entry, made[2](made[1](made[0](entry))))
        for model in (functional, Sequential([Input((5,)), *made])):
            proof = prove(source, keras.load_into(model, source), inputs=inputs)
            assert proof.same, str(proof)
            assert (proof.dtype, proof.narrow) == ("float32", "ln of the model")
            assert "outputs returned in float32 by ln of the model agree" in str(proof)
            assert proof.compared == 3  # not `up`, whose activation the source has apart
            assert {layer.dtype_policy.name for layer in made} == {policy}
            assert model(np.ones((2, 5), np.float32)).dtype == made[2].compute_dtype
            made[1].gamma.assign(made[1].gamma + 0.01)
            wrong = prove(source, model, inputs=inputs)
            assert wrong.departure is not None
            assert wrong.departure[:2] == ("norm", "ln")


def test_wrong_and_rounded_values_are_listed(source: Theirs) -> None:
    model = flax.load_into(Mine(), source)
    model.down.bias.set_value(model.down.bias[...] + 1)
    assert prove(source, model).different == ("down/bias",)
    half = flax.load_into(Mine(), source, dtype="bfloat16")
    proof = prove(source, half)
    assert proof.same
    assert "up/kernel" in proof.rounded


def test_a_part_that_no_line_takes_is_left_over() -> None:
    packed = {"attn.in_proj_weight": np.random.default_rng(0).normal(size=(6, 5)).astype("f")}
    lines = [
        Line(name, ("attn.in_proj_weight",), "(p o) i -> p i o", take=f"{n}/2")
        for n, name in enumerate(("a", "b"))
    ]
    target = {
        name: packed["attn.in_proj_weight"][3 * n : 3 * n + 3].T for n, name in enumerate("ab")
    }
    assert prove(packed, target, Plan(tuple(lines))).same
    part = prove(packed, {"a": target["a"]}, Plan(tuple(lines[:1])))
    assert part.unused == ("attn.in_proj_weight: a part of it",)


MODULE = """
from tests.match.test_proof import Mine, Theirs, inputs


def theirs():
    import torch
    torch.manual_seed(0)
    return Theirs()


def mine():
    return Mine()


def other():
    return Mine(1e-3)
"""


@pytest.mark.parametrize(("target", "code"), [("mine", 0), ("other", 1)])
def test_the_command_runs_both(
    target: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models_to_prove.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    names = [f"models_to_prove.py:{name}" for name in ("theirs", target, "inputs")]
    done = CliRunner().invoke(app, ["match", *names[:2], "--inputs", names[2], "--to", "m.npz"])
    assert done.exit_code == code, done.output
    assert "6 arrays are those of the source, bit by bit" in done.output
    assert ("first layer that departs: ln from norm" in done.output) == bool(code)
    assert (tmp_path / "m.npz").exists()


def test_models_that_cannot_run_are_refused(source: Theirs) -> None:
    tree = {"up": {"kernel": np.zeros((5, 7), "f"), "bias": np.zeros(7, "f")}}
    linear = source.first
    with pytest.raises(TypeError, match="can be run"):
        prove(linear, equinox.load_into(tree, linear), inputs=inputs)
    assert match(linear, tree).questions == ()


HOLDS: dict[str, Callable[[Theirs], object]] = {
    "weight_norm": lambda m: torch.nn.utils.weight_norm(m.first),
    "pruning": lambda m: prune.l1_unstructured(m.first, "weight", 0.5),  # type: ignore[no-untyped-call]
    "computed tensors": lambda m: setattr(m, "seen", [m(torch.ones(1, 5))]),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("kind", HOLDS)
def test_a_module_that_holds_computed_tensors_is_run(kind: str, source: Theirs) -> None:
    HOLDS[kind](source)
    assert prove(source, flax.load_into(Mine(), source), inputs=inputs).same
    assert source.first.weight.dtype == torch.float32


def test_a_model_that_cannot_be_copied_is_refused(source: Theirs) -> None:
    model = flax.load_into(Mine(), source)
    source.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"source Theirs cannot be copied.*lock.*leave out inputs"):
        prove(source, model, inputs=inputs)


X = np.ones((2, 5), "f")
WRONG_INPUTS: dict[str, tuple[Any, str]] = {
    "a tuple": ((X,), "inputs is a function of a numpy.random.Generator .* got tuple"),
    "no parameter": (lambda: (X,), "and this one takes other arguments: too many positional"),
    "an array": (lambda _: X, r"inputs returned float32 \(2, 5\): return a tuple .* \(x,\)"),
    "an array for one": (lambda _: {"source": X, "target": (X,)}, "as 'source': return a tuple"),
    "one model": (lambda _: {"source": (X,)}, "a dict of 'source': .* need 'source' and 'target'"),
    "more than both": (
        lambda _: {"source": (X,), "target": (X,), "z": X},
        "'target', 'z': .* nothing else",
    ),
    "a wrong shape": (
        lambda _: (X[:, :3],),
        r"source .* does not run .*\(float32 \(2, 3\)\).*takes \(input",
    ),
    "a wrong name": (
        lambda _: {"ids": X},
        r"\(ids=float32 \(2, 5\)\), and takes \(input.*unexpected",
    ),
    "an error": (lambda _: WRONG_INPUTS["x"], "inputs raised KeyError: 'x'"),
    "nothing": (lambda _: (), r"returned, \(\), and takes \(input.*TypeError: .*missing"),
}


@pytest.mark.parametrize("kind", WRONG_INPUTS)
def test_wrong_inputs_get_a_message(kind: str, source: Theirs) -> None:
    draw, expected = WRONG_INPUTS[kind]
    linear = source.first
    filled = flax.load_into(nnx.Linear(5, 7, rngs=nnx.Rngs(0)), linear)
    assert prove(linear, filled, inputs=lambda _: [X]).same  # a list is as good as a tuple
    with pytest.raises((TypeError, ValueError), match=f"(?s){expected}"):
        prove(linear, filled, inputs=draw)


def test_the_command_refuses_inputs_for_files_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models_of_files.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", x=X)
    names = [f"models_of_files.py:{name}" for name in ("mine", "inputs")]
    given = ["match", "a.npz", names[0], "--inputs", names[1], "--to", "m.npz", "--save", "p.toml"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 2, done.output
    assert "source is PosixPath: pass the model object" in done.output.replace("Windows", "Posix")
    assert sorted(path.name for path in tmp_path.glob("*.*")) == ["a.npz", "models_of_files.py"]
