"""Files with latent attention: converted to jaxmha's layout and back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.converters import huggingface, positions_of
from jaxmha.converters.discovery import latent_blocks
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.verify import comparison, page_facts, report
from jaxmha.latent.params import leaves
from tests.converters.command_line import cli, printed, succeeds
from tests.converters.test_every_layout import model_file

N, H, R, h, L, P, D = 3, 5, 4, 7, 11, 13, 17
CONFIG = {
    "model_type": "deepseek_v3", "num_attention_heads": N, "num_key_value_heads": N,
    "qk_nope_head_dim": H, "qk_rope_head_dim": R, "v_head_dim": h, "kv_lora_rank": L,
    "q_lora_rank": P, "hidden_size": D, "rope_theta": 5e5, "max_position_embeddings": 64,
}  # fmt: skip
SHAPES = {
    "q_a_proj.weight": (P, D), "q_a_layernorm.weight": (P,), "q_b_proj.weight": (N * (H + R), P),
    "kv_a_proj_with_mqa.weight": (L + R, D), "kv_a_layernorm.weight": (L,),
    "kv_b_proj.weight": (N * (H + h), L), "o_proj.weight": (D, N * h),
}  # fmt: skip
DIRECT = {k: s for k, s in SHAPES.items() if not k.startswith("q_")} | {
    "q_proj.weight": (N * (H + R), D)
}
BIASED = SHAPES | {
    "q_a_proj.bias": (P,), "kv_a_proj_with_mqa.bias": (L + R,), "o_proj.bias": (D,)
}  # fmt: skip


def saved(folder: Path, shapes: dict[str, Any], dtype: str = "float32", **config: Any) -> Path:
    """Two layers with such attention, a linear layer in each, and a configuration."""
    rng = np.random.default_rng(0)
    state = {
        f"model.layers.{i}.{name}": rng.normal(size=shape).astype(dtype)
        for i in range(2)
        for name, shape in {
            **{f"self_attn.{key}": shape for key, shape in shapes.items()},
            "mlp.down_proj.weight": (D, 19),
        }.items()
    }
    return model_file(folder / "model.safetensors", state, CONFIG | config)


@pytest.mark.slow_variants("float16-*", "!float16-direct", "float32-direct")
@pytest.mark.parametrize("shapes", [SHAPES, DIRECT, BIASED], ids=["latent", "direct", "biased"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_files_come_back_bit_by_bit(shapes: Any, dtype: str, tmp_path: Path) -> None:
    source = saved(tmp_path, shapes, dtype)
    target, back = tmp_path / "there.safetensors", tmp_path / "back.safetensors"
    done = succeeds("convert", source, target, "--to", "jaxmha")
    assert "verified" in printed(done)
    assert "2 latent" in printed(done)
    done = succeeds("convert", target, back, "--to", "deepseek")
    assert "verified" in printed(done)
    with checkpoint.open(source) as a, checkpoint.open(back) as b, checkpoint.open(target) as c:
        assert a.info.keys() == b.info.keys()
        for name in a.info:
            assert a[name].dtype == b[name].dtype
            assert a[name].tobytes() == b[name].tobytes(), name
        held = {name: np.asarray(c[name]) for name in c.info}
        state = {name: np.asarray(a[name]) for name in a.info}
    prefix = "model.layers.1.self_attn"
    want = huggingface.import_latent_params(state, prefix=prefix)
    got = huggingface.import_latent_params(held, prefix=prefix)
    ours, theirs = leaves(got), leaves(want)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(theirs[name]), err_msg=name)
    del held[f"{prefix}.mla_key_kernel"]
    with pytest.raises(ValueError, match="layout jaxmha: mla_key_kernel missing"):
        huggingface.import_latent_params(held, prefix=prefix)


def test_meaning_and_positions_are_named(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
               "mscale": 0.7, "mscale_all_dim": 0.9}  # fmt: skip
    source = saved(tmp_path, SHAPES, rope_scaling=scaling, attention_dropout=0.1)
    target = tmp_path / "there.safetensors"
    done = pipeline.convert(source, target, to="jaxmha")
    place = "rotary, base 500000, 4 features in pairs of neighbouring features, scaling yarn"
    note = f"latent attention, 2 x layout deepseek, positions {place}"
    assert note in done.notes
    assert not any("no known layout" in one or "no attention" in one for one in done.notes)
    semantics, _ = huggingface.latent_behaviour(json.loads((tmp_path / "config.json").read_text()))
    with checkpoint.open(target) as file:
        for i in range(2):
            kept = json.loads(file.metadata[f"jaxmha.semantics.model.layers.{i}.self_attn"])
            assert kept == {"scale": semantics.scale, "dropout_rate": 0.1, "from": "deepseek"}
            assert file.metadata[f"jaxmha.positions.model.layers.{i}.self_attn"] == place
    seen = pipeline.inspect(source).notes
    assert f"{note}; --to jaxmha converts them, other layouts cannot hold them" in seen
    again = pipeline.convert(target, tmp_path / "again.safetensors", to="jaxmha")
    with checkpoint.open(target) as a, checkpoint.open(tmp_path / "again.safetensors") as b:
        assert a.info.keys() == b.info.keys()
        assert dict(a.metadata) == dict(b.metadata)
    assert again.other_layers == tuple(
        ("latent", f"model.layers.{i}.self_attn", f"model.layers.{i}.self_attn") for i in range(2)
    )


def test_other_targets_carry_it_over_and_say_the_way(tmp_path: Path) -> None:
    source, made = saved(tmp_path, SHAPES), tmp_path / "flax.safetensors"
    done = pipeline.convert(source, made, to="flax")
    assert any("--to jaxmha converts them, other layouts cannot" in one for one in done.notes)
    with checkpoint.open(source) as a, checkpoint.open(made) as b:
        for name in (name for name in a.info if "self_attn" in name):
            assert a[name].tobytes() == b[name].tobytes()


def test_what_the_other_form_cannot_hold_is_refused(tmp_path: Path) -> None:
    source, made = saved(tmp_path, SHAPES), tmp_path / "there.safetensors"
    pipeline.convert(source, made, to="jaxmha")
    with checkpoint.open(made) as file:
        state, metadata = {name: np.array(file[name]) for name in file}, dict(file.metadata)
    kernel, bias = (f"model.layers.0.self_attn.mla_{x}" for x in ("key_kernel", "query_bias"))
    for change, message in (
        ({bias: np.ones((N, H + R), np.float32)}, "cannot hold query.bias"),
        ({kernel: state[kernel].astype(np.float16)}, "kv_b_proj.weight packs arrays of one dtype"),
    ):
        checkpoint.write(made, state | change, metadata=metadata, force=True)
        with pytest.raises(ValueError, match=message):
            pipeline.convert(made, tmp_path / "back.safetensors", to="deepseek")
    assert not (tmp_path / "back.safetensors").exists()


def test_other_attention_is_refused_by_name(tmp_path: Path) -> None:
    state = {f"a.{x}_proj.weight": np.ones((6, 6), np.float32) for x in ("q", "k", "v", "out")}
    checkpoint.write(tmp_path / "model.safetensors", state)
    done = cli("convert", tmp_path / "model.safetensors", tmp_path / "b.npz", "--to", "deepseek",
               "--num-heads", "2")  # fmt: skip
    assert done.exit_code == 2
    assert "layout deepseek cannot hold query.kernel" in printed(done)


@pytest.mark.parametrize("change", [{"model_type": "longcat_flash"}, {"qk_rope_head_dim": 6}])
def test_what_is_not_known_to_compute_this_is_not_converted(change: Any, tmp_path: Path) -> None:
    """Other models have the same keys and multiply latents, for example."""
    source = saved(tmp_path, SHAPES, **change)
    with checkpoint.open(source) as file:
        assert latent_blocks.find(file) == []
        assert len(latent_blocks.find(file, known=False)) == 2
    with pytest.raises(ValueError, match="no attention block found"):
        pipeline.convert(source, tmp_path / "there.safetensors", to="jaxmha")


def test_other_arrays_under_the_prefix_are_another_attention(tmp_path: Path) -> None:
    source = saved(tmp_path, {**SHAPES, "indexer.wk.weight": (5, D)})
    with checkpoint.open(source) as file:
        assert latent_blocks.find(file) == []
    (tmp_path / "biased").mkdir()
    biased = saved(tmp_path / "biased", {**SHAPES, "kv_b_proj.bias": (N * (H + h),)})
    with checkpoint.open(biased) as file:
        assert latent_blocks.find(file) == []


def test_blocks_at_the_top_and_many_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of one block are not searched for in all names: every name is read a few times."""
    read, own = list[str](), latent_blocks._key

    def counted(prefix: str, name: str) -> str:
        read.append(name)
        return own(prefix, name)

    monkeypatch.setattr(latent_blocks, "_key", counted)
    state = {name: np.ones(shape, np.float16) for name, shape in SHAPES.items()}
    many = {f"layers.{i}.{name}": array for i in range(300) for name, array in state.items()}
    checkpoint.write(tmp_path / "model.safetensors", state | many, digest=None)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with checkpoint.open(tmp_path / "model.safetensors") as file:
        found = latent_blocks.find(file)
        assert len(read) < 3 * len(file.info)
    assert [block.prefix for block in found[:3]] == ["", "layers.0", "layers.1"]
    assert len(found) == 301


