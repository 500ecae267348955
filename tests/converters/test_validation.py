"""Sources that cannot be read or held are refused with a message that names them; messages are read here."""

from typing import Any

import numpy as np
import pytest

from jaxmha import MHAParams, Projection, Semantics
from jaxmha.converters import flax, huggingface, keras, linear, torch
from jaxmha.converters.layout.arrays import NDArray
from tests.converters import layers

N, H, h, Dq, Dk, Dv, Do = 3, 5, 7, 15, 17, 19, 23


def params(*, K: int = N, dtype: str = "float32", **sizes: int) -> MHAParams:
    """Random parameters that torch's packed layout holds; `sizes` change one letter at a time."""
    rng = np.random.default_rng(0)
    size = {"Dq": Dq, "Dk": Dq, "Dv": Dq, "Do": Dq, "h": H} | sizes

    def projection(*kernel: int, axes: tuple[int, ...]) -> Projection:
        return Projection(
            rng.normal(size=kernel).astype(dtype), rng.normal(size=axes).astype(dtype)
        )

    return MHAParams(
        projection(size["Dq"], N, H, axes=(N, H)),
        projection(size["Dk"], K, H, axes=(K, H)),
        projection(size["Dv"], K, size["h"], axes=(K, size["h"])),
        projection(N, size["h"], size["Do"], axes=(size["Do"],)),
    )


def state(converter: Any, given: MHAParams | None = None) -> dict[str, NDArray]:
    """A good flat dict to spoil."""
    exported: dict[str, NDArray] = converter.export_params(given or params())
    return exported


def without(arrays: dict[str, NDArray], *keys: str) -> dict[str, NDArray]:
    """The dict less some keys, which have to be there."""
    assert set(keys) <= arrays.keys()
    return {key: array for key, array in arrays.items() if key not in keys}


def only_query_bias(given: MHAParams) -> MHAParams:
    """A partial set of biases."""
    return given._replace(key=given.key._replace(bias=None), value=given.value._replace(bias=None))


packed = state(torch)
separate = state(torch, params(Dk=Dk, Dv=Dv))
linen_tree = state(flax)
variables = state(keras)
bert = state(huggingface)
ones = np.ones((7, 7), np.float32)

