"""Sources that cannot be read or held are refused with a message that names them; messages are read here."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxmha import MHAParams, Projection, Semantics
from jaxmha.converters import flax, huggingface, keras, linear, torch
from jaxmha.converters.layout.arrays import NDArray
from tests.converters import layers

N, H, h, Dq, Dk, Dv, Do = 3, 5, 7, 15, 17, 19, 23


def params(*, K: int = N, bias: bool = True, dtype: str = "float32", **sizes: int) -> MHAParams:
    """Random parameters that torch's packed layout holds; `sizes` change one letter at a time."""
    rng = np.random.default_rng(0)
    size = {"Dq": Dq, "Dk": Dq, "Dv": Dq, "Do": Dq, "h": H} | sizes

    def projection(*kernel: int, axes: tuple[int, ...]) -> Projection:
        drawn = rng.normal(size=kernel).astype(dtype)
        return Projection(drawn, rng.normal(size=axes).astype(dtype) if bias else None)

    return MHAParams(
        projection(size["Dq"], N, H, axes=(N, H)),
        projection(size["Dk"], K, H, axes=(K, H)),
        projection(size["Dv"], K, size["h"], axes=(K, size["h"])),
        projection(N, size["h"], size["Do"], axes=(size["Do"],)),
    )


def state(converter: Any, given: MHAParams | None = None, **options: Any) -> dict[str, NDArray]:
    """A good flat dict to spoil."""
    exported: dict[str, NDArray] = converter.export_params(given or params(), **options)
    return exported


def without(arrays: dict[str, NDArray], *keys: str) -> dict[str, NDArray]:
    """The dict less some keys, which have to be there."""
    assert set(keys) <= arrays.keys()
    return {key: array for key, array in arrays.items() if key not in keys}


def bias_kv(given: MHAParams) -> MHAParams:
    """With torch's learned extra position."""
    return given._replace(bias_k=np.ones((N, H), np.float32), bias_v=np.ones((N, H), np.float32))


def qk_norm(given: MHAParams) -> MHAParams:
    """With flax's scales."""
    return given._replace(query_norm=np.ones(H, np.float32), key_norm=np.ones(H, np.float32))


def no_out(given: MHAParams) -> MHAParams:
    """Heads concatenated."""
    return given._replace(out=None)


def only_query_bias(given: MHAParams) -> MHAParams:
    """A partial set of biases."""
    return given._replace(key=given.key._replace(bias=None), value=given.value._replace(bias=None))


packed = state(torch)
separate = state(torch, params(Dk=Dk, Dv=Dv))
linen_tree = state(flax)
variables = state(keras)
bert = state(huggingface)
ones = np.ones((7, 7), np.float32)

