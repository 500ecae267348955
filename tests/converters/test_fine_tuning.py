"""An imported encoder, trained on in optax and in torch, and exported back."""

import pytest

from experiments.encoders import finetune
from jaxmha.converters.layout.arrays import to_numpy

N, D, HIDDEN, LAYERS = 3, 6, 11, 1


@pytest.mark.slow
@pytest.mark.parametrize("optimiser", ["SGD", "Adam"])
def test_fine_tuning_an_import_ends_where_torch_does(optimiser: str) -> None:
    import torch

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(D, N, HIDDEN)
    model = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).double()
    state = {name: to_numpy(tensor) for name, tensor in model.state_dict().items()}
    tuned = finetune.tune(state, D, N, LAYERS, optimiser)
    assert tuned.moved > 1e-3
    # Adam divides by the root of the squared gradient plus 1e-8: what is zero but for rounding,
    # about 1e-17, moves by up to RATE * 1e-17 / 1e-8 in every step.
    assert tuned.weights < {"SGD": 1e-14, "Adam": 1e-9}[optimiser]
    assert tuned.outputs < 1e-8
