"""Semantics in a config.json or in metadata count wherever a block is read or compared."""

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxmha import checkpoint
from jaxmha.converters.discovery import behaviours, stored_semantics
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.sharded.distributed import load_sharded
from jaxmha.converters.verify import comparison, load_block
from tests.converters.command_line import cli, succeeds
from tests.converters.test_behaviours import GRANITE, PREFIX, source
from tests.converters.test_every_layout import N

NOWHERE = PartitionSpec()  # type: ignore[no-untyped-call]
_SIZES = {"vocab_size": 11, "hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 1}
_DECODER = _SIZES | {"intermediate_size": 14, "num_key_value_heads": 3}
# Name of a configuration in transformers -> its settings, and the scale of its attention.
FAMILIES: dict[str, tuple[dict[str, Any], float]] = {
    "T5Config": (
        {"vocab_size": 11, "d_model": 12, "d_kv": 4, "num_heads": 3, "d_ff": 14, "num_layers": 1},
        1.0,
    ),
    "GraniteConfig": (_DECODER | {"attention_multiplier": 0.3}, 0.3),
    "Gemma2Config": (_DECODER | {"head_dim": 4, "query_pre_attn_scalar": 9}, 1 / 3),
    "GPTNeoConfig": (
        {"vocab_size": 11, "hidden_size": 12, "num_heads": 3, "num_layers": 1, "bos_token_id": 1,
         "eos_token_id": 1, "max_position_embeddings": 16, "attention_types": [[["global"], 1]]},
        1.0,
    ),
    "DebertaV2Config": (
        _SIZES | {"intermediate_size": 14, "relative_attention": True, "pos_att_type": ["c2p"],
                  "max_position_embeddings": 16},
        8**-0.5,
    ),
    "GPT2Config": (
        {"vocab_size": 11, "n_embd": 12, "n_head": 3, "n_layer": 1, "scale_attn_weights": False},
        1.0,
    ),
    "Qwen3Config": (_DECODER | {"head_dim": 4, "rms_norm_eps": 1e-5}, 0.5),
}  # fmt: skip


def save(name: str, folder: Path) -> Path:
    """A tiny model of the family, with random weights, as transformers saves it."""
    folder.mkdir()
    config, state = _built(name)
    checkpoint.write(folder / "model.safetensors", state)
    config.save_pretrained(folder)
    return folder


@cache
def _built(name: str) -> tuple[Any, dict[str, np.ndarray]]:
    import torch
    import transformers

    config = getattr(transformers, name)(**FAMILIES[name][0])
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config)
    state = {key: torch.randn(x.shape).numpy() for key, x in model.named_parameters()}
    return config, state


def changed(path: Path, **changes: Any) -> Path:
    """A copy of a file with other semantics in its metadata, and equal tensors."""
    with checkpoint.open(path) as file:
        state = {name: np.asarray(file[name]) for name in file.info}
        metadata = {
            key: json.dumps(json.loads(text) | changes)
            if key.startswith(stored_semantics.METADATA)
            else text
            for key, text in file.metadata.items()
        }
    checkpoint.write(path.with_name("changed.safetensors"), state, metadata=metadata)
    return path.with_name("changed.safetensors")


