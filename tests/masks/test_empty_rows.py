"""The output of a row to which one argument leaves nothing is that of the table."""

from typing import Any

import numpy as np
import pytest

from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.masks import flax, huggingface, jax, keras, sdpa, torch
from tests.masks.draws import Sizes
from tests.masks.frameworks import (
    bert_live,
    flax_live,
    inputs,
    jax_live,
    keras_live,
    params,
    sdpa_live,
    torch_live,
)
from tests.tolerance import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
SIZES = B, N, T, S = Sizes(2, 2, 3, 5)
KEEP = np.ones((B, 1, T, S), bool)
KEEP[1] = False  # all rows of the second batch row
LOW = np.where(KEEP, 0, -np.inf).astype(np.float32)
PADDING = KEEP[:, 0, 0]
LENGTHS = np.array([T, 0], np.int32)
# By table row: path -> the live call and the argument that leaves nothing to batch row 1.
CASES: dict[tuple[Any, int], dict[str, tuple[Any, dict[str, Any]]]] = {
    (torch, 0): {
        "weights": (torch_live(SIZES, True), {"attn_mask": np.repeat(~KEEP[:, 0], N, 0)}),
        "sdpa": (torch_live(SIZES, False), {"attn_mask": np.repeat(~KEEP[:, 0], N, 0)}),
    },
    (torch, 1): {
        "weights": (torch_live(SIZES, True), {"key_padding_mask": ~PADDING}),
        "sdpa": (torch_live(SIZES, False), {"key_padding_mask": ~PADDING}),
    },
    (sdpa, 0): {"": (sdpa_live(SIZES), {"attn_mask": KEEP})},
    **{
        (keras, row): {
            path: (keras_live(SIZES, "gqa", path == "scores"), {name: value})
            for path in ("fused", "scores")
        }
        for row, (name, value) in enumerate(
            {
                "attention_mask": KEEP[:, 0],
                "query_mask": KEEP[:, 0, :, 0],
                "value_mask": PADDING,
                "key_mask": PADDING,
            }.items()
        )
    },
    (flax, 0): {"": (flax_live(SIZES, "linen"), {"mask": KEEP})},
    (jax, 0): {"": (jax_live(SIZES), {"bias": LOW})},
    (jax, 1): {"": (jax_live(SIZES), {"mask": KEEP})},
    (jax, 2): {"": (jax_live(SIZES), {"query_seq_lengths": LENGTHS})},
    (jax, 3): {"": (jax_live(SIZES), {"key_value_seq_lengths": LENGTHS})},
    (huggingface, 1): {
        "floats": (
            bert_live(SIZES, "eager"),
            {"attention_mask": np.where(KEEP, 0, np.finfo("f").min).astype("f")},
        ),
        "Booleans under sdpa": (bert_live(SIZES, "sdpa"), {"attention_mask": KEEP}),
    },
}


def outputs(out: NDArray, groups: int) -> dict[str, NDArray]:
    """The second batch row alone: of heads, or of the layer."""
    if out.ndim == 4:
        mean = inputs(SIZES, layer=False)[2][1].mean(0)
    else:
        weights: Any = params(N, groups)
        value = inputs(SIZES, layer=True)[2][1]
        value = np.einsum("sd,dkh->skh", value, weights.value.kernel) + weights.value.bias
        mean = np.repeat(value.mean(0), N // groups, 0)
    found = {"mean": mean, "zero": 0 * mean, "nan": np.nan * mean}
    if out.ndim == 3:
        found = {
            name: np.einsum("nh,nhd->d", heads, weights.out.kernel) + weights.out.bias
            for name, heads in found.items()
        }
    return {name: np.broadcast_to(row, out[1].shape) for name, row in found.items()}


@pytest.mark.parametrize(("module", "row"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_outputs(module: Any, row: int) -> None:
    table = dict(module.ARGUMENTS[row].empty)
    assert CASES[module, row].keys() <= table.keys()
    for path, (call, arguments) in CASES[module, row].items():
        assert set(arguments) == {module.ARGUMENTS[row].name}
        out = call(**arguments)
        expected = outputs(out, 1 if module is keras else N)[table[path]]
        assert_close(out[1].astype(np.float32), expected, path, factor=4.0)
