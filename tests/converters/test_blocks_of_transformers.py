"""Blocks of live models of transformers are found, each by its family, and read."""

import re
from pathlib import Path

import numpy as np
import pytest
import transformers as t

from jaxmha import checkpoint
from jaxmha.converters.discovery import attention_blocks, damaged_blocks
from jaxmha.converters.layout.arrays import to_numpy
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.verify import comparison
from tests.converters.test_blocks import Shapes


@pytest.mark.filterwarnings("default")
def test_families_that_need_their_configuration_are_refused_by_name(tmp_path: Path) -> None:
    """The configuration of Gemma 2 says how its blocks compute."""
    some = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2, "vocab_size": 11}
    gemma = {**some, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 8}
    model = t.Gemma2ForCausalLM(t.Gemma2Config(**gemma))
    reason = r"its scale \(query_pre_attn_scalar \*\* -0.5\) and soft cap"
    state = {key: to_numpy(tensor) for key, tensor in model.state_dict().items()}
    shapes: Shapes = {key: array.shape for key, array in state.items()}
    found = attention_blocks.find(shapes)
    assert [block.family and block.family[0] for block in found] == ["Gemma 2"] * 2
    message = rf"layers\.0\.self_attn is of Gemma 2: .*{reason}"
    with pytest.raises(ValueError, match=message):
        found[0].read(state, 3)
    assert re.search(message, damaged_blocks.describe(shapes, found)[0])
    checkpoint.write(tmp_path / "a.npz", state)
    with pytest.raises(ValueError, match=message):
        pipeline.convert(tmp_path / "a.npz", tmp_path / "b.npz", to="flax", num_heads=3)
    with pytest.raises(ValueError, match=message):
        comparison.compare(tmp_path / "a.npz", tmp_path / "a.npz", num_heads=3)
    assert re.search(message, pipeline.inspect(tmp_path / "a.npz", num_heads=3).damaged[0])


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("keys", [1, 3])
def test_every_packing_of_falcon_is_read(keys: int) -> None:
    """One head of keys, and groups of queries with a key and a value each."""
    grouped = {"new_decoder_architecture": True, "num_kv_heads": keys} if keys > 1 else {}
    heads = 6
    model = t.FalconForCausalLM(
        t.FalconConfig(
            hidden_size=24, num_attention_heads=heads, num_hidden_layers=1, vocab_size=20, **grouped
        )
    )
    state = {key: to_numpy(tensor) for key, tensor in model.state_dict().items()}
    (block,) = attention_blocks.find({key: array.shape for key, array in state.items()})
    assert block.family == ("Falcon", "h.{i}.self_attention")
    params, _ = block.read(state, heads)
    packed = model.transformer.h[0].self_attention.query_key_value.weight
    theirs = model.transformer.h[0].self_attention._split_heads(packed.T[None])
    for mine, other in zip(params[:3], theirs, strict=True):
        width = np.shape(mine.kernel)[1]
        given = to_numpy(other.detach())[0].reshape(24, -1, 4)
        given = given[:, :: given.shape[1] // width]  # Falcon repeats a head for its queries
        np.testing.assert_array_equal(mine.kernel, given)
