"""A second bias of recurrent layers that the model lacks is refused, with the reason, unless it is zero."""

from typing import Any

import pytest
import torch
from flax import nnx

from jaxmha.converters import flax
from jaxmha.converters.matching import Line, Plan, prove

I, H = 3, 5
CELLS: dict[str, Any] = {
    "gru": (torch.nn.GRU, nnx.GRUCell, ("dense_i/bias", "dense_i/kernel", "dense_h/kernel")),
    "lstm": (
        torch.nn.LSTM,
        nnx.OptimizedLSTMCell,
        ("dense_h/bias", "dense_i/kernel", "dense_h/kernel"),
    ),
}
WHY = {"gru": "inside the product with the gate r", "lstm": r"first add it to bias_ih_l0 in a dict"}


@pytest.mark.parametrize("which", CELLS)
def test_a_second_bias_without_a_place_is_noted_unless_it_is_zero(which: str) -> None:
    make, cell, targets = CELLS[which]
    source, model = make(I, H), cell(I, H, rngs=nnx.Rngs(0))
    names = ("bias_ih_l0", "weight_ih_l0", "weight_hh_l0")
    plan = Plan(
        tuple(
            Line(target, (name,), "o i -> i o" if "weight" in name else "")
            for target, name in zip(targets, names, strict=True)
        )
    )
    with pytest.raises(ValueError, match=f"no place for bias_hh_l0.*{WHY[which]}.*unused='keep'"):
        flax.load_into(model, source, plan)
    flax.load_into(model, source, plan, unused="keep")
    (note,) = prove(source, model, plan, unused="keep").notes
    assert "bias_hh_l0 is not zero" in note
    torch.nn.init.zeros_(source.bias_hh_l0)
    assert not prove(source, model, plan, unused="keep").notes
