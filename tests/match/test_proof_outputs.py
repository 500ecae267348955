"""`prove` compares every output that both models compute, and says which ones it left."""

# mypy: disallow-subclassing-any=False, warn-return-any=False
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from jaxmha.converters import flax
from jaxmha.converters import torch as converters_torch
from jaxmha.converters.matching import Proof, prove
from jaxmha.converters.matching.distances import distances


def distance(one: Any, other: Any) -> float:
    return distances(one, other)[0].difference


Returns = Callable[[Any, Any, Any, Any], Any]  # of the features, the logits, and both inputs


class Theirs(torch.nn.Module):
    def __init__(self, returns: Returns) -> None:
        super().__init__()
        self.fc, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 3)
        self.returns = returns

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> Any:
        features = torch.relu(self.fc(x))
        return self.returns(features, self.head(features), x, padding)


class Mine(nnx.Module):
    def __init__(self, returns: Returns, activation: Callable[[jax.Array], jax.Array]) -> None:
        rngs = nnx.Rngs(0)
        self.fc, self.head = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 3, rngs=rngs)
        self.returns, self.activation = returns, activation

    def __call__(self, x: jax.Array, padding: jax.Array) -> Any:
        features = self.activation(self.fc(x))
        return self.returns(features, self.head(features), x, padding)


def inputs(rng: np.random.Generator) -> tuple[Any, ...]:
    return rng.normal(size=(2, 7, 16)), np.arange(7) >= np.array([[4], [5]])


def proof_of(theirs: Returns, mine: Returns, activation: Any = jax.nn.relu) -> Proof:
    source = Theirs(theirs)
    return prove(source, flax.load_into(Mine(mine, activation), source), inputs=inputs)


class Named(NamedTuple):
    logits: Any
    features: Any


def heads(x: Any) -> Any:
    return x.reshape(2, 7, 4, 4)