IMPORTS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "unknown key": (
        torch,
        packed | {"in_proj_wieght": ones},
        {"num_heads": N},
        r"unknown key 'in_proj_wieght': layout torch has in_proj_weight, ",
    ),
    "unknown key under a prefix": (
        torch,
        {f"a.{key}": x for key, x in packed.items()} | {"a.extra": ones},
        {"num_heads": N, "prefix": "a"},
        r"unknown key 'extra' under prefix 'a'",
    ),
    "missing required key": (
        torch,
        without(packed, "out_proj.weight"),
        {"num_heads": N},
        (
            r"no known layout has all its keys: torch lacks out_proj.weight; torch-separate lacks "
            r"q_proj_weight"
        ),
    ),
    "missing key of a named layout": (
        torch,
        without(packed, "out_proj.weight"),
        {"num_heads": N, "layout": "torch"},
        r"missing key 'out_proj.weight': layout torch needs it",
    ),
    "nothing under the prefix": (
        torch,
        packed,
        {"num_heads": N, "prefix": "encoder"},
        r"no known layout has all its keys under prefix 'encoder'",
    ),
    "unknown layout": (
        torch,
        packed,
        {"num_heads": N, "layout": "touch"},
        r"unknown layout 'touch': did you mean torch\? known are torch, torch-separate",
    ),
    "missing num_heads": (
        torch,
        packed,
        {},
        r"layout torch does not store the head count: pass num_heads=",
    ),
    "missing num_heads, bert": (
        huggingface,
        bert,
        {},
        r"layout bert does not store the head count: pass num_heads=",
    ),
    "num_heads that does not divide": (
        torch,
        packed,
        {"num_heads": 4},
        r"in_proj_weight: expected axes \(\(qkv N H\), Dq\) with qkv=3, N=4, got shape \(45, 15\)",
    ),
    "num_heads that contradicts a shape": (
        keras,
        variables,
        {"num_heads": 5},
        r"query/kernel: expected axes \(Dq, N, H\) with N=5, got shape \(15, 3, 5\)",
    ),
    "wrong width": (
        torch,
        packed | {"out_proj.bias": np.ones(16, np.float32)},
        {"num_heads": N},
        r"out_proj.bias: expected axes \(Do\) with Do=15, got shape \(16,\)",
    ),
    "packed array not a multiple of three": (
        torch,
        packed | {"in_proj_bias": np.ones(44, np.float32)},
        {"num_heads": N},
        r"in_proj_bias: expected axes .*qkv=3.* got shape \(44,\)",
    ),
    "transposed, not square": (
        torch,
        separate | {"k_proj_weight": separate["k_proj_weight"].T},
        {"num_heads": N},
        r"k_proj_weight: expected axes .*N=3, H=5.* got shape \(17, 15\)",
    ),
    "too few axes": (
        keras,
        variables | {"key/kernel": np.ones((15, 15), np.float32)},
        {},
        (
            r"key/kernel: expected .*\(Dk N H\).* got shape \(15, 15\)|"
            r"key/kernel: expected axes \(Dk, N, H\).* got shape \(15, 15\)"
        ),
    ),
    "one array stacked and the others not": (
        keras,
        variables | {"key/kernel": np.ones((2, 15, 3, 5), np.float32)},
        {},
        r"key/kernel: expected leading axes \(\) as in query/kernel.* got shape \(2, 15, 3, 5\)",
    ),
    "embed_dim is not N * H": (
        torch,
        packed
        | {
            "out_proj.weight": np.ones((17, 15), np.float32),
            "out_proj.bias": np.ones(17, np.float32),
        },
        {"num_heads": N},
        r"layout torch cannot hold Do=17 with Dq=15: out_proj .* is square",
    ),
    "bias without its partner": (
        torch,
        without(packed, "in_proj_bias"),
        {"num_heads": N},
        (
            r"missing key 'in_proj_bias': layout torch needs it, which comes with in_proj_bias, "
            r"out_proj.bias"
        ),
    ),
    "bias of one projection": (
        keras,
        without(variables, "key/bias", "value/bias", "attention_output/bias"),
        {},
        r"missing key 'key/bias', 'value/bias', 'attention_output/bias': layout keras needs it",
    ),
    "bias_k without bias_v": (
        torch,
        packed | {"bias_k": np.ones((1, 1, 15), np.float32)},
        {"num_heads": N},
        r"missing key 'bias_v': layout torch needs it, which comes with bias_k, bias_v",
    ),
    "packed and separate weights": (
        torch,
        packed | {"q_proj_weight": ones},
        {"num_heads": N},
        r"unknown key 'q_proj_weight': layout torch has in_proj_weight",
    ),
    "query_ln without key_ln": (
        flax,
        linen_tree | {"query_ln/scale": np.ones(5, np.float32)},
        {},
        r"missing key 'key_ln/scale': layout flax needs it",
    ),
    "bert without biases": (
        huggingface,
        without(bert, "self.key.bias"),
        {"num_heads": N},
        r"no known layout has all its keys: bert lacks self.key.bias",
    ),
    "many layouts, none near": (
        linear,
        {"a": np.ones(3)},
        {"num_heads": N},
        r"keys: linear lacks q_proj.weight, [^;]*(; [^;]* lacks [^;]*){3}; \d+ more lack no fewer$",
    ),
}


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


P, Change = params(), Callable[[MHAParams], MHAParams]
EXPORTS: dict[str, tuple[Any, MHAParams, Semantics, dict[str, Any], str]] = {}


def refuse(
    name: str,
    converter: Any,
    given: MHAParams,
    message: str,
    semantics: Semantics = Semantics(),
    **options: Any,
) -> None:
    """Adds a row to EXPORTS; a converter of several models' layouts is asked for the first."""
    assert name not in EXPORTS
    if converter in (huggingface, keras):
        options = {"layout": converter.LAYOUTS[0].name} | options
    EXPORTS[name] = (converter, given, semantics, options, message)


