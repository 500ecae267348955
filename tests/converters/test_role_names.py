"""Layouts made of the names in a file: attention classes that no table lists."""

import numpy as np
import pytest

from jaxmha.converters.discovery import attention_blocks, unknown_attention
from jaxmha.converters.layout import registry
from jaxmha.converters.migrate import pipeline

N, H, D = 2, 3, 5
# Names of layers -> rows of their kernels; the last is the output.
CLASSES = {
    "four": {"q_net9": 6, "k_net9": 6, "v_net9": 6, "unify": D},
    "grouped": {"to_queries": 6, "to_keys": 3, "to_values": 3, "to_out.0": D},
    "keys and values": {"to_q": 6, "to_kv": 12, "to_out.0": D},
    "queries and keys": {"qk": 12, "v": 6, "proj": D},
    "packed": {"to_qkv": 18, "to_out.0": D},
    "nested": {"self.queries": 6, "self.keys": 6, "self.values": 6, "output.dense": D},
}


def state(rows: dict[str, int], biases: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    last = list(rows)[-1]
    found = {f"a.{n}.weight": rng.normal(size=(m, 6 if n == last else D)) for n, m in rows.items()}
    if biases:
        found |= {f"a.{n}.bias": rng.normal(size=m) for n, m in rows.items()}
    return found


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_names_of_a_file_make_a_layout(name: str, biases: bool) -> None:
    arrays = state(CLASSES[name], biases)
    (block,) = attention_blocks.find({k: v.shape for k, v in arrays.items()})
    assert block.prefix == "a"
    assert block.layout.name == "linear:" + ",".join(CLASSES[name])
    converted = pipeline.convert_state(arrays, to="flax", num_heads=N)
    assert np.shape(converted["a/query/kernel"]) == (D, N, H)
    back = pipeline.convert_state(converted, to=block.layout.name, num_heads=N)
    assert back.keys() == arrays.keys()
    for key, array in arrays.items():
        np.testing.assert_array_equal(back[key], array)


@pytest.mark.parametrize(
    "more",
    [
        {"a.rel.weight": (6, 6)},  # an array of no known role
        {"a.temperature": (2,)},
        {"a.k_net9.weight": (3, D)},  # keys of another width than values
        {"a.v_net9.weight": (6, D, 1)},
        {"a.query.weight": (6, D)},  # two layers of one role
    ],
)
def test_doubt_makes_no_layout(more: dict[str, tuple[int, ...]]) -> None:
    shapes: dict[str, tuple[int, ...]] = {
        k: v.shape for k, v in state(CLASSES["four"], False).items()
    }
    shapes |= more
    assert not attention_blocks.find(shapes)


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("mixer", ("in_proj", "out_proj")),  # Mamba
        ("attn", ("qkv_proj", "out_proj")),  # CodeGen packs in another order
        ("h.0.attn", ("qkv_proj", "out_proj")),  # the same, where h.0 has nothing else
        ("channel_attn", ("to_qkv", "to_out")),  # weighs channels
    ],
)
def test_names_of_another_function_make_no_layout(prefix: str, names: tuple[str, str]) -> None:
    shapes = {f"{prefix}.{names[0]}.weight": (18, 6), f"{prefix}.{names[1]}.weight": (6, 6)}
    assert not attention_blocks.find(shapes)


def test_the_place_tells_the_order_of_packed_rows() -> None:
    """DeepSeek-OCR packs queries, keys and values; CodeGen has the same names."""
    at = "model.vision_model.transformer.layers.0.self_attn"
    shapes = {f"{at}.qkv_proj.weight": (18, 6), f"{at}.out_proj.weight": (6, 6)}
    (block,) = attention_blocks.find(shapes)
    assert (block.prefix, block.layout.name) == (at, "linear:qkv_proj,out_proj")


@pytest.mark.parametrize("mark", ["mixer.A_log", "mixer/A_log"])
def test_projections_of_mamba_are_no_attention_in_converted_files(mark: str) -> None:
    """A conversion renames projections, with slashes, and carries the other arrays, with dots."""
    shapes = {"mixer/in_proj/kernel": (6, 18), "mixer/out_proj/kernel": (6, 6), mark: (5,)}
    assert not unknown_attention.find(shapes, [])
    del shapes[mark]
    assert [*unknown_attention.find(shapes, [])] == ["mixer"]


def test_norms_before_the_projections_are_known_by_place() -> None:
    shapes = {f"{x}.weight": (6,) if "norm" in x else (18, 6) if "qkv" in x else (6, 6) for x in
              ("norm", "to_qkv", "to_out.0")}  # fmt: skip
    for prefix, count in (("transformer.layers.0.0", 1), ("attn", 0)):
        found = attention_blocks.find({f"{prefix}.{k}": v for k, v in shapes.items()})
        assert len([block for block in found if not block.unknown]) == count


@pytest.mark.parametrize("name", ["linear:a", "linear:a,a", "linear:a,b/c", "linear:", "other:a,b"])
def test_names_that_make_no_layout_are_unknown(name: str) -> None:
    with pytest.raises(ValueError, match="unknown layout"):
        registry.named(name)


def test_a_pool_of_latent_queries_is_attention() -> None:
    """timm's pool: a learned query, and a feed-forward layer after the attention."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{x}.weight": (6, 6) for x in ("q", "proj", "mlp.fc1", "mlp.fc2")
    }
    shapes |= {"kv.weight": (12, 6), "norm.weight": (6,), "latent": (1, 1, 6)}
    (block,) = attention_blocks.find({f"attn_pool.{k}": v for k, v in shapes.items()})
    assert (block.layout.name, block.unknown) == ("linear:q,kv,proj", ())


def test_an_incomplete_block_yields_to_the_one_inside_it() -> None:
    """TVP names its attention and its feed-forward layers as ViT names one block."""
    shapes = {f"layer.0.attention.{x}.weight": (6, 6) for x in ("query", "key", "value", "dense")}
    shapes |= {"layer.0.output.dense.weight": (6, 24), "layer.0.intermediate.dense.weight": (24, 6)}
    (block,) = attention_blocks.find(shapes)
    assert (block.prefix, block.layout.name) == ("layer.0.attention", "linear-query")