# Returns of the source, returns of the model, the pairs, and the outputs that are left.
BOTH: dict[str, tuple[Returns, Returns, str, str]] = {
    "a mask": (lambda f, y, x, p: (f, p), lambda f, y, x, p: (f, p), "0=0", "1 1"),
    "an input": (lambda f, y, x, p: (x, y), lambda f, y, x, p: (x, y), "1=1", "0 0"),
    "an input in other axes": (
        lambda f, y, x, p: (x, y), lambda f, y, x, p: (x.swapaxes(0, 1), y), "1=1", "0 0",
    ),
    "a part of an input": (
        lambda f, y, x, p: (x[:, 1:], f), lambda f, y, x, p: (x[:, 1:], f), "1=1", "0 0",
    ),
    "a masked input": (
        lambda f, y, x, p: (x * p[..., None], f), lambda f, y, x, p: (x * p[..., None], f), "1=1",
        "0 0",
    ),
    "a mask as numbers": (
        lambda f, y, x, p: (f, 1.0 * p), lambda f, y, x, p: (f, 1.0 * p), "0=0", "1 1",
    ),
    "zeros": (lambda f, y, x, p: (0 * y, f), lambda f, y, x, p: (0 * y, f), "1=1", "0 0"),
    "a mask as fills": (
        lambda f, y, x, p: (f, -1e9 * p[..., None]), lambda f, y, x, p: (f, -1e9 * p[..., None]),
        "0=0", "1 1",
    ),
    "indices as numbers": (
        lambda f, y, x, p: (f, 1.0 * f.argmax(-1)), lambda f, y, x, p: (f, 1.0 * f.argmax(-1)),
        "0=0", "1 1",
    ),
    "complex numbers": (lambda f, y, x, p: 2j * y, lambda f, y, x, p: 2j * y, "=", ""),
    "None": (lambda f, y, x, p: (f, None, p), lambda f, y, x, p: f, "0=", "2"),
    "keys": (
        lambda f, y, x, p: {"b": f, "a": 2 * f}, lambda f, y, x, p: {"a": 2 * f, "b": f}, "b=b a=a",
        "",
    ),
    "keys of one": (
        lambda f, y, x, p: {"logits": y, "features": f}, lambda f, y, x, p: (y, f),
        "logits=0 features=1", "",
    ),
    "a named tuple": (
        lambda f, y, x, p: {"loss": None, "features": f, "logits": y},
        lambda f, y, x, p: Named(y, f), "features=features logits=logits", "",
    ),
    "a cache": (
        lambda f, y, x, p: (y, [(heads(f).swapaxes(1, 2), None)]),
        lambda f, y, x, p: (y, {"key": heads(f), "index": np.arange(3)}), "0=0 1.0.0=1.key",
        "1.index",
    ),
    "logits of more": (
        lambda f, y, x, p: {"logits": y, "hidden_states": (x, f), "other": 2 * y},
        lambda f, y, x, p: y, "logits=", "hidden_states.0 hidden_states.1 other",
    ),
    "more than logits": (lambda f, y, x, p: y, lambda f, y, x, p: (2 * y, f, y), "=2", "0 1"),
    "another order": (lambda f, y, x, p: (f, y), lambda f, y, x, p: (y, f), "1=0 0=1", ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", BOTH)
def test_outputs_of_both_are_compared(kind: str) -> None:
    theirs, mine, pairs, left = BOTH[kind]
    proof = proof_of(theirs, mine)
    assert proof.same, str(proof)
    assert proof.difference is not None
    assert proof.difference < 1e-14
    names = [f"{one.source}={one.target}" for one in proof.outputs]
    plain = [name.replace("output ", "").replace("the output", "") for name in names]
    assert sorted(plain) == sorted(pairs.split(" "))
    assert [row.removeprefix("output ").split()[0] for row in proof.left] == left.split()
    assert ("not compared: output" in str(proof)) == bool(left)
    assert (" of the model against " in str(proof)) == (len(proof.outputs) > 1 or bool(left))
    assert ("the nearest of 2 outputs of its size" in str(proof)) == ("more" in kind)
    wrong = proof_of(theirs, mine, jax.numpy.abs)
    assert not wrong.same
    assert wrong.departure is not None
    assert wrong.departure[:2] == ("head", "head")


def features(y: Any, last: float) -> Any:
    return y * (jax.numpy.asarray if isinstance(y, jax.Array) else torch.tensor)([1e6, 1.0, last])


# Returns of the source, returns of the model, and the pairs that depart.
DEPART: dict[str, tuple[Returns, Returns, list[bool]]] = {
    "the second": (lambda f, y, x, p: (f, y), lambda f, y, x, p: (f, y + 1), [False, True]),
    "the order": (lambda f, y, x, p: (f, 2 * f), lambda f, y, x, p: (2 * f, f), [True, True]),
    "another size": (
        lambda f, y, x, p: {"a": f, "b": y},
        lambda f, y, x, p: {"a": f, "b": y[:, 1:]},
        [False, True],
    ),
    "two of one": (
        lambda f, y, x, p: (f, 2 * f, 3 * f),
        lambda f, y, x, p: (f, f),
        [False, True],
    ),
    "an input": (lambda f, y, x, p: f, lambda f, y, x, p: x, [True]),
    "masks": (
        lambda f, y, x, p: (f, 1.0 * p[..., None]),
        lambda f, y, x, p: (f, 0.0 * p[..., None]),
        [False, True],
    ),
    "zeros": (lambda f, y, x, p: 0 * y, lambda f, y, x, p: y, [True]),
    "imaginary parts": (lambda f, y, x, p: y + 1j * y, lambda f, y, x, p: y - 1j * y, [True]),
    "an input for one": (lambda f, y, x, p: (x, f), lambda f, y, x, p: (x, x), [True]),
    "next to a large feature": (
        lambda f, y, x, p: features(y, 1.0),
        lambda f, y, x, p: features(y, 1.001),
        [True],
    ),
    "next to fills of masks": (
        lambda f, y, x, p: y - 100.0 * p[..., None],
        lambda f, y, x, p: (1 + 1e-5) * y - 100.0 * p[..., None],
        [True],
    ),
}


@pytest.mark.parametrize("kind", DEPART)
def test_one_output_that_departs_is_enough(kind: str) -> None:
    theirs, mine, expected = DEPART[kind]
    proof = proof_of(theirs, mine)
    assert not proof.same
    assert [one.difference > proof.tolerance for one in proof.outputs] == expected
    assert proof.difference == max(one.difference for one in proof.outputs)


def test_a_layer_that_departs_is_named_though_outputs_agree() -> None:
    proof = proof_of(lambda f, y, x, p: 2 * x, lambda f, y, x, p: 2 * x, jax.numpy.abs)
    assert proof.same
    assert proof.departure is not None
    assert "head from head, by" in str(proof)
    assert "while the compared outputs agree" in str(proof)


@pytest.mark.parametrize("row", [0, 1])
def test_a_note_says_where_nan_comes_from(row: int) -> None:
    def masked(f: Any, y: Any, x: Any, p: Any) -> Any:
        y[0] = np.nan
        return y

    proof = proof_of(masked, lambda f, y, x, p: y.at[row].set(np.nan))
    assert not proof.same
    first, second = proof.notes
    assert first.startswith("NaN differs from everything: 21 of 42 numbers in the output of the so")
    assert first.endswith("at the same places" if row == 0 else "at other places")
    assert (
        "from no inner layer of the source and no inner layer of the model; a row of scores"
        in second
    )


def test_nan_of_both_hides_no_layer_that_departs() -> None:
    """It goes through all layers, as from a row of scores that is masked."""

    def masked(rng: np.random.Generator) -> tuple[Any, ...]:
        x, padding = inputs(rng)
        return np.where(np.arange(2)[:, None, None] == 0, np.nan, x), padding

    source = Theirs(lambda f, y, x, p: y)
    model = flax.load_into(Mine(lambda f, y, x, p: y, jax.numpy.abs), source)
    proof = prove(source, model, inputs=masked)
    assert not proof.same
    assert proof.departure is not None
    assert proof.departure[:2] == ("head", "head")
    assert "from fc of the source and fc of the model; the drawn inputs hold NaN" in proof.notes[-1]


def test_equal_infinities_do_not_differ() -> None:
    """Such as those of a mask; a number in the place of one does."""
    mask = np.where(np.arange(3) > 1, -np.inf, 0)

    def masked(f: Any, y: Any, x: Any, p: Any) -> Any:
        return y + (mask if isinstance(y, jax.Array) else torch.tensor(mask))

    assert proof_of(masked, masked).same
    assert proof_of(masked, lambda f, y, x, p: y).difference == np.inf


FILLS = (-100.0, -1e3, -1e4, -1e9, 1e9, -1e30, float(np.finfo("f").min), float(np.finfo("d").min))


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("form", ["set", "added", "of one", "of two", "of three"])
def test_fills_of_masks_are_no_scale(fill: float, form: str) -> None:
    right, wrong = np.random.default_rng(0).normal(size=(2, 5, 7))
    masked = np.arange(7) >= np.array([[4]] * 4 + [[6 if form == "of one" else 5]])
    fills = fill * masked
    if form == "of two":
        fills = fill / 2 * masked + fill / 2 * (np.arange(7) > 5)
    if form == "of three":
        fills = np.choose(masked * np.arange(7) % 4, [0, fill, 30 * np.sign(fill), 200])

    def filled(x: Any) -> Any:
        return fills + x if form == "added" else np.where(masked, fills, x)

    noise = 1 + 1e-12 * wrong
    assert distance(filled(right), filled(right * noise)) < 1e-11
    assert distance(filled(right), filled(np.where(masked, right, wrong))) > 0.1
    assert distance(filled(right), np.where(masked, wrong, filled(right))) > 0.9


@pytest.mark.parametrize("fill", FILLS)
def test_small_numbers_next_to_fills_are_compared(fill: float) -> None:
    """They are too few to have a scale by feature. Rounding errors where larger terms cancel do not count."""
    x = np.random.default_rng(0).normal(size=(2, 7))
    masked = np.arange(7) > 4
    filled = [np.where(masked, fill, size * x) for size in (1e-8, -1e-8, 1e-16, -1e-16)]
    assert distance(filled[0], filled[1]) > 1e-6
    assert distance(filled[2], filled[3]) < 1e-8


@pytest.mark.parametrize("large", [1.0, 1e3, 1e6])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(("dtype", "rounds", "tolerance"), [("d", 1e-14, 1e-6), ("f", 3e-7, 1e-5)])
def test_large_features_hide_no_others(
    large: float, axis: int, dtype: str, rounds: float, tolerance: float
) -> None:
    """Rounding departs by a part of the large ones, and of sums near zero too."""
    x, y = np.random.default_rng(0).normal(size=(2, 11, 5, 7)).astype(dtype)
    is_large = np.indices(x.shape)[axis] == 3
    features = np.where(is_large, large, 1).astype(dtype) * x
    rounding = (rounds * large * y).astype(dtype)
    near_zero = np.where(is_large, features, rounding)
    assert distance(features, features + rounding) < tolerance
    assert distance(near_zero, np.where(is_large, features, 0)) < tolerance
    wrong = np.where(is_large, features, (1 + 0.01 * y).astype(dtype) * x)
    assert (distance(features, wrong) > tolerance) == (dtype == "d" or large < 1e6)


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        (lambda f, y, x, p: (x, p), lambda f, y, x, p: (x, p)),
        (lambda f, y, x, p: (y, x), lambda f, y, x, p: (f[:1], x)),
        (lambda f, y, x, p: None, lambda f, y, x, p: y),
    ],
)
def test_models_without_numbers_to_compare_are_refused(theirs: Returns, mine: Returns) -> None:
    with pytest.raises(ValueError, match=r"(?s)no numbers to compare.* the model .*return some"):
        proof_of(theirs, mine)