refuse(
    "D != N * H into torch",
    torch,
    params(Dq=17, Dk=17, Dv=17, Do=17),
    r"layout torch cannot hold Dq=17 with N=3 \* H=5: .* embed_dim / num_heads",
)
refuse("Do != Dq into torch", torch, params(Do=Do), r"torch cannot hold Do=23 with Dq=15: .*square")
refuse("value_dim into torch", torch, params(h=h), r"torch cannot hold h=7 with H=5")
refuse(
    "widths into torch packed",
    torch,
    params(Dk=Dk),
    r"torch cannot hold Dk=17 with Dq=15: .* \(see torch-separate\)",
    layout="torch",
)
refuse("Do != Dq into bert", huggingface, params(Do=Do), r"bert cannot hold Do=23 with Dq=15")
refuse("value_dim into flax", flax, params(h=h), r"layout flax cannot hold h=7 with H=5: flax")
for target in (torch, keras, huggingface):
    layout_name = target.LAYOUTS[0].name
    refuse(
        f"GQA into {layout_name}",
        target,
        params(K=1),
        rf"layout {layout_name} cannot hold K=1 with N=3: ",
    )
    refuse(
        f"qk_norm into {layout_name}",
        target,
        qk_norm(P),
        rf"layout {layout_name} cannot hold query_norm, key_norm: it has no such parameter",
        Semantics(qk_norm="layer"),
    )
    refuse(
        f"dropout_broadcast into {layout_name}",
        target,
        P,
        rf"layout {layout_name} cannot hold semantics.dropout_broadcast=\('B', 'N'\)",
        Semantics(dropout_rate=0.1, dropout_broadcast=("B", "N")),
    )
for target in (keras, flax, huggingface):
    layout_name = target.LAYOUTS[0].name
    refuse(
        f"bias_k into {layout_name}",
        target,
        bias_kv(P),
        rf"layout {layout_name} cannot hold bias_k, bias_v: it has no such parameter",
    )
    refuse(
        f"add_zero_attn into {layout_name}",
        target,
        P,
        rf"layout {layout_name} cannot hold semantics.add_zero_attn=True",
        Semantics(add_zero_attn=True),
    )
for target in (torch, keras, flax, huggingface):
    layout_name = target.LAYOUTS[0].name
    refuse(
        f"scale into {layout_name}",
        target,
        P,
        rf"layout {layout_name} cannot hold semantics.scale=0.5: its layer always has 0.44",
        Semantics(scale=0.5),
    )
    refuse(
        f"soft cap into {layout_name}",
        target,
        P,
        rf"layout {layout_name} cannot hold semantics.logits_soft_cap=30.0",
        Semantics(logits_soft_cap=30.0),
    )
    refuse(
        f"no output layer into {layout_name}",
        target,
        no_out(P),
        rf"layout {layout_name} needs out.kernel",
    )
    refuse(
        f"partial biases into {layout_name}",
        target,
        only_query_bias(P),
        r"(needs key.bias, value.bias|together or not at all; there: .*query.bias.*; "
        r"missing: key.bias, value.bias)",
    )
    refuse(
        f"unknown layout of {layout_name}", target, P, r"unknown layout 'x': known are", layout="x"
    )
refuse(
    "rms norm into flax",
    flax,
    qk_norm(P),
    r"flax cannot hold semantics.qk_norm='rms': its layer always has 'layer'",
    Semantics(qk_norm="rms"),
)
refuse(
    "epsilon into flax",
    flax,
    qk_norm(P),
    r"flax cannot hold semantics.qk_norm_epsilon=0.1",
    Semantics(qk_norm="layer", qk_norm_epsilon=0.1),
)
refuse(
    "mixed dtypes in a packed array",
    torch,
    P._replace(key=P.key._replace(kernel=np.asarray(P.key.kernel, np.float16))),
    r"in_proj_weight packs arrays of one dtype, got query.kernel float32, key.kernel float16",
    layout="torch",
)
refuse(
    "shapes that contradict each other",
    torch,
    P._replace(value=P.value._replace(bias=np.ones((N, 6), np.float32))),
    r"params.value.bias: expected axes \(K, h\) with K=3, h=5, got shape \(3, 6\)",
)


@pytest.mark.parametrize("name", EXPORTS)
def test_export_refuses(name: str) -> None:
    converter, given, semantics, options, message = EXPORTS[name]
    with pytest.raises(ValueError, match=message):
        converter.export_params(given, semantics, **options)


def test_evaluation_and_defaults_are_no_weights() -> None:
    """A rate of dropout without axes shares nothing, H ** -0.5 is the default."""
    for same in (
        Semantics(scale=H**-0.5, dropout_broadcast=("B",), dropout_rate=0.0),
        Semantics(dropout_rate=0.2),
        Semantics(fully_masked="nan", softmax_dtype="float32", precision="highest"),
    ):
        layers.assert_identical(torch.export_params(P, same), packed)
