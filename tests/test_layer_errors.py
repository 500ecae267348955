"""Wrong parameters and arguments of a layer are refused as those of attention are."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxmha
from jaxmha import MHAParams, Semantics
from jaxmha.converters import torch as convert
from tests import layer_cases
from tests.layer_cases import LAYERS
from tests.test_errors import refused, zeros
from tests.test_layer import params_of

pytestmark = pytest.mark.usefixtures("no_shape_hook")


# Dq=17 Dk=19 Dv=23 Do=29
LAYER = replace(LAYERS[0], leaves=(*LAYERS[0].leaves, "bias_k", "bias_v"))


LEAVES, INPUTS, _ = layer_cases.layer_arrays(LAYER)


PARAMS: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "features of the query": ({"query.kernel": zeros(5, 6, 11)}, ValueError,
        ["query", "*B, T, Dq", "Dq=5", "(2, 5, 17)"]),
    "flat kernel": ({"query.kernel": zeros(17, 66)}, ValueError,
        ["params.query.kernel", "Dq, N, H", "(17, 66)"]),
    "head dim of the key": ({"key.kernel": zeros(19, 3, 5)}, ValueError,
        ["params.key.kernel", "Dk, K, H", "H=11", "(19, 3, 5)"]),
    "heads of the value": ({"value.kernel": zeros(23, 6, 13)}, ValueError,
        ["params.value.kernel", "Dv, K, h", "K=3", "(23, 6, 13)"]),
    "flat bias": ({"query.bias": zeros(66)}, ValueError, ["params.query.bias", "N, H", "(66,)"]),
    "transposed bias": ({"key.bias": zeros(11, 3)}, ValueError,
        ["params.key.bias", "K, H", "(11, 3)"]),
    "out before heads": ({"out.kernel": zeros(29, 6, 13)}, ValueError,
        ["params.out.kernel", "N, h, Do", "N=6", "(29, 6, 13)"]),
    "out bias": ({"out.bias": zeros(17)}, ValueError, ["params.out.bias", "Do=29", "(17,)"]),
    "heads that do not divide": ({"key.kernel": zeros(19, 4, 11), "key.bias": zeros(4, 11),
        "value.kernel": zeros(23, 4, 13), "value.bias": zeros(4, 13), "bias_k": zeros(4, 11),
        "bias_v": zeros(4, 13)}, ValueError, ["N=6", "K=4", "multiple"]),
    "bias_k alone": ({"bias_v": None}, ValueError, ["bias_k", "bias_v"]),
    "bias_v of another size": ({"bias_v": zeros(3, 11)}, ValueError,
        ["params.bias_v", "K, h", "(3, 11)"]),
    "norms that nothing asks for": ({"query_norm": zeros(11), "key_norm": zeros(11)}, ValueError,
        ["qk_norm", "query_norm"]),
    "integer kernel": ({"query.kernel": zeros(17, 6, 11, dtype=np.int8)}, TypeError,
        ["params.query.kernel", "int8"]),
    "float64 leaf": ({"out.bias": zeros(29, dtype=np.float64)}, TypeError,
        ["params", "out", "bias", "float64"]),
}  # fmt: skip


def layer(leaves: dict[str, Any], arguments: dict[str, Any]) -> Callable[..., Any]:
    """The layer as a function of every array."""
    params: MHAParams = params_of({n: x for n, x in leaves.items() if x is not None})
    return lambda **inputs: jaxmha.multi_head_attention(params, **inputs, **arguments)


@pytest.mark.parametrize("what", PARAMS)
def test_params(what: str) -> None:
    change, error, texts = PARAMS[what]
    refused(layer(LEAVES | change, {}), INPUTS, error, texts)


LAYER_ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "key of other features": ({"key": zeros(2, 7, 17)}, ValueError,
        ["key", "*B, S, Dk", "Dk=19", "(2, 7, 17)"]),
    "value of another length": ({"value": zeros(2, 5, 23)}, ValueError,
        ["value", "*B, S, Dv", "S=7", "(2, 5, 23)"]),
    "key of another batch": ({"key": zeros(3, 7, 19)}, ValueError,
        ["key", "*B", "(2,)", "(3, 7, 19)"]),
    "query of one axis": ({"query": zeros(17)}, ValueError, ["query", "T, Dq", "(17,)"]),
    "integer query": ({"query": zeros(2, 5, 17, dtype=np.int32)}, TypeError, ["query", "int32"]),
    "mask of another length": ({"mask": zeros(5, 9, dtype=bool)}, ValueError,
        ["mask", "S=7", "(5, 9)"]),
    "bias of another length": ({"bias": zeros(5, 9)}, ValueError, ["bias", "S=7", "(5, 9)"]),
    "norm without scales": ({"semantics": Semantics(qk_norm="rms")}, ValueError,
        ["qk_norm", "query_norm"]),
}  # fmt: skip


@pytest.mark.parametrize("what", LAYER_ARGUMENTS)
def test_layer(what: str) -> None:
    change, error, texts = LAYER_ARGUMENTS[what]
    refused(layer(LEAVES, {}), INPUTS | change, error, texts)


def test_things_of_another_kind_are_named() -> None:
    query, params = INPUTS["query"], params_of(LEAVES)
    other: Any = {"a": 1}
    imported: Any = convert.from_module(torch.nn.MultiheadAttention(6, 2, batch_first=True))
    layers: Any = (jaxmha.multi_head_attention, jaxmha.project, jaxmha.combine)
    for call in layers:
        for run in (call, jax.jit(call)):
            with pytest.raises(TypeError, match=r"params must be a jaxmha\.MHAParams, got dict"):
                run(other, query)
        with pytest.raises(TypeError, match=r"got Imported, a tuple that holds one: unpack it"):
            call(imported, query)
        with pytest.raises(TypeError, match=r"semantics must be a jaxmha\.Semantics, got dict"):
            call(params, query, semantics=other)
    for call in (jaxmha.prefill, jaxmha.decode_step):
        with pytest.raises(TypeError, match=r"params must be a jaxmha\.MHAParams, got dict"):
            call(other, query, other)
        with pytest.raises(
            TypeError, match=r"cache must be a jaxmha\.KVCache or a jaxmha\.PagedKVCache, got dict"
        ):
            call(params, query, other)
    dropping = Semantics(dropout_rate=0.5)
    keys: tuple[Any, ...] = (3, jnp.zeros((2, 2), np.uint32))
    for key in keys:
        with pytest.raises(TypeError, match=r"dropout_key must be one PRNG key"):
            jaxmha.multi_head_attention(params, **INPUTS, dropout_key=key, semantics=dropping)


def test_right_arguments_are_not_refused() -> None:
    layer(LEAVES, {})(**INPUTS)
