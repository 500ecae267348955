"""Metadata of a .safetensors file that a stranger wrote: commands refuse it in words."""

import contextlib
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.converters.discovery import attention_blocks, head_count, keras_groups, stored_semantics
from jaxmha.converters.migrate import pipeline
from tests.converters.test_every_layout import exported

NASTY = {
    "empty_object": "{}",
    "list_of_pairs": '[["from", "torch"]]',
    "number": "5",
    "deep": "[" * 100_000,
    "deep_object": '{"a":' * 900 + "1" + "}" * 900,
    "digits": '{"scale": ' + "9" * 4000 + "}",
    "too_many_digits": '{"scale": ' + "9" * 5000 + "}",
    "beyond_a_float": '{"scale": 1e999}',
    "not_a_number": '{"scale": NaN}',
    "text": '{"scale": "1"}',
    "list": '{"scale": [1], "from": ["torch"]}',
    "twice": '{"scale": 1, "scale": 2}',
    "unknown": '{"a b": 1}',
    "surrogate": '{"from": "\ud800"}',
    "other_settings": '{"head_dim": 1, "clip_qkv": {}, "qk_norm": 3}',
}


READERS: dict[str, Callable[[attention_blocks.Block, dict[str, str]], object]] = {
    f"{stored_semantics.METADATA}.a": lambda block, given: stored_semantics.target(
        block.layout, block, given
    ),
    keras_groups.METADATA: lambda block, given: keras_groups.from_metadata(given),
}


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    return exported("jaxmha", "a")


@pytest.mark.slow_variants(
    "*", "!*-digits", "!*-other_settings", "!*-twice", "!*.a-deep", "!*-list", "!*-surrogate"
)
@pytest.mark.parametrize("name", NASTY)
@pytest.mark.parametrize("key", [f"{stored_semantics.METADATA}.a", keras_groups.METADATA])
def test_nonsense_is_refused_or_left_out(
    key: str, name: str, tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    path = tmp_path / "m.safetensors"
    if name == "surrogate":
        (block,) = attention_blocks.find({n: x.shape for n, x in tensors.items()})
        found = stored_semantics.target(block.layout, block, {key: NASTY[name]})
        assert found.name == "jaxmha"
        return
    checkpoint.write(path, tensors, metadata={key: NASTY[name]})
    for run in (
        lambda: pipeline.inspect(path),
        lambda: pipeline.plan(path, to="torch"),
        lambda: pipeline.convert(path, tmp_path / "o.weights.h5", to="keras", force=True),
        lambda: pipeline.convert(path, tmp_path / "o.safetensors", to="jaxmha", force=True),
    ):
        with contextlib.suppress(ValueError):
            run()


@pytest.mark.parametrize("key", READERS)
def test_metadata_is_counted_before_it_is_parsed(key: str, tensors: dict[str, np.ndarray]) -> None:
    text = '{"a": [' + "[]," * 1_000_000 + "[]]}"
    (block,) = attention_blocks.find({n: x.shape for n, x in tensors.items()})
    tracemalloc.start()
    try:
        with pytest.raises(checkpoint.BudgetExceeded):
            READERS[key](block, {key: text})
        assert tracemalloc.get_traced_memory()[1] < 4 * len(text)
    finally:
        tracemalloc.stop()


def test_a_head_count_of_thousands_of_digits_is_none(tensors: dict[str, np.ndarray]) -> None:
    shapes = {"a." + part: (8, 8) for part in ("q_proj.weight", "k_proj.weight")}
    shapes |= {"a." + part: (8, 8) for part in ("v_proj.weight", "o_proj.weight")}
    (block,) = attention_blocks.find(shapes)
    for text in ("9" * 4000, "9" * 5000, "\u0661", "-1", "1.0", ""):
        found, _ = head_count.find(block, shapes, metadata={head_count.METADATA: text})
        assert found is None, text