def test_attention_that_returns_its_mask_is_compared() -> None:
    class Source(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = torch.nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> Any:
            return self.attn(x, x, x, key_padding_mask=padding, need_weights=False), padding

    class Target(nnx.Module):
        def __init__(self) -> None:
            self.attn = nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array, padding: jax.Array) -> Any:
            return self.attn(x, mask=padding[:, None, None, :]), padding  # True: attend

    source = Source()
    proof = prove(source, flax.load_into(Target(), source), inputs=inputs)
    assert not proof.same
    assert proof.departure is not None
    assert proof.departure[:2] == ("attn", "attn")


@pytest.mark.parametrize("batch", [(2,), (1,), ()])
@pytest.mark.parametrize("places", [(5,), (5, 7), (1, 7), (5, 7, 11)])
def test_channels_may_be_first_in_either_model(
    batch: tuple[int, ...], places: tuple[int, ...]
) -> None:
    first = np.random.default_rng(0).normal(size=(*batch, 3, *places))
    last = np.moveaxis(first, len(batch), -1)
    flat = last.reshape(*batch, -1, 3)
    for one, other in ((first, last), (last, first), (first, flat), (flat, first)):
        assert distance(one, other) == 0
        assert distance(one, other + 1) > 0.1


def test_convolutions_with_channels_last_prove_those_with_channels_first() -> None:
    source = nnx.Sequential(nnx.Conv(3, 8, (3, 3), padding="VALID", rngs=nnx.Rngs(0)))
    target = converters_torch.load_into(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)), source)

    def drawn(rng: np.random.Generator) -> dict[str, Any]:
        x = rng.normal(size=(2, 3, 6, 5))
        return {"source": (np.moveaxis(x, 1, -1),), "target": (x,)}

    proof = prove(source, target, inputs=drawn)
    assert (proof.same, proof.departure, proof.compared) == (True, None, 1), str(proof)


