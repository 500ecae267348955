"""Attention of other libraries: other forms are carried over by name, and known ones are read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.converters import positions_of
from jaxmha.converters.discovery import attention_blocks, damaged_blocks, unknown_attention
from jaxmha.converters.discovery.added_terms import Computed
from jaxmha.converters.discovery.positions import Rotary
from jaxmha.converters.layout import registry
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.verify import oracle

D, N, H = 15, 3, 5
TIMM = {"qkv.weight": (3 * D, D), "proj.weight": (D, D)}


def saved(path: Path, prefix: str, shapes: dict[str, Any]) -> Path:
    rng = np.random.default_rng(0)
    checkpoint.write(
        path, {f"{prefix}.{k}": rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    )
    return path


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"temperature": (N, 1, 1)}, "attends over channels"),
        ({"proj_l.weight": (N, N), "proj_w.weight": (N, N)}, "heads are mixed"),
        ({"pool_q.weight": (H, 1, 3, 3)}, "pooled"),
        ({"cpb_mlp.0.weight": (7, 2), "logit_scale": (N, 1, 1)}, "scaled cosines"),
    ],
)
def test_other_forms_are_carried_over_by_name(more: Any, why: str, tmp_path: Path) -> None:
    source = tmp_path / "a.safetensors"
    saved(source, "blocks.0.attn", TIMM | more)
    with checkpoint.open(source) as file:
        shapes = attention_blocks.shapes(file)
        state = {name: file[name] for name in file.info}
    found = attention_blocks.find(shapes)
    assert found == []
    assert damaged_blocks.find(shapes, found) == {}
    assert list(unknown_attention.find(shapes, found)) == ["blocks.0.attn"]
    two = state | {f"blocks.1.attn.{k}": np.ones(s, np.float32) for k, s in TIMM.items()}
    checkpoint.write(source, two, force=True)
    done = pipeline.convert(source, tmp_path / "b.safetensors", to="flax", num_heads=N)
    assert any("no known layout" in note and why in note for note in done.notes)
    with checkpoint.open(tmp_path / "b.safetensors") as file:
        for name, array in state.items():
            assert file[name].tobytes() == array.tobytes()


def test_a_model_type_tells_the_form(tmp_path: Path) -> None:
    packed = {"attn.qkv_proj.weight": (3 * D, D), "attn.out_proj.weight": (D, D)}
    source = saved(tmp_path / "a.safetensors", "h.0", packed | {"mlp.fc_in.weight": (7, D)})
    for model_type, known in (("codegen", True), ("bert", False)):
        (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
        done = pipeline.convert(source, tmp_path / "b.npz", to="flax", force=True)
        for notes in (pipeline.inspect(source).notes, done.notes):
            (note,) = (one for one in notes if "no known layout" in one)
            assert ("are packed in four parts" in note) == known


@pytest.mark.parametrize(
    ("prefix", "shapes", "layout"),
    [
        ("s.0.attn", {"qkv.weight": (3 * D, D, 1, 1), "proj.weight": (D, D, 1, 1)}, "conv:qkv,proj"),
        ("a", {f"to_{x}.weight": (D, D, 1) for x in ("q", "k", "v", "out")},
         "conv1d:to_q,to_k,to_v,to_out"),
        ("a", {f"{x}_lin9.weight": (D, D) for x in ("q", "k", "v", "out")}
         | {"norm_q.weight": (H,), "norm_k.weight": (H,)},
         "linear:q_lin9,k_lin9,v_lin9,out_lin9+norm_q,norm_k"),
        ("a", {f"{x}_lin9.weight": (D, D) for x in ("q", "k", "v", "out")}
         | {"norm_q.weight": (D,), "norm_k.weight": (D,)},
         "linear:q_lin9,k_lin9,v_lin9,out_lin9+norm_q,norm_k(heads)"),
        ("blocks.0.attn_grid.attn", TIMM | {"rel_pos.mlp.fc1.weight": (7, 2)}, "timm-heads"),
        ("stages.0.blocks.0.attn", TIMM | {"attention_biases": (N, 4), "norm.weight": (D,)},
         "timm-heads"),
        ("levels.0.transformer_encoder.0.attn", TIMM, "timm-nest"),
        ("head", {f"{x}.weight": (D, D) for x in ("q", "k", "v", "proj")} | {"pos_embed": (5, D)},
         "linear-q-proj"),
    ],
)  # fmt: skip
def test_layouts_of_other_libraries(prefix: str, shapes: Any, layout: str) -> None:
    all_shapes = {f"{prefix}.{key}": shape for key, shape in shapes.items()}
    (block,) = attention_blocks.find(all_shapes)
    assert (block.prefix, block.layout.name, block.unknown) == (prefix, layout, ())
    assert registry.named(layout).entries == block.layout.entries
    assert bool(block.refused) == ("norm_q" in layout)  # asks for a configuration


@pytest.mark.parametrize(
    ("prefix", "shapes"),
    [
        # Keys and values alone, next to such a table: GCViT.
        (
            "blocks.0.attn",
            TIMM | {"qkv.weight": (2 * D, D), "rel_pos.relative_position_bias_table": (9, N)},
        ),
        # A layer that widens, and pools its queries: Hiera.
        ("blocks.0.attn", TIMM | {"qkv.weight": (3 * D, 7)}),
        ("a.attn", {"attn.weight": (81, D), "v.weight": (D, D), "proj.weight": (D, D)}),  # VOLO
        # Deformable DETR
        (
            "decoder.layers.0.encoder_attn",
            {f"{x}.weight": (D, D) for x in ("sampling_offsets", "value_proj", "output_proj")},
        ),
        ("a.attn", {"main.0.weight": (D, D, 3, 3), "main.1.weight": (D, D)}),
    ],
)
def test_what_only_looks_like_a_layout_is_named(prefix: str, shapes: Any) -> None:
    all_shapes = {f"{prefix}.{key}": shape for key, shape in shapes.items()}
    found = attention_blocks.find(all_shapes)
    assert found == []
    assert damaged_blocks.find(all_shapes, found) == {}
    assert list(unknown_attention.find(all_shapes, found)) == [prefix]


@pytest.mark.parametrize("first", [0, 1])
def test_a_network_gives_the_bias(first: int) -> None:
    """The bias of one pair, computed by hand from timm's formula."""
    rng = np.random.default_rng(0)
    inner, inner_bias, outer, outer_bias = (
        rng.normal(size=s) for s in ((7, 2), (7,), (N, 7), (N,))
    )
    T = 9 + first
    found = Computed(inner, inner_bias, outer, outer_bias).bias(T, T, np.zeros((1, T, N, 1)))
    assert found.shape == (N, T, T)
    row, column = 2, -1  # from the token in row 2, column 0 to that in row 0, column 1
    near = np.sign([row, column]) * np.log1p(np.abs([row, column]))
    want = outer @ np.maximum(inner @ near + inner_bias, 0) + outer_bias
    np.testing.assert_allclose(found[:, first + 6, first + 1], want, rtol=1e-12)
    assert not found[:, :first].any()
    assert not found[:, :, :first].any()
    with pytest.raises(ValueError, match="tokens of a square"):
        Computed(inner, inner_bias, outer, outer_bias).bias(7, 7)


