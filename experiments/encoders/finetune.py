"""Three steps of the same optimiser in optax and in torch, from the same imported weights.

In float64, since Adam divides by the root of the squared gradient: where a gradient is zero but
for rounding, as every key bias's is, float32 steps have the size of the learning rate and the sign
of the rounding error.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.encoders.models import Encoder, flat, load
from jaxmha import Mask, checkpoint
from jaxmha.converters.layout.arrays import NDArray, to_numpy, to_torch
from jaxmha.converters.migrate import pipeline

STEPS, RATE, LENGTHS, T = 3, 0.01, (7, 5, 2), 7
OPTIMISERS: dict[str, tuple[Any, dict[str, float]]] = {
    "SGD": (lambda: optax.sgd(RATE, momentum=0.9), {"momentum": 0.9}),
    "Adam": (lambda: optax.adam(RATE), {}),
}


@dataclass
class Tuned:
    """Largest change of a weight by the steps, and largest differences of optax from torch."""

    optimiser: str
    moved: float
    weights: float
    outputs: float


def run(folder: Path, optimiser: str) -> Tuned:
    """Fine-tunes the encoder of a SCEPTR variant in both."""
    config = json.loads((folder / "config.json").read_text())
    stack = config["model"]["self_attention_stack"]["initargs"]
    with checkpoint.open(folder / "state_dict.pt") as file:
        start = "_self_attention_stack._standard_stack._self_attention_stack."
        names = [name for name in file if name.startswith(start)]
        state = {name.removeprefix(start): file[name].astype(np.float64) for name in names}
    return tune(state, stack["d_model"], stack["nhead"], stack["num_layers"], optimiser)


def tune(state: Mapping[str, NDArray], D: int, heads: int, layers: int, optimiser: str) -> Tuned:
    """Fine-tunes a `torch.nn.TransformerEncoder` with this state dict in both.

    The loss is the mean squared distance of real tokens to random targets, without dropout.
    """
    rng = np.random.default_rng(0)
    x, wanted = rng.normal(size=(2, len(LENGTHS), T, D))
    valid = np.arange(T) < np.array(LENGTHS)[:, None]
    theirs = _torch(state, D, heads, layers)
    _steps_in_torch(theirs, x, wanted, valid, optimiser)
    # flax's own norms promote dtypes by themselves
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        hidden = len(state["layers.0.linear1.bias"])
        model = Encoder(D, heads, layers, hidden, dtype=jnp.float64)
        if unused := load(model, pipeline.convert_state(state, to="flax", num_heads=heads)):
            raise ValueError(f"no place for {unused}")
        _steps_in_jax(model, x, wanted, valid, optimiser)
        tuned = {name: np.asarray(array) for name, array in flat(model).items()}
    back = pipeline.convert_state(tuned, to="torch")
    expected = {name: to_numpy(tensor) for name, tensor in theirs.state_dict().items()}
    if back.keys() != expected.keys():
        raise ValueError(f"other names came back: {sorted(back.keys() ^ expected.keys())}")
    again = _torch(back, D, heads, layers)
    outputs = [_forward(one, x, valid)[valid] for one in (theirs, again)]
    return Tuned(
        optimiser,
        max(float(np.abs(expected[name] - state[name]).max()) for name in state),
        max(float(np.abs(expected[name] - back[name]).max()) for name in state),
        float(np.abs(outputs[0] - outputs[1]).max()),
    )


def _torch(state: Mapping[str, NDArray], D: int, heads: int, layers: int) -> Any:
    """A stock encoder, loaded strictly."""
    import torch

    hidden = len(state["layers.0.linear1.bias"])
    layer = torch.nn.TransformerEncoderLayer(D, heads, hidden, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).double()
    model.load_state_dict({name: to_torch(array) for name, array in state.items()}, strict=True)
    return model.eval()


def _forward(model: Any, x: NDArray, valid: NDArray) -> NDArray:
    import torch

    with torch.no_grad():
        return to_numpy(model(to_torch(x), src_key_padding_mask=to_torch(~valid)))


def _steps_in_torch(
    model: Any, x: NDArray, wanted: NDArray, valid: NDArray, optimiser: str
) -> None:
    import torch

    settings = OPTIMISERS[optimiser][1]
    steps = getattr(torch.optim, optimiser)(model.parameters(), lr=RATE, **settings)
    real = to_torch(valid)
    for _ in range(STEPS):
        steps.zero_grad()
        out = model(to_torch(x), src_key_padding_mask=~real)
        (out - to_torch(wanted))[real].square().mean().backward()
        steps.step()


def _steps_in_jax(
    model: Encoder, x: NDArray, wanted: NDArray, valid: NDArray, optimiser: str
) -> None:
    steps = nnx.Optimizer(model, OPTIMISERS[optimiser][0](), wrt=nnx.Param)
    mask = Mask.padding(key_value=jnp.asarray(valid))

    def loss(model: Encoder) -> jax.Array:
        real = jnp.asarray(valid)[..., None]
        squares: jax.Array = jnp.square(model(jnp.asarray(x), mask) - wanted) * real
        count: jax.Array = real.sum() * x.shape[-1]
        return squares.sum() / count

    def step(model: Encoder, steps: Any) -> None:
        steps.update(model, nnx.grad(loss)(model))

    compiled = nnx.jit(step)
    for _ in range(STEPS):
        compiled(model, steps)