@pytest.mark.everyday(name=["T5Config", "Gemma2Config", "DebertaV2Config"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversion_computes_by_the_configuration(name: str, tmp_path: Path) -> None:
    folder, made = save(name, tmp_path / "model"), tmp_path / "o.safetensors"
    assert "verified" in succeeds("convert", folder, made, "--to", "jaxmha").output
    for command in ("verify", "diff"):
        assert (found := cli(command, folder, made)).exit_code == 0, found.output
    scale = FAMILIES[name][1]
    for path in (folder, made):  # that of `plot` and `describe`
        semantics = load_block.read(path).semantics
        assert semantics.scale == pytest.approx(scale) or (semantics.scale, scale) == (None, 0.5)
    for command in ("verify", "diff"):
        found = cli(command, folder, changed(made, scale=0.75))
        assert found.exit_code == 1, found.output
        assert "0.75" in found.output
        made.with_name("changed.safetensors").unlink()


@pytest.mark.slow_variants("same")
@pytest.mark.parametrize("dtype", [(), ("--dtype", "bfloat16")], ids=["same", "bfloat16"])
def test_norms_are_known_where_no_configuration_lies(
    dtype: tuple[str, ...], tmp_path: Path
) -> None:
    folder, made = save("Qwen3Config", tmp_path / "model"), tmp_path / "o.safetensors"
    succeeds("convert", folder, made, "--to", "llama-norm", *dtype)
    assert load_block.read(made).semantics.qk_norm_epsilon == 1e-5
    if not dtype:
        assert (found := cli("verify", folder, made)).exit_code == 0, found.output
        succeeds("convert", made, tmp_path / "again.safetensors", "--to", "jaxmha")


@pytest.mark.slow_variants("changes0")
@pytest.mark.parametrize("changes", [{"scale": 0.3}, {"logits_soft_cap": 20.0}])
def test_equal_tensors_of_another_function_differ(changes: dict[str, Any], tmp_path: Path) -> None:
    path, made = source(tmp_path, "llama", GRANITE), tmp_path / "o.safetensors"
    pipeline.convert(path, made, to="jaxmha")
    other = changed(made, **changes)
    for a, b in ((made, made), (made, other)):
        with checkpoint.open(a) as x, checkpoint.open(b) as y:
            assert comparison.compare(x, y).same == comparison.compare(a, b).same == (a == b)
    (block,) = comparison.compare(made, other).blocks
    assert [text.split()[0] for text in block.behaviour] == list(changes)


def test_a_folded_scale_is_not_read_from_the_configuration_again(tmp_path: Path) -> None:
    path, made = source(tmp_path, "llama", GRANITE), tmp_path / "o.safetensors"
    succeeds("convert", path, made, "--to", "linear-wo", "--fold-scale")
    with checkpoint.open(made) as file:
        assert [block.layout.semantics.scale for block in behaviours.blocks(file)] == [None]


@pytest.mark.parametrize("to", ["llama", "jaxmha"])
def test_a_block_is_loaded_with_its_semantics(to: str, tmp_path: Path) -> None:
    path = source(tmp_path, "llama", GRANITE)
    if to == "jaxmha":
        pipeline.convert(path, path := tmp_path / "o.safetensors", to=to)
    mesh = jax.make_mesh((1,), ("tensor",))
    specs = partial(jax.tree.map, lambda _: NOWHERE)
    _, semantics = load_sharded(path, mesh, specs, layout=to, num_heads=N, prefix=f"{PREFIX}.")
    assert semantics.scale == 0.25


def test_blocks_that_are_carried_over_keep_their_semantics(tmp_path: Path) -> None:
    pipeline.convert(source(tmp_path, "llama", GRANITE), made := tmp_path / "b.npz", to="jaxmha")
    with checkpoint.open(made) as file:
        state = {name: np.asarray(file[name]) for name in file.info}
        more = {f"t.{key}_proj.weight": np.eye(N, dtype="f4") for key in ("q", "k", "v", "out")}
        (tmp_path / "elsewhere").mkdir()
        mixed = tmp_path / "elsewhere" / "mixed.npz"
        checkpoint.write(mixed, state | more, metadata=file.metadata)
    kept = mixed.with_name("kept.npz")
    pipeline.convert(mixed, kept, to="flax", from_="linear", num_heads=N)
    with checkpoint.open(kept) as file:
        scales = {block.prefix: block.layout.semantics.scale for block in behaviours.blocks(file)}
    assert scales == {PREFIX: 0.25, "t": None}


def test_norms_without_semantics_name_their_block(tmp_path: Path) -> None:
    path, made = save("Qwen3Config", tmp_path / "model"), tmp_path / "o.safetensors"
    pipeline.convert(path, made, to="jaxmha")
    with checkpoint.open(made) as file:
        state = {name: np.asarray(file[name]) for name in file.info}
    checkpoint.write(bare := tmp_path / "bare.safetensors", state)
    found = cli("verify", made, bare)
    assert found.exit_code == 2, found.output
    text = " ".join(found.output.split())
    assert f"{bare}, block layers.0.self_attn: semantics.qk_norm is None" in text
