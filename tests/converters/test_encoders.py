"""Whole encoders in Flax, of random weights, next to torch's; the published ones are an experiment."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.encoders.models import Bert, Encoder, flat, load, sentence_embeddings
from jaxmha import Mask
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.verify import oracle

OPTIMISED = True
N, D, HIDDEN, LAYERS = 3, 6, 11, 1
LENGTHS, T = (7, 4, 1), 7
PRESENT = np.arange(T) < np.array(LENGTHS)[:, None]


def randomised(model: Any) -> dict[str, NDArray]:
    """Gives a torch model random weights, biases and norms; its state."""
    import torch

    rng = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = 0.3 * rng.normal(size=tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(drawn))
    return {name: to_numpy(tensor) for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def encoder() -> tuple[Any, dict[str, NDArray]]:
    import torch

    layer = torch.nn.TransformerEncoderLayer(D, N, HIDDEN, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval()
    return model, randomised(model)


def error(out: NDArray, exact: NDArray) -> float:
    """RMS error in rounding floors of the output."""
    difference = np.asarray(out, np.float64) - exact
    floor = oracle.rounding_floor(exact, np.dtype(np.float32))
    return float(np.sqrt(np.mean(np.square(difference)))) / floor


def test_encoder_equals_torch_s(encoder: tuple[Any, dict[str, NDArray]]) -> None:
    import torch

    theirs, state = encoder
    model = Encoder(D, N, LAYERS, HIDDEN)
    assert load(model, pipeline.convert_state(state, to="flax", num_heads=N)) == []
    x = np.random.default_rng(1).normal(size=(len(LENGTHS), T, D)).astype(np.float32)
    padding = torch.from_numpy(~PRESENT)
    with torch.no_grad():
        out = theirs(torch.from_numpy(x), src_key_padding_mask=padding).numpy()[PRESENT]
        exact = theirs.double()(torch.from_numpy(x).double(), src_key_padding_mask=padding)
        theirs.float()
    mask = Mask.padding(key_value=jnp.asarray(PRESENT))
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


@pytest.mark.filterwarnings("default")
@pytest.mark.slow
def test_bert_equals_transformers() -> None:
    import torch
    import transformers

    config = transformers.BertConfig(
        hidden_size=D, num_attention_heads=N, num_hidden_layers=1, intermediate_size=HIDDEN,
        vocab_size=17, max_position_embeddings=T,
    )  # fmt: skip
    theirs = transformers.BertModel(config).eval()
    state = randomised(theirs)
    model = Bert(config.to_dict())
    assert load(model, pipeline.convert_state(state, to="flax", num_heads=N)) == []
    tokens = np.random.default_rng(1).integers(0, 17, (len(LENGTHS), T))
    mask = torch.from_numpy(PRESENT.astype(int))

    def in_torch() -> tuple[NDArray, NDArray]:
        with torch.no_grad():
            out = theirs(torch.from_numpy(tokens), attention_mask=mask)
        return out.last_hidden_state.numpy(), out.pooler_output.numpy()

    plain, _ = in_torch(), theirs.double()
    exact = in_torch()
    states, pooled = model(jnp.asarray(tokens), jnp.asarray(LENGTHS))
    assert error(np.asarray(pooled), exact[1]) <= 2 * error(plain[1], exact[1])
    ours = np.asarray(states)[PRESENT]
    assert error(ours, exact[0][PRESENT]) <= 2 * error(plain[0][PRESENT], exact[0][PRESENT])
    vectors = np.asarray(sentence_embeddings(states, jnp.asarray(LENGTHS)))
    mean = (exact[0] * PRESENT[..., None]).sum(1) / PRESENT.sum(1, keepdims=True)
    expected = mean / np.linalg.norm(mean, axis=-1, keepdims=True)
    np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-6)
