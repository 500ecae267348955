"""Whole encoders in Flax, of random weights, next to torch's; the published ones are an experiment."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from experiments.encoders.models import Encoder, flat, load
from jaxmha import Mask
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.verify import oracle
from tests.drawn import to_jax

N, D, HIDDEN, LAYERS = 3, 6, 11, 1
LENGTHS, T = (7, 4, 1), 7
PRESENT = np.arange(T) < np.array(LENGTHS)[:, None]


def randomised(model: Any) -> dict[str, NDArray]:
    """Gives a torch model random weights, biases and norms; its state."""
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = 0.3 * rng.normal(size=tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(drawn))
    return {name: to_numpy(tensor) for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def encoder() -> tuple[Any, dict[str, NDArray]]:
    layer = torch.nn.TransformerEncoderLayer(D, N, HIDDEN, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval()
    return model, randomised(model)


def error(out: NDArray, exact: NDArray) -> float:
    """RMS error in rounding floors of the output."""
    difference = np.asarray(out, np.float64) - exact
    floor = oracle.rounding_floor(exact, np.dtype(np.float32))
    return float(np.sqrt(np.mean(np.square(difference)))) / floor


def test_encoder_equals_torch_s(encoder: tuple[Any, dict[str, NDArray]]) -> None:
    theirs, state = encoder
    model = Encoder(D, N, LAYERS, HIDDEN)
    assert load(model, pipeline.convert_state(state, to="flax", num_heads=N)) == []
    x = np.random.default_rng(1).normal(size=(len(LENGTHS), T, D)).astype(np.float32)
    padding = torch.from_numpy(~PRESENT)
    with torch.no_grad():
        out = theirs(torch.from_numpy(x), src_key_padding_mask=padding).numpy()[PRESENT]
        exact = theirs.double()(torch.from_numpy(x).double(), src_key_padding_mask=padding)
        theirs.float()
    mask = Mask.padding(key_value=to_jax(PRESENT))
    ours = np.asarray(nnx.jit(lambda m, x: m(x, mask))(model, jnp.asarray(x)))[PRESENT]
    assert error(ours, exact.numpy()[PRESENT]) <= 2 * error(out, exact.numpy()[PRESENT])
    back = pipeline.convert_state(flat(model), to="torch")
    assert {name: array.tobytes() for name, array in back.items()} == {
        name: array.tobytes() for name, array in state.items()
    }


def test_loading_is_strict(encoder: tuple[Any, dict[str, NDArray]]) -> None:
    tensors = pipeline.convert_state(encoder[1], to="flax", num_heads=N)
    model = Encoder(D, N, LAYERS, HIDDEN)
    assert load(model, tensors | {"mine": np.zeros(3)}) == ["mine"]
    with pytest.raises(ValueError, match="no layers/0/linear1/bias"):
        load(model, {k: x for k, x in tensors.items() if k != "layers/0/linear1/bias"})
    with pytest.raises(ValueError, match=r"norm1/scale: float32 \(5,\) for float32 \(6,\)"):
        load(model, tensors | {"layers/0/norm1/scale": np.zeros(5, np.float32)})
