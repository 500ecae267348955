"""The two classes as they are written, then repaired step by step."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import torch

from experiments.attribution.tensorflow_class import TensorFlowMultiHeadAttention
from experiments.attribution.torch_class import PyTorchMultiHeadAttention
from jaxmha import MHAParams, Semantics
from jaxmha.converters import linear
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.masks import handwritten as masks
from jaxmha.converters.verify import attribution, comparands, oracle
from jaxmha.converters.verify.attribution import Attribution
from jaxmha.converters.verify.captured_layer import Blocked, Layer

D, N, T = 512, 8, 10  # as in the document
WRITTEN = 2  # its batch
B = N  # the only batch but 1 with which its masks broadcast
LENGTHS = np.array([10, 9, 8, 7, 6, 5, 4, 3])
REPAIRS = 4
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class Pair(NamedTuple):
    """Both layers as freshly built."""

    torch: Any
    tensorflow: Any


class Step(NamedTuple):
    """One state of the repair.

    Attributes:
      name: what was repaired last.
      found: what the difference comes from.
      away: relative RMS distance of either layer from what the text means by its mask, with its
        own weights.
    """

    name: str
    found: Attribution
    away: tuple[float, float]


def build(seed: int) -> Pair:
    """As the document's third example does: one seed for each framework; Keras' own seed too,
    since `tf.random.set_seed` alone does not fix the weights."""
    torch.manual_seed(seed)
    layer = PyTorchMultiHeadAttention(D, N)
    tf.keras.utils.set_random_seed(seed)
    tf.random.set_seed(seed)
    other = TensorFlowMultiHeadAttention(D, N)
    other(tf.zeros((1, T, D)))
    return Pair(layer, other)


def draw(seed: int, batch: int) -> NDArray:
    """The document's input: torch's normal numbers, given to both."""
    torch.manual_seed(seed)
    x: NDArray = torch.randn(batch, T, D).numpy()
    return x


def padding() -> NDArray:
    """Ragged sequences, `B T`: True where there is a token."""
    return np.arange(T) < LENGTHS[:, None]


def run(pair: Pair, x: NDArray, torch_mask: NDArray | None, other_mask: NDArray | None) -> Any:
    """Outputs of both, in float32 as they come."""
    with torch.no_grad():
        mask = None if torch_mask is None else torch.from_numpy(torch_mask)
        first = pair.torch(torch.from_numpy(x), mask).numpy()
    given = {} if other_mask is None else {"mask": tf.convert_to_tensor(other_mask, tf.float32)}
    return first, pair.tensorflow(tf.convert_to_tensor(x), **given).numpy()


def errors(pair: Pair, x: NDArray) -> dict[str, str]:
    """How the examples end with a mask of ones, `(batch, seq)`, as it is written."""
    ones, found = np.ones((len(x), T), bool), {}
    calls = {"example 1 (PyTorch)": (ones, None), "example 2 (TensorFlow)": (None, ones)}
    for name, given in calls.items():
        try:
            run(pair, x, *given)
        except (RuntimeError, tf.errors.InvalidArgumentError) as error:
            message = str(error).rpartition("}} ")[2].partition(" [Op:")[0]
            found[name] = f"{type(error).__name__}: {message}"
        else:
            found[name] = "runs"
    return found


def share(pair: Pair) -> None:
    """torch's weights in the other layer."""
    for name in PROJECTIONS:
        linear, dense = getattr(pair.torch, name), getattr(pair.tensorflow, name)
        dense.set_weights([linear.weight.detach().numpy().T, linear.bias.detach().numpy()])


def layers(pair: Pair, x: NDArray, torch_mask: NDArray, other_mask: NDArray) -> list[Layer]:
    """Both with what their masks mean and their outputs."""
    outputs = run(pair, x, torch_mask, other_mask)
    state = {name: z.numpy() for name, z in pair.torch.state_dict().items()}
    params = comparands.read(state, N).blocks[0].params
    mean = Semantics(fully_masked="mean")
    found = []
    for name, weights, mask, style, output in (
        ("PyTorch", params, torch_mask, "filled", outputs[0]),
        ("TensorFlow", tensorflow_params(pair), other_mask, "added", outputs[1]),
    ):
        keep, bias = masks.import_masks(mask=mask, style=style, num_heads=N)  # type: ignore[arg-type]
        blocked = Blocked(masks.CONSTANT, added=style == "added")
        found.append(Layer(weights, mean, keep, bias, blocked, output, name))
    return found


def tensorflow_params(pair: Pair) -> MHAParams:
    """Kernels of Dense are (in, out), heads outermost in the merged axis."""
    layers = {name: getattr(pair.tensorflow, name).weights for name in PROJECTIONS}
    state = {f"{name}/{w.name}": w.numpy() for name, pair in layers.items() for w in pair}
    return linear.import_params(state, layout="dense", num_heads=N)[0]


def step(
    name: str, pair: Pair, x: NDArray, torch_mask: NDArray, other_mask: NDArray, meant: NDArray
) -> Step:
    """One state: where the difference comes from, and how far both are from what is meant."""
    first, other = layers(pair, x, torch_mask, other_mask)
    found = attribution.between(first, other, (x, x, x))
    return Step(name, found, (_away(first, x, meant), _away(other, x, meant)))


def _away(layer: Layer, x: NDArray, meant: NDArray) -> float:
    right = oracle.run(layer.params, Semantics(), x, x, x, meant).output
    assert layer.output is not None
    return float(np.linalg.norm(layer.output - right) / np.linalg.norm(right))


def repair(seed: int) -> Iterator[Step]:
    """From the classes as written to the rounding floor, on ragged sequences."""
    pair, x, valid = build(seed), draw(seed, B), padding()
    meant = valid[:, None, None]
    yield step(f"runs: batch of {B}, the number of heads", pair, x, valid, valid, meant)
    share(pair)
    yield step("weights shared", pair, x, valid, valid, meant)
    yield step("mask with an axis for heads", pair, x, valid[:, None], valid[:, None], meant)
    yield step("mask inverted for TensorFlow", pair, x, valid[:, None], ~valid[:, None], meant)


def as_printed(seed: int) -> list[dict[str, Any]]:
    """The number that the third example prints, sum |a - b|, with its mask of ones given an axis."""
    pair, x = build(seed), draw(seed, WRITTEN)
    ones = np.ones((WRITTEN, 1, T), bool)
    found = []
    for shared in (False, True):
        if shared:
            share(pair)
        for name, given in (
            ("mask of ones", (ones, ones)),
            ("no mask", (None, None)),
            ("mask of ones, inverted for TensorFlow", (ones, ~ones)),
        ):
            a, b = run(pair, x, *given)
            total = float(np.abs(a.astype(float) - b).sum())
            row = {"weights": "copied" if shared else "own", "mask": name, "sum": total}
            row["largest"] = float(np.abs(a.astype(float) - b).max())
            found.append(row)
    return found


def drawn_again(seed: int) -> int:
    """How many different weights three builds after `tf.random.set_seed` have."""
    kernels = set()
    for _ in range(3):
        tf.random.set_seed(seed)
        dense = tf.keras.layers.Dense(7)
        dense.build((None, 5))
        kernels.add(dense.kernel.numpy().tobytes())
    return len(kernels)