def test_angles_of_a_block_are_its_positions(tmp_path: Path) -> None:
    shapes = {f"{x}_proj.weight": (D, D) for x in ("q", "k", "v", "out")}
    source = saved(tmp_path / "a.safetensors", "layers.0.self_attn",
                   shapes | {"rot_emb.inv_freq": (2,)})  # fmt: skip
    (place,) = positions_of(source).values()
    assert place.scheme == "rotary"
    with checkpoint.open(source) as file:
        angles = file["layers.0.self_attn.rot_emb.inv_freq"].astype(np.float64)
    assert isinstance(place.rotary, Rotary)
    assert place.rotary.inv_freq == tuple(angles)


def test_gates_on_channels_are_no_attention() -> None:
    """RegNet calls its squeeze and excitation `attention`: two convolutions of one pixel."""
    shapes = {f"layer.2.attention.{i}.weight": (8, 8, 1, 1) for i in (0, 2)}
    assert not unknown_attention.find(shapes, [])
    assert unknown_attention.find({f"a.attention.w{i}.weight": (8, 8) for i in (0, 2)}, [])


def test_query_heads_by_the_remainder_of_their_key_head(tmp_path: Path) -> None:
    """x-transformers repeats its K key heads one after another: head n attends head n % K."""
    rng, prefix, K = np.random.default_rng(0), "attn_layers.layers.0.1", 2
    rows = {"q": (6 * H, D), "k": (K * H, D), "v": (K * H, D), "out": (D, 6 * H)}
    state = {f"{prefix}.to_{x}.weight": rng.normal(size=s) for x, s in rows.items()}
    checkpoint.write(tmp_path / "a.safetensors", state)
    pipeline.convert(tmp_path / "a.safetensors", tmp_path / "b.npz", to="jaxmha", num_heads=6)
    with checkpoint.open(tmp_path / "b.npz") as file:
        (block,) = attention_blocks.find(attention_blocks.shapes(file))
        params, semantics = block.read(file, num_heads=6)
    x = rng.normal(size=(7, D))
    q, k, v = ((x @ state[f"{prefix}.to_{r}.weight"].T).reshape(7, -1, H) for r in "qkv")
    logits = np.einsum("tnh,snh->nts", q, np.tile(k, (1, 3, 1))) * H**-0.5
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    heads = np.einsum("nts,snh->tnh", weights, np.tile(v, (1, 3, 1)))
    want = heads.reshape(7, -1) @ state[f"{prefix}.to_out.weight"].T
    got = oracle.run(params, semantics, x[None], x[None], x[None]).output[0]
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    pipeline.convert(
        tmp_path / "b.npz", tmp_path / "c.safetensors", to="x-transformers", num_heads=6
    )
    with checkpoint.open(tmp_path / "c.safetensors") as file:
        assert all(file[name].tobytes() == array.tobytes() for name, array in state.items())


