"""Names and shapes of other libraries that were refused, read wrong, or not found at first."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxmha.converters import positions_of
from jaxmha.converters.discovery import attention_blocks, unknown_attention
from jaxmha.converters.discovery.added_terms import Distances
from jaxmha.converters.migrate import pipeline

Shapes = dict[str, tuple[int, ...]]


def found(shapes: Shapes) -> list[tuple[str, bool]]:
    """The prefix of every block, and whether its layout knows all its arrays."""
    return [(block.prefix, block.whole) for block in attention_blocks.find(shapes)]


def linear(prefix: str, *names: str, width: int = 6) -> Shapes:
    return {f"{prefix}.{name}.weight": (width, width) for name in names}


@pytest.mark.parametrize("mask", ["causal_mask", "attn_mask", "mask", "tril"])
def test_buffers_of_masks_are_carried_over(mask: str) -> None:
    shapes = linear("a.attn", "to_q", "to_k", "to_v", "out_proj")
    assert found(shapes | {f"a.attn.{mask}": (9, 9)}) == [("a.attn", True)]
    assert found(shapes | {"a.attn.tau": (9, 9)}) == [("a.attn", False)]


def test_emformer() -> None:
    names = {"emb_to_query": 6, "emb_to_key_value": 12, "out_proj": 6}
    shapes: Shapes = {f"a.attention.{name}.weight": (rows, 6) for name, rows in names.items()}
    assert found(shapes) == [("a.attention", True)]
    # five models pack these three in different orders
    names = {"query_key_value": 18, "out_proj": 6}
    assert not found({f"a.attention.{name}.weight": (rows, 6) for name, rows in names.items()})


def test_attention_packed_with_other_layers_is_named() -> None:
    packed = {
        "layers.0.fn.fused_attn_ff_proj.weight": (60, 6),
        "layers.0.fn.attn_out.weight": (6, 6),
    }
    assert list(unknown_attention.find(packed, attention_blocks.find(packed))) == ["layers.0.fn"]
    packed = {"blocks.0.in_proj.weight": (60, 6), "blocks.0.attn_out_proj.weight": (6, 6)}
    assert list(unknown_attention.find(packed, attention_blocks.find(packed))) == ["blocks.0"]
    mamba = {"blocks.0.in_proj.weight": (60, 6), "blocks.0.out_proj.weight": (6, 6)}
    assert not unknown_attention.find(mamba, attention_blocks.find(mamba))


def test_distances_by_query_minus_key(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0)
    arrays = {
        f"layers.0.attn.fn.{name}.weight": drawn.normal(size=shape).astype(np.float32)
        for name, shape in (
            ("to_q", (6, 6)),
            ("to_kv", (12, 6)),
            ("to_out", (6, 6)),
            ("rel_pos_emb", (5, 3)),
        )
    }
    save_file(arrays, tmp_path / "model.safetensors")
    term = positions_of(tmp_path)["layers.0.attn.fn"].added
    assert isinstance(term, Distances)
    query, table = drawn.normal(size=(1, 4, 2, 3)), arrays["layers.0.attn.fn.rel_pos_emb.weight"]
    expected = np.zeros((1, 2, 4, 4))
    for i in range(4):
        for j in range(4):
            row = table[np.clip(i - j, -2, 2) + 2]
            expected[0, :, i, j] = query[0, i] @ row * 3**-0.5
    np.testing.assert_allclose(term.bias(4, 4, query), expected, rtol=0, atol=1e-6)


def test_the_pool_of_a_perception_encoder_has_its_own_heads(tmp_path: Path) -> None:
    shapes = {
        "blocks.0.attn.qkv": (96, 32), "blocks.0.attn.proj": (32, 32),
        "attn_pool.q": (32, 32), "attn_pool.kv": (64, 32), "attn_pool.proj": (32, 32),
    }  # fmt: skip
    arrays = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(arrays, tmp_path / "model.safetensors")
    name = "vit_pe_core_base_patch16_224"
    content = {"architecture": name, "pretrained_cfg": {}, "model_args": {"num_heads": 4}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    pipeline.convert(tmp_path / "model.safetensors", tmp_path / "out.npz", to="flax")
    with np.load(tmp_path / "out.npz") as out:
        assert out["attn_pool/query/kernel"].shape == (32, 8, 4)
        assert out["blocks/0/attn/query/kernel"].shape == (32, 4, 8)


def test_coatnext_widens_in_its_first_layer() -> None:
    prefix = "stages.2.blocks.0.attn"
    shapes = {f"{prefix}.qkv.weight": (96, 32, 1, 1), f"{prefix}.proj.weight": (64, 32, 1, 1),
              f"{prefix}.rel_pos.relative_position_bias_table": (9, 2)}  # fmt: skip
    (block,) = attention_blocks.find(shapes)
    assert block.layout.name == "timm-heads-conv"
    params, _ = block.read({name: np.zeros(shape) for name, shape in shapes.items()}, num_heads=2)
    assert params.out is not None
    assert params.out.kernel.shape == (2, 16, 64)
