"""Names that strangers chose: finding layers takes time and memory in proportion to the file."""

import time
import tracemalloc

import pytest

from jaxmha.converters.discovery import attention_blocks, damaged_blocks, unknown_attention
from jaxmha.converters.matching import decide
from jaxmha.converters.matching.layers import Layer
from jaxmha.converters.matching.templates import Template
from jaxmha.converters.matching.trees import Array
from tests import pace

PARTS = ("q", "k", "v", "out")


def seconds(count: int) -> float:
    shapes = {f"a{i}.{part}_lin9.weight": (2, 2) for i in range(count) for part in PARTS}
    start = time.process_time()
    assert len(unknown_attention.find(shapes, [], [f"b{i}" for i in range(count)])) == count
    return time.process_time() - start


def test_unknown_attention_is_found_in_linear_time() -> None:
    seconds(10)
    assert seconds(4000) < 12 * max(seconds(1000), 0.02)


def test_names_of_many_parts_take_little_memory() -> None:
    shapes = {".".join(["1"] * 400) + f".{i}.weight": (1, 1) for i in range(100)}
    tracemalloc.start()
    try:
        assert attention_blocks.find(shapes) == []
        assert damaged_blocks.find(shapes, []) == {}
        assert unknown_attention.find(shapes, []) == {}
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_unknown_attention_inside_another_or_a_damaged_block_is_left_out() -> None:
    shapes = {
        f"{at}.{part}_lin9.weight": (2, 2) for at in ("a", "a.b", "c.d", "e") for part in PARTS
    }
    found = unknown_attention.find(shapes, [], ["c", "e.f"])
    assert list(found) == ["a"]
    assert len(found["a"]) == 8


@pytest.mark.everyday(most=[3_000])
@pytest.mark.parametrize("most", [3_000, 30_000])  # the latter is the limit, which takes seconds
def test_too_many_layers_of_one_shape_are_not_matched(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def template(i: int) -> Template:
        array = Array(f"l{i}.weight", (f"l{i}", "weight"), (2, 2), "float32")
        return Template((f"l{i}",), {(): Layer((f"l{i}",), {"main": array}, "oi")})

    assert decide._MOST_FITS == 30_000
    monkeypatch.setattr(decide, "_MOST_FITS", most)
    layers = [template(i) for i in range(200)]
    start = time.process_time()
    with pytest.raises(ValueError, match="write a plan yourself"):
        decide.decide(layers, layers)
    with pytest.raises(ValueError, match="write a plan yourself"):
        decide.decide(layers * 100, layers[:60])
    assert pace.within(time.process_time() - start, 3)
