"""Norms, sinks, gates and clipping: in the float64 oracle, in descriptions, and from transformers."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from jaxmha import (
    KVCache,
    Semantics,
    combine,
    decode_step,
    dot_product_attention,
    multi_head_attention,
    prefill,
    project,
    rope,
    rope_frequencies,
)
from jaxmha.converters.discovery import attention_blocks
from jaxmha.converters.layout import fold, transform
from jaxmha.converters.verify import oracle
from jaxmha.introspect.graph_nodes import describe
from jaxmha.params import leaves
from tests import layer_cases, reference
from tests.test_layer import BY_NAME, params_of, semantics_of

NEW = (
    "norm_bias", "norm_heads_weights", "norm_all_heads", "norm_all_heads_layer", "norm_unlearned",
    "norm_offset", "clip", "sinks", "gate", "gate_heads",
)  # fmt: skip


def drawn(name: str) -> tuple[Any, Semantics, list[Any]]:
    case = replace(BY_NAME[name], batch=(2,), inputs=3)
    arrays, inputs, _ = layer_cases.layer_arrays(case)
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


@partial(jax.jit, static_argnames=("semantics", "frequencies"))
def pulled(params: Any, x: Any, d_out: Any, semantics: Semantics, frequencies: Any) -> Any:
    """The output of rotated causal attention, and the gradient of the parameters."""

    def run(params: Any) -> Any:
        q, k, v = project(params, x, semantics=semantics)
        q, k = (rope(heads, np.arange(x.shape[1]), frequencies=frequencies) for heads in (q, k))
        heads = dot_product_attention(q, k, v, is_causal=True, sinks=params.sinks)
        return combine(params, heads, semantics=semantics)

    out, pull = jax.vjp(run, params)
    return out, pull(d_out)[0]


@pytest.mark.parametrize("std", [0.1, 0.5])
def test_gpt_oss_is_equal_to_transformers(std: float) -> None:
    """Sinks, yarn frequencies and grouped heads of a random layer, and its state back bit by bit."""
    import torch
    from transformers.models.gpt_oss import modeling_gpt_oss as theirs

    config = theirs.GptOssConfig(
        hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=8
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    module = theirs.GptOssAttention(config, layer_idx=1).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=std)
    B, T = 2, 9
    x, d_out = torch.randn(2, B, T, 48)
    cos, sin = theirs.GptOssRotaryEmbedding(config)(x, torch.arange(T)[None])
    mask = torch.full((T, T), -torch.inf).triu(1)[None, None]
    layout = attention_blocks.named("llama-sinks")
    state = {name: array.numpy().copy() for name, array in module.state_dict().items()}
    # In float64: torch's float32 is as far from it as ours.
    expected, _ = module.double()(x.double(), (cos.double(), sin.double()), mask.double())
    expected.backward(d_out.double())
    params, semantics = transform.import_params([layout], state, num_heads=6)
    frequencies = rope_frequencies(config.to_dict(), 8)
    arrays = params, x.numpy(), d_out.numpy()
    found, grads = pulled(*arrays, semantics=semantics, frequencies=frequencies)
    want = expected.detach().numpy()
    assert np.abs(np.asarray(found) - want).max() <= 1e-6 * np.abs(want).max()
    back = transform.export_params(layout, params, semantics)
    assert all(back[name].tobytes() == array.tobytes() for name, array in state.items())
    gradients = transform.export_params(layout, jax.tree.map(np.asarray, grads), semantics)
    # With std = 0.5, logits have a spread of 12, which multiplies the rounding of queries and keys.
    most = 1e-6 if std == 0.1 else 5e-6
    for name, parameter in module.named_parameters():
        exact = parameter.grad.numpy()
        assert np.linalg.norm(gradients[name] - exact) <= most * np.linalg.norm(exact), name


@pytest.mark.parametrize("name", ["norm_offset", "norm_unlearned", "clip"])
def test_a_scale_is_not_folded_past_what_follows(name: str) -> None:
    params, semantics, _ = drawn(name)
    with pytest.raises(ValueError, match="the scale cannot be folded into the query"):
        fold.fold(params, replace(semantics, scale=0.7), attention_blocks.named("jaxmha"))


def test_a_scale_is_folded_into_scale_and_bias_of_a_norm() -> None:
    params, semantics, inputs = drawn("norm_bias")
    given = replace(semantics, scale=0.7)
    folded, plain = fold.fold(params, given, attention_blocks.named("jaxmha"))
    one, other = (oracle.run(p, s, *inputs).output for p, s in ((params, given), (folded, plain)))
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.everyday(name=["sinks", "gate"])
@pytest.mark.parametrize("name", ["sinks", "gate", "gate_heads", "norm_all_heads"])
def test_a_cache_decodes_what_the_whole_layer_computes(name: str) -> None:
    case = replace(BY_NAME[name], inputs=1, batch=(2,), T=7)
    params, semantics = params_of(layer_cases.layer_arrays(case)[0]), semantics_of(case)
    semantics = replace(semantics, fully_masked="zero", add_zero_attn=False)
    x = layer_cases.layer_arrays(case)[1]["query"]
    whole = multi_head_attention(params, x, is_causal=True, semantics=semantics)
    out, cache = prefill(params, x[:, :4], KVCache.empty(params, 2, 8), semantics=semantics)
    np.testing.assert_allclose(out, whole[:, :4], rtol=1e-5, atol=1e-5)
    for i in range(4, 7):
        out, cache = decode_step(params, x[:, i : i + 1], cache, semantics=semantics)
        np.testing.assert_allclose(out[:, 0], whole[:, i], rtol=1e-5, atol=1e-5)