# A converter, tensors, options and the message; those of named layouts are in `test_export_validation`.
IMPORTS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "unknown key": (
        torch, packed | {"in_proj_wieght": ones}, {"num_heads": N},
        r"unknown key 'in_proj_wieght': layout torch has in_proj_weight, ",
    ),
    "missing required key": (
        torch, without(packed, "out_proj.weight"), {"num_heads": N},
        r"all its keys: torch lacks out_proj.weight; torch-separate lacks q_proj_weight",
    ),
    "nothing under the prefix": (
        torch, packed, {"num_heads": N, "prefix": "encoder"},
        r"no known layout has all its keys under prefix 'encoder'",
    ),
    "unknown layout": (
        torch, packed, {"num_heads": N, "layout": "touch"},
        r"unknown layout 'touch': did you mean torch\? known are torch, torch-separate",
    ),
    "num_heads that does not divide": (
        torch, packed, {"num_heads": 4},
        r"in_proj_weight: expected axes \(\(qkv N H\), Dq\) with qkv=3, N=4, got shape \(45, 15\)",
    ),
    "num_heads that contradicts a shape": (
        keras, variables, {"num_heads": 5},
        r"query/kernel: expected axes \(Dq, N, H\) with N=5, got shape \(15, 3, 5\)",
    ),
    "wrong width": (
        torch, packed | {"out_proj.bias": np.ones(16, np.float32)}, {"num_heads": N},
        r"out_proj.bias: expected axes \(Do\) with Do=15, got shape \(16,\)",
    ),
    "packed array not a multiple of three": (
        torch, packed | {"in_proj_bias": np.ones(44, np.float32)}, {"num_heads": N},
        r"in_proj_bias: expected axes .*qkv=3.* got shape \(44,\)",
    ),
    "transposed, not square": (
        torch, separate | {"k_proj_weight": separate["k_proj_weight"].T}, {"num_heads": N},
        r"k_proj_weight: expected axes .*N=3, H=5.* got shape \(17, 15\)",
    ),
    "too few axes": (
        keras, variables | {"key/kernel": np.ones((15, 15), np.float32)}, {},
        r"key/kernel: expected .*(\(Dk N H\)|\(Dk, N, H\)).* got shape \(15, 15\)",
    ),
    "bias without its partner": (
        torch, without(packed, "in_proj_bias"), {"num_heads": N},
        r"'in_proj_bias': layout torch needs it, which comes with in_proj_bias, out_proj.bias",
    ),
    "bias of one projection": (
        keras, without(variables, "key/bias", "value/bias", "attention_output/bias"), {},
        r"missing key 'key/bias', 'value/bias', 'attention_output/bias': layout keras needs it",
    ),
    "bias_k without bias_v": (
        torch, packed | {"bias_k": np.ones((1, 1, 15), np.float32)}, {"num_heads": N},
        r"missing key 'bias_v': layout torch needs it, which comes with bias_k, bias_v",
    ),
    "packed and separate weights": (
        torch, packed | {"q_proj_weight": ones}, {"num_heads": N},
        r"unknown key 'q_proj_weight': layout torch has in_proj_weight",
    ),
    "query_ln without key_ln": (
        flax, linen_tree | {"query_ln/scale": np.ones(5, np.float32)}, {},
        r"missing key 'key_ln/scale': layout flax needs it",
    ),
    "bert without biases": (
        huggingface, without(bert, "self.key.bias"), {"num_heads": N},
        r"no known layout has all its keys: bert lacks self.key.bias",
    ),
    "many layouts, none near": (
        linear, {"a": np.ones(3)}, {"num_heads": N},
        r"keys: linear lacks q_proj.weight, [^;]*(; [^;]* lacks [^;]*){3}; \d+ more lack no fewer$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPORTS)
def test_import_refuses(name: str) -> None:
    converter, arrays, options, message = IMPORTS[name]
    kept = {key: array.copy() for key, array in arrays.items()}
    with pytest.raises(ValueError, match=message):
        converter.import_params(arrays, **options)
    layers.assert_identical(arrays, kept)


def test_what_is_spoiled_above_was_good() -> None:
    for converter, arrays, options in (
        (torch, packed, {"num_heads": N}),
        (torch, separate, {"num_heads": N}),
        (keras, variables, {}),
        (flax, linen_tree, {}),
        (huggingface, bert, {"num_heads": N}),
    ):
        found, _ = converter.import_params(arrays, **options)
        assert found.query.kernel.shape == (Dq, N, H)


P = params()
# Every other error of an export is in `test_export_validation`, made from the layouts.
EXPORTS: dict[str, tuple[MHAParams, dict[str, Any], str]] = {
    "unknown layout": (P, {"layout": "x"}, r"unknown layout 'x': known are"),
    "no layout holds it": (
        params(Dq=17, Dk=17, Dv=17, Do=17), {},
        r"layout torch cannot hold Dq=17 with N=3 \* H=5: .* embed_dim / num_heads",
    ),
    "partial biases": (
        only_query_bias(P), {},
        r"together or not at all; there: .*query.bias.*; missing: key.bias, value.bias",
    ),
    "shapes that contradict each other": (
        P._replace(value=P.value._replace(bias=np.ones((N, 6), np.float32))), {},
        r"params.value.bias: expected axes \(K, h\) with K=3, h=5, got shape \(3, 6\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPORTS)
def test_export_refuses(name: str) -> None:
    given, options, message = EXPORTS[name]
    with pytest.raises(ValueError, match=message):
        torch.export_params(given, **options)


def test_evaluation_and_defaults_are_no_weights() -> None:
    """A rate of dropout without axes shares nothing, H ** -0.5 is the default."""
    for same in (
        Semantics(scale=H**-0.5, dropout_broadcast=("B",), dropout_rate=0.0),
        Semantics(dropout_rate=0.2),
        Semantics(fully_masked="nan", softmax_dtype="float32", precision="highest"),
    ):
        layers.assert_identical(torch.export_params(P, same), packed)
