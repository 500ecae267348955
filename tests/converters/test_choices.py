"""Layouts that read the same arrays as different functions: a place or a configuration tells."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxmha
from jaxmha import checkpoint
from jaxmha.converters import linear
from jaxmha.converters.discovery import all_positions, attention_blocks, behaviours
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.verify import comparison
from tests import drawn

N, H, E = 4, 6, 24
CHATGLM = "transformer.encoder.layers.0.self_attention"


def packed(prefix: str, K: int, qkv: str, out: str) -> dict[str, NDArray]:
    """A packed layer with a bias, and an output layer without one."""
    rng, rows = np.random.default_rng(0), (N + 2 * K) * H
    shapes = {f"{qkv}.weight": (rows, E), f"{qkv}.bias": (rows,), f"{out}.weight": (E, N * H)}
    return {f"{prefix}.{key}": rng.normal(size=shape) for key, shape in shapes.items()}


def in_turn(kernel: NDArray, K: int) -> list[NDArray]:
    """Queries, keys and values, as ChatGLM splits its rows."""
    return np.split(kernel, [N * H, (N + K) * H])


def by_group(kernel: NDArray, K: int) -> list[NDArray]:
    """Queries, keys and values, as Megatron-Core splits its rows: for every key head apart."""
    groups = kernel.reshape(K, -1, H, E)
    parts = np.split(groups, [N // K, N // K + 1], axis=1)
    return [part.reshape(-1, E) for part in parts]


def written(folder: Path, state: dict[str, NDArray], **config: Any) -> Path:
    checkpoint.write(folder / "a.safetensors", state)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder / "a.safetensors"


def kernels(folder: Path, **options: Any) -> list[NDArray]:
    """Kernels of queries, keys and values after a conversion, `(heads features) inputs`."""
    pipeline.convert(folder / "a.safetensors", folder / "b.npz", to="jaxmha", **options)
    assert comparison.compare(folder / "a.safetensors", folder / "b.npz", num_heads=N)
    with checkpoint.open(folder / "b.npz") as file:
        found = [
            next(file[name] for name in file if re.search(rf"{x}.kernel$", name))
            for x in ("query", "key", "value")
        ]
    return [np.asarray(x).reshape(E, -1).T for x in found]


def glm(K: int) -> dict[str, Any]:
    return {"model_type": "chatglm", "num_attention_heads": N, "hidden_size": E, "kv_channels": H,
            "multi_query_attention": K < N, "multi_query_group_num": K if K < N else 1}  # fmt: skip


@pytest.mark.slow_variants("configuration", "elsewhere")
@pytest.mark.parametrize(
    ("prefix", "K", "config"),
    [
        (CHATGLM, 2, {}),
        (CHATGLM, 2, glm(2)),
        (CHATGLM, 4, glm(4)),
        (CHATGLM.removeprefix("transformer."), 2, glm(2)),
        ("transformer.vision.layers.0.self_attention", 2, glm(2)),
        ("encoder.layers.0.self_attention", 2, {}),
    ],
    ids=["place", "configuration", "as many keys", "elsewhere", "another part", "no configuration"],
)
def test_the_rows_of_chatglm(prefix: str, K: int, config: dict[str, Any], tmp_path: Path) -> None:
    state = packed(prefix, K, "query_key_value", "dense")
    path = written(tmp_path, state, **config)
    chosen = "transformer.encoder" in prefix or (config and "vision" not in prefix)
    split = in_turn if K < N and chosen else by_group
    given = {} if config else {"num_heads": N}
    expected = split(state[f"{prefix}.query_key_value.weight"], K)
    for mine, theirs in zip(kernels(tmp_path, **given), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    # It rotates half of every head in pairs of adjacent features, which is not known here.
    (found,) = all_positions.positions_of(path).values()
    assert (found.scheme, found.rotary) == ("unknown", None)
    if config:
        assert any("does not know what chatglm" in note for note in pipeline.inspect(path).notes)


@pytest.mark.everyday(multi_query=[True])
@pytest.mark.parametrize("multi_query", [False, True])
@pytest.mark.filterwarnings("default")
def test_gpt_bigcode_computes_what_its_class_does(multi_query: bool, tmp_path: Path) -> None:
    import torch
    import transformers as t

    config = t.GPTBigCodeConfig(
        n_embd=E, n_head=N, n_layer=1, n_positions=8, vocab_size=11, multi_query=multi_query,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = t.GPTBigCodeModel(config).eval()
    model.save_pretrained(tmp_path)
    x = np.random.default_rng(0).normal(size=(2, 5, E)).astype(np.float32)
    with torch.no_grad():
        theirs = to_numpy(model.h[0].attn(torch.from_numpy(x))[0])
    with checkpoint.open(tmp_path / "model.safetensors") as file:
        found = attention_blocks.find(attention_blocks.shapes(file))
        (block,) = behaviours.configured(found, file)
        params, semantics = block.read(file, N)
    mine = jaxmha.multi_head_attention(params, x, semantics=semantics)
    np.testing.assert_allclose(mine, theirs, atol=2e-6)
    source, present, back = (tmp_path / f"{x}.safetensors" for x in ("model", "b", "c"))
    pipeline.convert(source, present, to="flax", num_heads=N)
    assert comparison.compare(source, present, num_heads=N)
    pipeline.convert(present, back, to=block.layout.name)
    with checkpoint.open(source) as a, checkpoint.open(back) as b:
        for name in block.keys.values():
            np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.parametrize("K", [2, N])
def test_megatron_core_packs_by_groups(K: int, tmp_path: Path) -> None:
    prefix = "decoder.layers.0.self_attention"
    state = packed(prefix, K, "linear_qkv", "linear_proj")
    norm = {f"{prefix}.linear_qkv.layer_norm_weight": np.ones(E)}  # of Transformer Engine
    written(tmp_path, state | norm)
    expected = by_group(state[f"{prefix}.linear_qkv.weight"], K)
    for mine, theirs in zip(kernels(tmp_path, num_heads=N), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("prefix", "K", "config", "name"),
    [
        (CHATGLM, 2, glm(2), "falcon"),
        ("encoder.layers.0.self_attention", 2, glm(2), "falcon"),
        ("encoder.layers.0.self_attention", 2, {}, "chatglm"),
    ],
)
def test_a_layout_that_the_user_names_stays(
    prefix: str, K: int, config: dict[str, Any], name: str, tmp_path: Path
) -> None:
    state = packed(prefix, K, "query_key_value", "dense")
    path = written(tmp_path, state, **config)
    split = in_turn if name == "chatglm" else by_group
    expected = split(state[f"{prefix}.query_key_value.weight"], K)
    pipeline.convert(path, tmp_path / "b.npz", to="jaxmha", from_=name, num_heads=N)
    plan, _ = pipeline.plan(path, to="jaxmha", from_=name, num_heads=N)
    pipeline.convert(path, tmp_path / "c.npz", plan=plan)
    for back in ("b.npz", "c.npz"):
        with checkpoint.open(tmp_path / back) as file:
            (key,) = (file[n] for n in file if n.endswith("key_kernel"))
        np.testing.assert_array_equal(np.asarray(key).reshape(E, -1).T, expected[1])


def test_the_rows_of_linear_qkv_are_read_at_their_place_alone(tmp_path: Path) -> None:
    state = packed("attn", N, "linear_qkv", "linear_proj")
    path = written(tmp_path, state)
    with pytest.raises(ValueError, match="no attention block found"):
        pipeline.convert(path, tmp_path / "b.npz", to="jaxmha", num_heads=N)
    with pytest.raises(ValueError, match="no known layout"):
        linear.import_params(state, prefix="attn", num_heads=N)
    for name in ("megatron", "linear:linear_qkv,linear_proj"):
        pipeline.convert(path, tmp_path / "b.npz", to="jaxmha", from_=name, num_heads=N, force=True)
    with pytest.raises(ValueError, match=r"layout megatron is read at prefixes of its own models"):
        pipeline.convert(tmp_path / "b.npz", tmp_path / "c.npz", to="megatron")


def test_names_of_t5_are_read_without_a_configuration(tmp_path: Path) -> None:
    """As before there were choices: in a file, in memory, and into layout t5 at any prefix."""
    state = {f"blocks.0.attn.{x}.weight": np.eye(E) for x in "qkvo"}
    path = written(tmp_path, state)
    pipeline.convert(path, tmp_path / "b.safetensors", to="jaxmha", num_heads=N)
    assert comparison.compare(path, tmp_path / "b.safetensors", num_heads=N)
    pipeline.convert(tmp_path / "b.safetensors", tmp_path / "c.safetensors", to="t5")
    pipeline.convert_state(state, to="jaxmha", num_heads=N)
    with checkpoint.open(tmp_path / "c.safetensors") as file:
        assert file.info.keys() == state.keys()


def test_rows_are_not_written_where_a_family_has_them_in_another_order(tmp_path: Path) -> None:
    params = drawn.params(num_heads=N, num_kv_heads=2, features=E)
    written(tmp_path, linear.export_params(params, layout="llama", prefix=CHATGLM))
    with pytest.raises(ValueError, match=r"prefix of ChatGLM, where .* chatglm, not falcon: name"):
        pipeline.convert(tmp_path / "a.safetensors", tmp_path / "b.npz", to="falcon", num_heads=N)
    pipeline.convert(tmp_path / "a.safetensors", tmp_path / "b.npz", to="chatglm", num_heads=N)


def test_attention_across_of_megatron_core_is_carried_over(tmp_path: Path) -> None:
    """Its rows are key and value of each head in turn, and no layout packs so."""
    prefix = "decoder.layers.0.cross_attention"
    shapes = {"linear_q": (E, E), "linear_kv": (2 * E, E), "linear_proj": (E, E)}
    state = {f"{prefix}.{name}.weight": np.ones(shape) for name, shape in shapes.items()}
    own = packed("decoder.layers.0.self_attention", N, "linear_qkv", "linear_proj")
    path = written(tmp_path, own | state)
    done = pipeline.convert(path, tmp_path / "b.npz", to="jaxmha", num_heads=N)
    assert any(f"attention of no known layout, 1 x {prefix[:15]}" in note for note in done.notes)
    with pytest.raises(ValueError, match="no known layout"):
        linear.import_params(state, prefix=prefix, num_heads=N)