@pytest.mark.parametrize("to", ["jaxmha", "torch"])
def test_biases_of_transformer_xl_are_no_positions_of_keys(to: str, tmp_path: Path) -> None:
    llama = {f"{x}_proj.weight": (D, D) for x in "qkvo"}
    terms = {"bias_u": (N, H), "bias_v": (N, H), "relative_k_proj.weight": (D, D)}
    source = saved(tmp_path / "a.safetensors", "layers.0.self_attn", llama | terms)
    done = pipeline.convert(source, tmp_path / "b.safetensors", to=to, num_heads=N)
    assert not any("sinks" in note for note in done.notes)
    back = tmp_path / "c.safetensors"
    pipeline.convert(tmp_path / "b.safetensors", back, to="llama", num_heads=N)
    with checkpoint.open(source) as file, checkpoint.open(back) as again:
        assert {n: file[n].tobytes() for n in file} == {n: again[n].tobytes() for n in again}


@pytest.mark.parametrize(
    ("to", "why"),
    [
        ("jaxmha", ": layout jaxmha has a parameter of its own named bias_v"),
        ("torch", " as layout torch: name another layout"),
    ],
)
def test_a_carried_tensor_with_the_name_of_a_parameter_is_refused(
    to: str, why: str, tmp_path: Path
) -> None:
    shapes = {f"{x}_proj.weight": (D, D) for x in "qkvo"} | {"bias_v": (N, H)}
    source = saved(tmp_path / "a.safetensors", "layers.0.self_attn", shapes)
    with pytest.raises(ValueError, match=f"could not be read back{why}"):
        pipeline.convert(source, tmp_path / "b.safetensors", to=to, num_heads=N)
    assert not (tmp_path / "b.safetensors").exists()
