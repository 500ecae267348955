"""Live models of transformers: a block that is not plain attention is never converted unsaid.

Inputs and outputs of a block's own projections, taken from a run of the whole model, are compared
with softmax attention of the weights that are converted.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha.converters.discovery import attention_blocks
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.converters.migrate import pipeline

N, D, T = 4, 64, 21
_SIZES: dict[str, Any] = {
    "hidden_size": D, "num_attention_heads": N, "num_hidden_layers": 2, "intermediate_size": 4 * D,
    "vocab_size": 160, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_SIDES = {
    f"{side}_{key}": value
    for side in ("encoder", "decoder")
    for key, value in (("layers", 2), ("attention_heads", N), ("ffn_dim", 4 * D))
}
# Settings of each type, and whether every block is plain attention.
TYPES: dict[str, tuple[dict[str, Any], bool]] = {
    "bert": ({}, True),
    "opt": ({"ffn_dim": 4 * D, "word_embed_proj_dim": D}, True),
    "bart": ({"d_model": D} | _SIDES, True),
    "gpt2": ({"n_embd": D, "n_head": N, "n_layer": 2}, True),
    "llama": ({}, False),
    "bloom": ({"n_head": N, "n_layer": 2}, False),
    "gptj": ({"n_embd": D, "n_head": N, "n_layer": 2, "rotary_dim": 8}, False),
    "roformer": ({}, False),
    "mistral": ({"num_key_value_heads": N}, False),
    "nanochat": ({"num_key_value_heads": N}, False),
    "ministral3": ({"num_key_value_heads": N, "head_dim": D // N}, False),
    "yoso": ({}, False),
    "mra": ({}, False),
    "stablelm": ({"num_key_value_heads": N}, False),
}  # fmt: skip


def attention(block: Block, state: dict[str, NDArray], inputs: list[NDArray]) -> list[NDArray]:
    """Outputs of the weights without a mask, and causally."""
    params, semantics = block.read(state, N)
    assert params.out is not None
    q, k, v = (
        np.einsum("btd,dnh->bnth", x, getattr(params, name).kernel)
        + (0 if (bias := getattr(params, name).bias) is None else np.asarray(bias)[:, None])
        for x, name in zip(inputs, ("query", "key", "value"), strict=True)
    )
    groups = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if semantics.scale is None else semantics.scale
    logits = np.einsum("bnth,bnsh->bnts", q, np.repeat(k, groups, 1)) * scale
    outs = []
    for mask in (1, np.tril(np.ones(logits.shape[-2:]))):
        weights = mask * np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        heads = np.einsum("bnts,bnsh->btnh", weights, np.repeat(v, groups, 1))
        out = np.einsum("btnh,nhd->btd", heads, params.out.kernel)
        outs.append(out if params.out.bias is None else out + params.out.bias)
    return outs


def is_plain(model: Any, block: Block, state: dict[str, NDArray], feed: Any) -> bool:
    """True if a block of a live model computes attention of its weights alone."""
    leaves = {
        leaf: key for e in block.layout.entries for leaf in e.leaves if (key := e.key) in block.keys
    }
    names = [
        block.keys[leaves[f"{role}.kernel"]].rpartition(".")[0]
        for role in ("query", "key", "value", "out")
    ]
    seen: dict[str, tuple[Any, Any]] = {}
    modules = dict(model.named_modules())

    def keep(name: str) -> Any:
        def hook(_: Any, given: Any, out: Any) -> None:
            seen.setdefault(name, (given[0], out))

        return hook

    handles = [modules[name].register_forward_hook(keep(name)) for name in dict.fromkeys(names)]
    model(**feed)
    for handle in handles:
        handle.remove()
    inputs = [to_numpy(seen[name][0].detach().double()) for name in names[:3]]
    out = to_numpy(seen[names[3]][1].detach().double()).reshape(1, T, -1)
    errors = [np.abs(mine - out).max() for mine in attention(block, state, inputs)]
    return bool(min(errors) < 2e-3 * out.std())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_parts_of_every_model_type_are_named_or_refused(model_type: str, tmp_path: Path) -> None:
    import torch
    import transformers

    settings, plain = TYPES[model_type]
    config = transformers.AutoConfig.for_model(model_type, **_SIZES | settings)
    model = transformers.AutoModel.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = noise * 1.5 * parameter.shape[-1] ** -0.5
        elif name.endswith("bias"):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    model.save_pretrained(tmp_path)
    source = tmp_path / "model.safetensors"
    ids = torch.randint(9, 90, (1, T), generator=generator)
    state = {name: to_numpy(x) for name, x in model.state_dict().items()}
    found = attention_blocks.find({name: x.shape for name, x in state.items()})
    assert found
    readable = [block for block in found if not block.unknown]
    assert all(is_plain(model, b, state, {"input_ids": ids}) for b in readable) == plain
    printed = pipeline.inspect(source).notes
    try:
        done = pipeline.convert(source, tmp_path / "b.safetensors", to="flax")
    except ValueError:
        done = None
    if done is None:
        assert not plain
        return
    named = [note for note in done.notes if note.startswith("not converted: ")]
    assert bool(named) == (not plain)
    assert set(named) <= set(printed)
    # A configuration of an older version says the type, and less of the rest.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "num_heads": N}))
    older = pipeline.inspect(source).notes
    assert bool([note for note in older if note.startswith("not converted: ")]) == (not plain)
