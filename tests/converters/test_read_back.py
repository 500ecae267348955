"""Converted files can be read back, and half a block never passes for another tensor."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as pytorch
from torch.nn.utils import parametrize

from jaxmha import checkpoint
from jaxmha.converters import torch as convert
from jaxmha.converters.discovery import attention_blocks, damaged_blocks, places
from jaxmha.converters.layout import registry
from jaxmha.converters.layout.base import Layout
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.verify import comparison
from jaxmha.params import CANONICAL, leaves
from tests.converters.test_every_layout import exported

HEADS, WIDTH = 2, 6
# The leaves of a BERT block: the projections with biases.
HELD = {leaf for leaf in CANONICAL if leaf.partition(".")[0] in ("query", "key", "value", "out")}
# Their names or arrays serve unequal widths of inputs alone.
UNEQUAL = {"torch-separate", "llama-across"}


def cannot(layout: Layout) -> bool:
    """True if a layout lacks a leaf of a BERT block, or needs another one."""
    leaves = {leaf for entry in layout.entries for leaf in entry.leaves}
    needed = {leaf for entry in layout.entries if not entry.group for leaf in entry.leaves}
    elsewhere = layout.name in (
        *UNEQUAL,
        *places.OF_FAMILIES,
        *places.NAMED,
    )  # or is of other prefixes
    return not needed <= HELD <= leaves or elsewhere


FILES = [name for name in (layout.name for layout in registry.LAYOUTS) if "file" not in name]


def bert(folder: Path, count: int = 2) -> Path:
    """A BERT checkpoint, which has a normalisation under the prefix of its attention."""
    state: dict[str, Any] = {"embeddings.weight": np.ones((3, WIDTH), np.float32)}
    rng = np.random.default_rng(0)
    for i in range(count):
        prefix = f"encoder.layer.{i}.attention"
        state[f"{prefix}.output.LayerNorm.weight"] = rng.normal(size=WIDTH).astype("f")
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            state[f"{prefix}.{name}.weight"] = rng.normal(size=(WIDTH, WIDTH)).astype("f")
            state[f"{prefix}.{name}.bias"] = rng.normal(size=WIDTH).astype("f")
    checkpoint.write(folder / "model.safetensors", state)
    return folder / "model.safetensors"


# One of each way to name and pack arrays, and two that cannot hold the block.
EVERYDAY = [
    "torch", "keras", "flax", "vit", "gpt2", "gpt-neox", "llama", "equinox", "haiku",
    "linear-packed", "t5",
]  # fmt: skip


@pytest.mark.everyday(layout=EVERYDAY)
@pytest.mark.parametrize("layout", FILES)
def test_every_layout_is_read_back(layout: str, tmp_path: Path) -> None:
    source, present, back = bert(tmp_path), tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    try:
        pipeline.convert(source, present, to=layout, num_heads=HEADS)
    except ValueError:  # what the layout cannot hold
        assert cannot(attention_blocks.named(layout))
        assert not present.exists()
        return
    assert not cannot(attention_blocks.named(layout))
    assert comparison.compare(source, present, num_heads=HEADS)
    pipeline.convert(present, back, to="bert")
    assert comparison.compare(source, back, num_heads=HEADS)
    old, new = checkpoint.open(source), checkpoint.open(back)
    with old, new:
        for name in old:
            np.testing.assert_array_equal(old[name], new[name])


@pytest.mark.parametrize("key", ["self.query.weight", "self.value.weight", "output.dense.weight"])
def test_a_missing_array_is_named(key: str, tmp_path: Path) -> None:
    """Whichever it is, also the first of the table, next to a block that is whole."""
    with checkpoint.open(bert(tmp_path)) as file:
        state = {name: file[name] for name in file}
    del state[f"encoder.layer.1.attention.{key}"]
    source = tmp_path / "less.safetensors"
    checkpoint.write(source, state)
    with pytest.raises(ValueError, match=rf"layer\.1\.attention looks like .* lacks {key}"):
        pipeline.convert(source, tmp_path / "out.npz", to="flax", num_heads=HEADS)
    assert not (tmp_path / "out.npz").exists()


def test_other_layers_are_not_damaged_attention() -> None:
    """An MLP with a name of GPT-2's, and a mixer with names of torch's, are neither."""
    shapes = {
        "h.0.mlp.c_fc.weight": (6, 24), "h.0.mlp.c_fc.bias": (24,),
        "h.0.mlp.c_proj.weight": (24, 6), "h.0.mlp.c_proj.bias": (6,),
        "mixer.in_proj.weight": (24, 6), "mixer.out_proj.weight": (6, 12),
        "mixer.out_proj.bias": (6,), "head.out.kernel": (6, 3), "head.out.bias": (3,),
        "norm.weight": (6,), "key.weight": (6, 6), "self.query.weight": (6, 6),
    }  # fmt: skip
    assert damaged_blocks.describe(shapes, attention_blocks.find(shapes)) == []


def test_a_width_that_does_not_fit_names_both_arrays(tmp_path: Path) -> None:
    shapes = {name: array.shape for name, array in exported("gpt2", "h.0.attn").items()}
    shapes["h.0.attn.c_proj.bias"] = (shapes["h.0.attn.c_proj.bias"][0] + 1,)
    (reason,) = damaged_blocks.describe(shapes, attention_blocks.find(shapes))
    assert "c_proj.bias of shape" in reason
    assert "while c_proj.weight of shape" in reason


@pytest.mark.parametrize("where", ["config.json", "metadata"])
def test_a_head_count_that_contradicts_the_file_is_refused(where: str, tmp_path: Path) -> None:
    source = bert(tmp_path)
    if where == "config.json":
        (tmp_path / "config.json").write_text('{"num_attention_heads": 2}')
    else:
        with checkpoint.open(source) as file:
            state = {name: file[name] for name in file}
        source = tmp_path / "kept.safetensors"
        checkpoint.write(source, state, metadata={"jaxmha.num_heads": "2"})
    with pytest.raises(ValueError, match=rf"a head count of 3 is given, and {where}.* says 2"):
        pipeline.convert(source, tmp_path / "out.npz", to="flax", num_heads=3)
    pipeline.convert(source, tmp_path / "out.npz", to="flax", num_heads=2)


class Doubled(pytorch.nn.MultiheadAttention):
    """Not what its parameters say."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(*args, **kwargs)
        return 2 * out, weights


def test_layers_that_do_more_than_torch_are_refused() -> None:
    with pytest.raises(ValueError, match="Doubled has a forward of its own"):
        convert.from_module(Doubled(WIDTH, HEADS))
    layer = pytorch.nn.MultiheadAttention(WIDTH, HEADS)
    handle = layer.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="forward hooks"):
        convert.from_module(layer)
    handle.remove()
    parametrize.register_parametrization(layer.out_proj, "bias", pytorch.nn.Softplus())
    bias = leaves(convert.from_module(layer, batch_first=False).params)["out.bias"]
    np.testing.assert_array_equal(bias, layer.out_proj.bias.detach())