def test_a_plan_is_carried_out_and_refuses_other_targets(tmp_path: Path) -> None:
    source, plan = saved(tmp_path, SHAPES), tmp_path / "plan.toml"
    assert cli("plan", source, "--to", "jaxmha", "-o", plan).exit_code == 0
    assert 'kind = "latent"' in plan.read_text()
    done = cli("convert", source, tmp_path / "a.safetensors", "--plan", plan)
    assert (done.exit_code, "verified" in printed(done)) == (0, True), printed(done)
    plan.write_text(plan.read_text().replace('to = "jaxmha"', 'to = "flax"'))
    done = cli("convert", source, tmp_path / "b.safetensors", "--plan", plan)
    assert done.exit_code == 2
    assert "layout flax cannot hold latent attention: name deepseek or jaxmha" in printed(done)


def test_the_comparison_sees_one_number(tmp_path: Path) -> None:
    source, target = saved(tmp_path, SHAPES), tmp_path / "there.safetensors"
    done = pipeline.convert(source, target, to="jaxmha")
    assert done.plan is not None
    with checkpoint.open(target) as file:
        state, metadata = {name: np.array(file[name]) for name in file}, dict(file.metadata)
    state["model.layers.1.self_attn.mla_key_kernel"][2, 1, 3] += 1
    checkpoint.write(target, state, metadata=metadata, force=True)
    found = [one.differences for one in report.check(source, target, done.plan).modules]
    assert [x for x in found if x] == [(f"key.kernel: 1 of {L * N * H} elements differ",)]