@pytest.mark.parametrize(("keys", "same"), [(5, True), (7, False)])
def test_axes_are_exchanged_only_where_their_sizes_show_it(keys: int, same: bool) -> None:
    """Scores of pairs `b i j` against `b j i`, which inputs of as many keys as queries hide."""

    def scores(f: Any, y: Any, x: Any, p: Any) -> Any:
        return f @ x[:, :keys].swapaxes(1, 2)

    proof = proof_of(scores, lambda *args: scores(*args).swapaxes(1, 2))
    assert proof.same == same
    assert proof.outputs[0][3:] == (((0, 2, 1), None) if same else ((), (0, 2, 1)))
    assert "with the axes of the source in the order 0, 2, 1" in str(proof)
    assert ("draw inputs with which their sizes differ" in str(proof)) == (not same)


# Shapes of the source and the model, and the orders of axes that the sizes allow, the first first.
ORDERS: list[tuple[tuple[int, ...], tuple[int, ...], list[tuple[int, ...]]]] = [
    ((2, 5, 7), (5, 2, 7), [(1, 0, 2)]),
    ((1, 5, 7), (5, 1, 7), [()]),
    ((2, 5, 5), (2, 5, 5), [(), (0, 2, 1)]),
    ((2, 3, 8, 8), (2, 8, 8, 3), [(0, 2, 3, 1)]),
    ((2, 8, 4, 4), (2, 16, 8), [(0, 2, 3, 1)]),
    ((2, 4, 7, 3), (2, 7, 12), [(0, 2, 1, 3), (0, 2, 3, 1)]),
    ((1, 4, 4, 3), (4, 12), [(), (2, 1, 3), (1, 3, 2), (2, 3, 1)]),
    ((14, 4, 3), (2, 7, 12), [()]),
    ((2, 3, 5, 7), (2, 7, 5, 3), [(0, 3, 2, 1)]),
    ((6,), (2, 3), [()]),
    ((), (1,), [()]),
]


@pytest.mark.parametrize(("shape", "wanted", "orders"), ORDERS)
def test_orders_of_axes_follow_from_sizes(
    shape: tuple[int, ...], wanted: tuple[int, ...], orders: list[tuple[int, ...]]
) -> None:
    x = np.arange(float(np.prod(shape))).reshape(shape)
    found = distances(x, x.reshape(wanted))
    assert [order.axes for order in found] == orders
