"""Rotary positions by several coordinates, of files of timm and diffusers."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxmha.converters import positions_of
from jaxmha.converters.discovery import planes
from jaxmha.converters.discovery.positions import Positions, turned


def rotated(x: Any, angle: Any, interleaved: bool) -> Any:
    """The oracle: complex products in float64; `angle` is `T N P`."""
    front = x[..., : 2 * angle.shape[-1]]
    a, b = (front[..., 0::2], front[..., 1::2]) if interleaved else np.split(front, 2, -1)
    turned = (a + 1j * b) * np.exp(1j * angle)
    parts = turned.real, turned.imag
    done = np.stack(parts, -1).reshape(front.shape) if interleaved else np.concatenate(parts, -1)
    return np.concatenate([done, x[..., front.shape[-1] :]], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("jit", [False, True])
def test_planes_rotate_by_the_sum_of_the_angles(interleaved: bool, jit: bool) -> None:
    drawn = np.random.default_rng(0)
    x, at = drawn.normal(size=(2, 7, 3, 11)), drawn.normal(size=(7, 2))
    inv_freq = drawn.normal(size=(2, 3, 5))
    rotary = planes.Planes(inv_freq, interleaved=interleaved)
    with jax.enable_x64(True):
        mine = (jax.jit(lambda x, at: rotary(x, at)) if jit else rotary)(x, at)
    angle = np.einsum("ta,anp->tnp", at, inv_freq)
    np.testing.assert_allclose(mine, rotated(x, angle, interleaved), rtol=0, atol=1e-12)


def test_places_of_a_grid() -> None:
    assert planes.Grid(2).places(2, 3)[:4].tolist() == [[0, 0], [0, 0], [0, 0], [0, 1]]
    whole = planes.Grid(offset=1.0, reference=(4.0, 6.0)).places(2, 3)
    assert whole.tolist()[-1] == [2 / 2 * 4, 3 / 3 * 6]
    assert planes.Grid(centred=True).places(1, 2).tolist() == [[0, -0.5], [0, 0.5]]


def test_shapes_that_do_not_fit_are_refused() -> None:
    x = np.ones((1, 5, 2, 8), np.float32)
    with pytest.raises(ValueError, match=r"expected x of axes"):
        planes.Planes(np.ones((2, 3, 4)))(x, np.zeros((5, 2)))
    with pytest.raises(ValueError, match=r"places of axes \(T, 2\)"):
        planes.Square(100.0)(x, np.zeros((5, 3)))
    with pytest.raises(ValueError, match="multiple of 4"):
        planes.Square(100.0).at(6)
    with pytest.raises(ValueError, match="give places"):
        planes.evenly(planes.Square(100.0), x)


def of_timm(folder: Path, name: str, **arguments: Any) -> dict[str, Positions]:
    """The positions of a timm model of two blocks of width 16, with a class and four registers."""
    arrays: dict[str, Any] = {
        f"blocks.{i}.attn.{key}": np.ones(shape, np.float32)
        for i in range(2)
        for key, shape in (("qkv.weight", (48, 16)), ("proj.weight", (16, 16)))
    } | {"cls_token": np.zeros((1, 1, 16), np.float32), "reg_token": np.zeros((1, 4, 16), np.float32)}  # fmt: skip
    arrays["rope.freqs"] = np.arange(2 * 2 * 2 * 4, dtype=np.float32).reshape(2, 2, 2, 4)
    save_file(arrays, folder / "model.safetensors")
    content = {"architecture": name, "pretrained_cfg": {}, "model_args": arguments}
    (folder / "config.json").write_text(json.dumps(content))
    return positions_of(folder)


def test_timm_by_its_architecture(tmp_path: Path) -> None:
    found = of_timm(tmp_path, "eva02_tiny_patch14_224", num_heads=2)["blocks.1.attn"].rotary
    grid = planes.Grid(5, reference=(16, 16))
    assert found == planes.Square(10000.0, grid)
    found = of_timm(tmp_path, "eva02_tiny_patch14_224", ref_feat_shape=[4, 8])[
        "blocks.1.attn"
    ].rotary
    assert found == planes.Square(10000.0, planes.Grid(5, reference=(4, 8)))
    found = of_timm(tmp_path, "vit_small_patch16_dinov3", num_heads=2)["blocks.0.attn"].rotary
    grid = planes.Grid(5, centred=True)
    assert found == planes.Square(100.0, grid, interleaved=False, factor=2 * np.pi)
    found = of_timm(tmp_path, "vit_base_patch16_rope_mixed_224")["blocks.1.attn"].rotary
    assert isinstance(found, planes.Planes)
    columns, rows = np.arange(32).reshape(2, 2, 2, 4)[:, 1]
    np.testing.assert_array_equal(found.inv_freq, [rows, columns])


def test_unknown_architectures_are_named(tmp_path: Path) -> None:
    found = of_timm(tmp_path, "sapiens2_1b", num_heads=2)["blocks.0.attn"]
    assert (found.scheme, found.rotary) == ("unknown", None)
    assert "sapiens2_1b are not known" in found.why
    found = of_timm(tmp_path, "eva02_tiny_patch14_224", rope_type="mrope")["blocks.0.attn"]
    assert found.scheme == "unknown"


def test_mixed_frequencies_rotate_every_head_of_its_own(tmp_path: Path) -> None:
    found = of_timm(tmp_path, "vit_base_patch16_rope_mixed_224")["blocks.0.attn"]
    x = np.random.default_rng(0).normal(size=(1, 5 + 9, 2, 8))
    with jax.enable_x64(True):
        mine, _ = turned(found, x, x)
    columns, rows = np.arange(32.0).reshape(2, 2, 2, 4)[:, 0]
    at = np.indices((3, 3)).reshape(2, 9)
    angle = at[0][:, None, None] * rows + at[1][:, None, None] * columns
    angle = np.concatenate([np.zeros((5, 2, 4)), angle])
    np.testing.assert_allclose(mine, rotated(x, angle, True), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", planes.VIDEOS)
def test_videos_rotate_by_frame_row_and_column(tmp_path: Path, name: str) -> None:
    prefix, heads, width = "transformer_blocks.0.attn1", 3, 16
    arrays: dict[str, Any] = {f"{prefix}.{key}.weight": np.ones((48, 48), np.float32) for key in ("to_q", "to_k", "to_v", "to_out.0")}  # fmt: skip
    arrays |= {f"{prefix}.norm_{x}.weight": np.ones(48, np.float32) for x in "qk"}
    save_file(arrays, tmp_path / "model.safetensors")
    content = {"_class_name": name, "num_attention_heads": heads, "attention_head_dim": width}
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = positions_of(tmp_path)[prefix].rotary
    assert isinstance(found, planes.Planes)
    assert found.interleaved
    assert ((found.inv_freq != 0).sum(0) == 1).all()  # every pair turns by one coordinate
    if name.startswith("Wan"):
        assert (found.inv_freq[:, 0] != 0).sum(-1).tolist() == [4, 2, 2]
        assert found.inv_freq[1, 0, 4:6].tolist() == [1.0, 10000.0**-0.5]
    else:
        assert (found.inv_freq != 0).sum((1, 2)).tolist() == [8, 8, 8]
        assert found.single