def test_commands_compare_it_whatever_the_form(tmp_path: Path) -> None:
    source, target = saved(tmp_path, SHAPES), tmp_path / "there.safetensors"
    pipeline.convert(source, target, to="jaxmha")
    for command in ("verify", "diff"):
        done = succeeds(command, source, target)
        assert "latent attention, 2 blocks: weights compared" in printed(done)
    with checkpoint.open(target) as file:
        state = {name: np.array(file[name]) for name in file.info}
        metadata = dict(file.metadata)
    name = next(name for name in state if "mla_key_kernel" in name)
    state[name].flat[3] += 1
    checkpoint.write(target, state, metadata=metadata, force=True)
    for command in ("verify", "diff"):
        done = cli(command, source, target)
        assert done.exit_code == 1, printed(done)
        assert "key.kernel" in printed(done)
        assert "1 of" in printed(done)
    found = comparison.compare(source, target)
    for path, holds in ((source, "0.self_attn.kv_b_proj.weight"), (target, name)):
        tensors = page_facts.read(path, found, path is target).tensors
        (own,) = (one.name for one in tensors if one.result == page_facts.DIFFERS)
        assert own.endswith(holds)


def test_its_positions_are_read(tmp_path: Path) -> None:
    source = saved(tmp_path, SHAPES)
    place = positions_of(tmp_path)["model.layers.1.self_attn"]
    assert str(place) == "rotary, base 500000, 4 features in pairs of neighbouring features"
    (tmp_path / "config.json").unlink()
    assert positions_of(source)["model.layers.1.self_attn"].scheme == "unknown"
