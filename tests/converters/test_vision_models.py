"""Vision models of transformers whose attention has names of its own, and norms without a name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t

from jaxmha import checkpoint, multi_head_attention
from jaxmha.converters import linear
from jaxmha.converters.migrate import pipeline
from tests.converters.command_line import succeeds
from tests.converters.test_every_layout import model_file
from tests.converters.test_families import state_of

D, N = 12, 3
_SIZES = {
    "hidden_size": D,
    "intermediate_size": 7,
    "num_hidden_layers": 1,
    "num_attention_heads": N,
}
_IMAGE = {"image_size": 8, "patch_size": 4}
_TEXT = {
    "vocab_size": 31, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2,
    "sep_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def saved(folder: Path, model: Any) -> Path:
    return model_file(folder / "model.safetensors", state_of(model), model.config.to_dict())


def run(*arguments: Any) -> str:
    return " ".join(succeeds(*arguments).stdout.split())


def test_blip_packs_queries_keys_and_values(tmp_path: Path) -> None:
    """Its own forward is softmax attention of the weights that are converted."""
    model = t.BlipVisionModel(t.BlipVisionConfig(**_SIZES, **_IMAGE)).eval()
    text = run("convert", saved(tmp_path, model), tmp_path / "b.npz", "--to", "flax")
    assert "1 attention blocks converted" in text
    assert "verified: " in text
    attention = model.encoder.layers[0].self_attn
    params, _ = linear.import_params(
        attention.state_dict(), layout="linear-qkv-projection", num_heads=N
    )
    x = np.random.default_rng(0).normal(size=(2, 5, D)).astype("f")
    with torch.no_grad():
        expected = attention(torch.tensor(x))[0].numpy()
    np.testing.assert_allclose(multi_head_attention(params, x), expected, atol=2e-6)


def test_groupvit_is_converted_but_for_its_assignment(tmp_path: Path) -> None:
    config = {**_SIZES, **_IMAGE, "depths": [1, 1, 0], "num_group_tokens": [4, 2, 0],
              "num_output_groups": [4, 2, 0]}  # fmt: skip
    model = t.GroupViTVisionModel(t.GroupViTVisionConfig(**config))
    path = saved(tmp_path, model)
    assert pipeline.inspect(path).damaged == ()
    text = run("convert", path, tmp_path / "b.npz", "--to", "flax")
    assert "attention blocks converted" in text
    assert "layers of another form than softmax attention" in text
    assert "downsample.assign" in text


NORMS: dict[str, tuple[str, bool, bool]] = {
    # Name of the norm, whether it is converted, whether a note says what else it could be.
    "norm1": ("block.norm1", True, True),
    "named layer norm": ("block.layer_norm", True, False),
    "ln_f": ("ln_f", True, False),
    "next to convolutions": ("res.norm1", False, False),
    "at the end": ("norm_out", True, True),
}


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_could_be_of_groups(kind: str, tmp_path: Path) -> None:
    name, converted, reported = NORMS[kind]
    ones = np.ones(D, np.float32)
    state = {
        "attn.in_proj_weight": np.ones((3 * D, D), np.float32), "attn.in_proj_bias": np.ones(3 * D, np.float32),
        "attn.out_proj.weight": np.eye(D, dtype=np.float32), "attn.out_proj.bias": ones,
        f"{name}.weight": ones, f"{name}.bias": ones,
        "res.conv1.weight": np.ones((D, 5, 3, 3), np.float32), "res.conv1.bias": ones,
    }  # fmt: skip
    checkpoint.write(tmp_path / "a.npz", state)
    done = pipeline.convert(tmp_path / "a.npz", tmp_path / "b.npz", to="flax", num_heads=N)
    assert (f"{name}.weight" not in done.carried) == converted
    assert any("GroupNorm" in note and name in note for note in done.notes) == reported
    assert any("may be of groups" in step.why for step in done.plan.steps) != converted  # type: ignore[union-attr]


@pytest.mark.parametrize("to", ["flax", "haiku"])
def test_a_norm_without_a_bias_is_called_neither_kind(to: str, tmp_path: Path) -> None:
    """Flax keeps LayerNorm(use_bias=False) and RMSNorm in the same arrays."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = torch.nn.MultiheadAttention(D, N)
            self.norm = torch.nn.RMSNorm(D)

    checkpoint.write(tmp_path / "a.npz", state_of(Model()))
    text = run("convert", tmp_path / "a.npz", tmp_path / "b.npz", "--to", to, "--num-heads", N)
    assert ("LayerNorm or RMSNorm: no tensor tells" in text) == ("x norm" in text)
    assert "norm" in text
    assert "rounding floors (1 is the least, similar in both files is good)" in text
