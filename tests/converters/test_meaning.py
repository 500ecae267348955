"""Norms, sinks, gates and clipping: in the float64 oracle, in descriptions, and from transformers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxmha import Semantics
from jaxmha.converters.verify import oracle
from jaxmha.introspect.graph_nodes import describe
from jaxmha.params import leaves
from tests import cases, reference
from tests.test_layer import BY_NAME, params_of, semantics_of

NEW = (
    "norm_bias",
    "norm_heads_weights",
    "norm_all_heads",
    "norm_all_heads_layer",
    "norm_unlearned",
    "norm_offset",
    "clip",
    "sinks",
    "gate",
    "gate_heads",
)


def drawn(name: str) -> tuple[Any, Semantics, list[Any]]:
    case = replace(BY_NAME[name], batch=(2,), inputs=3)
    arrays, inputs, _ = cases.layer_arrays(case)
    return params_of(arrays), semantics_of(case), list(inputs.values())


@pytest.mark.parametrize("name", NEW)
def test_oracle(name: str) -> None:
    params, semantics, inputs = drawn(name)
    expected, _ = reference.multi_head_attention(params, *inputs, semantics=semantics)
    found = oracle.run(params, semantics, *inputs).output
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NEW)
def test_description_names_every_array(name: str) -> None:
    params, semantics, _ = drawn(name)
    flow = describe(params, semantics, batch=2, query_len=5, kv_len=7)
    shown = {stored.name for node in flow.nodes for stored in node.parameters}
    assert shown == set(leaves(params))
    clipped = [node.name for node in flow.nodes if node.name.endswith("_clipped")]
    assert len(clipped) == 3 * (semantics.clip_qkv is not None)
